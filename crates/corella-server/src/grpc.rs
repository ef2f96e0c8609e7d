//! The services of the gRPC port. A call is a request like those of HTTP: the same keys, limits and accounts hold.

pub mod grpc_shape;
pub mod health;
pub mod read_deadline;
pub mod vllm;
