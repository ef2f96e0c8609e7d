//! Text for a language model: tokenizer, chat templates, incremental detokenizer, stop strings, and
//! the parts of replies.
//!
//! The rooms of the crate, from bottom to top. A room uses only rooms above it in this list:
//!
//! * `error`: errors of tokenizers and templates.
//! * `recent_cache`: a cache of the values that were used last.
//! * `python`: values, texts and methods as Python has them, and their cost.
//! * `template`: Jinja's language: sources, expressions and built-in functions.
//! * `tokenizer`: texts as tokens, and tokens as text.
//! * `chat_template`: conversations as prompts.
//! * `grammar`: grammars that answers follow.
//! * `reply`: the parts of replies, and their formats.

mod chat_template;
mod error;
mod grammar;
mod python;
mod recent_cache;
mod reply;
mod template;
mod tokenizer;

pub use chat_template::special_tokens::SpecialTokens;
pub use chat_template::template_support::{RoleSupport, ThoughtSupport, ToolSupport, TurnSupport};
pub use chat_template::{ChatInput, ChatTemplate, RenderLimit, TOOL_USE_FILE, TemplateFiles};
pub use error::TextError;
pub use grammar::grammar_error::GrammarError;
pub use grammar::grammar_source::GrammarSource;
pub use grammar::{Grammar, GrammarCompiler, GrammarState};
pub use reply::reply_part::ReplyPart;
pub use reply::{
    CallFormat, GrammarOrigin, ReasoningFormat, ReplyContext, ReplyFormat, ReplyGrammarError,
    ReplyParser, TagFormat, ToolSet, UnknownFormat, WantedCalls, WantedReply,
};
pub use template::strftime::strftime;
pub use tokenizer::detokenizer::Detokenizer;
pub use tokenizer::fill_in_middle::FillInMiddle;
pub use tokenizer::stop_string::StopStrings;
pub use tokenizer::text_stream::{TextDelta, TextStream};
pub use tokenizer::token_count::TokenCount;
pub use tokenizer::{EncodeLimit, EncodedPair, Tokenizer};
