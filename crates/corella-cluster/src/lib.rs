//! Several nodes that serve as one.
//!
//! A prefill node and a decode node serve a request together: `session` drives the machines of
//! `corella-core` that hold its whole life, over one gRPC stream for each request.

pub mod session;
