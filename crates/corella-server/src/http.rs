//! The way of a request to its handler: routes, and the layers of every request.

pub mod accounting;
pub mod auth;
pub mod cors;
pub mod grpc_router;
pub mod model_choice;
pub mod request_head;
pub mod router;
pub mod unread_body;
pub mod waiting_stream;
