//! The configuration of the server.

pub mod allowed_origins;
pub mod api_key;
pub mod keep_alive;
pub mod serve_config;
pub mod server_config;
pub mod tls;
