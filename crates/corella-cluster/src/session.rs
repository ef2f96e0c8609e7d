//! Drives the session machines of `corella-core` over gRPC.

mod service;
mod wire;
