//! The loop that drives core and executor on its own thread. Tokens only.
