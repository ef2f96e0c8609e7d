//! Text for a language model: tokenizer, chat templates, incremental detokenizer, stop strings, and
//! the parts of replies.

mod added_token;
mod byte_alphabet;
mod chat_template;
mod detokenizer;
mod error;
mod fill_in_middle;
mod grammar;
mod grammar_place;
mod grammar_reason;
mod grammar_size;
mod grammar_source;
mod jinja_builtin;
mod lark_schema;
mod long_word;
mod normalizer;
mod piece;
mod python_attribute;
mod python_format;
mod python_iterable;
mod python_json;
mod python_method;
mod python_number;
mod python_order;
mod python_string;
mod python_text;
mod recent_cache;
mod reply;
mod reply_part;
mod role_support;
mod schema;
mod special_tokens;
mod stop_string;
mod strftime;
mod template_cost;
mod template_expression;
mod template_nesting;
mod template_source;
mod text_stream;
mod token_count;
mod token_reach;
mod tokenizer;
mod tool_support;
mod turn_support;
mod word_cache;
mod word_splitter;

pub use chat_template::{ChatInput, ChatTemplate, RenderLimit, TOOL_USE_FILE, TemplateFiles};
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use fill_in_middle::FillInMiddle;
pub use grammar::{Grammar, GrammarCompiler, GrammarError, GrammarState};
pub use grammar_source::GrammarSource;
pub use reply::{
    CallFormat, GrammarOrigin, ReasoningFormat, ReplyContext, ReplyFormat, ReplyGrammarError,
    ReplyParser, TagFormat, ToolSet, UnknownFormat, WantedCalls, WantedReply,
};
pub use reply_part::ReplyPart;
pub use role_support::RoleSupport;
pub use special_tokens::SpecialTokens;
pub use stop_string::StopStrings;
pub use strftime::strftime;
pub use text_stream::{TextDelta, TextStream};
pub use token_count::TokenCount;
pub use tokenizer::{EncodeLimit, EncodedPair, Tokenizer};
pub use tool_support::ToolSupport;
pub use turn_support::{ThoughtSupport, TurnSupport};
