//! Tokenizer, chat template, incremental detokenizer, stop strings.

mod chat_template;
mod detokenizer;
mod error;
mod piece;
mod python_json;
mod stop_string;
mod strftime;
mod text_stream;
mod tokenizer;

pub use chat_template::{ChatInput, ChatTemplate, SpecialTokens};
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use stop_string::StopStrings;
pub use text_stream::{TextDelta, TextStream};
pub use tokenizer::Tokenizer;
