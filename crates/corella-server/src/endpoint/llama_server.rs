//! llama-server's own API: `/completion`, `/infill`, `/embedding`, `/apply-template`, and its clients' questions about
//! the server.

mod answer;
mod chat_prompt;
mod completion;
mod draw_fields;
mod embedding;
mod indentation;
mod infill;
mod property;

pub use chat_prompt::apply_template;
pub use completion::Completion;
pub use embedding::embedding;
pub use infill::Infill;
pub use property::{props, slots};
