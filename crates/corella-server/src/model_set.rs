//! The models of a server, which are loaded by use.

pub mod driver;
mod loader_thread;
pub mod model_card;
pub mod model_loader;
pub mod model_table;
pub mod model_use;
pub mod model_view;
