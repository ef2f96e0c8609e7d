//! Endpoints about the server: its health, models, role, caches and page.

pub mod adapter_load;
pub mod api_description;
pub mod engine_event;
pub mod engine_stream;
pub mod health;
pub mod model_list;
pub mod model_load;
pub mod page;
pub mod prefix_cache;
pub mod role;
pub mod sleep;
