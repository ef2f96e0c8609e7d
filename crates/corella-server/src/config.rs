//! The configuration of the server.

pub mod allowed_origins;
pub mod api_key;
pub mod serve_config;
pub mod tls;
