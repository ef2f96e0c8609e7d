//! The `corella` command.

fn main() {}
