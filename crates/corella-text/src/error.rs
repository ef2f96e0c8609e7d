//! Errors about text, worded for the person who can act on them.

use std::fmt;

/// An error about text.
///
/// `Tokenizer*` and `TemplateSyntax` concern the person who chose the model files. The other errors concern one
/// request, which gets the status 400.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextError {
    /// tokenizer.json cannot be used.
    TokenizerFile(String),
    /// tokenizer.json names a decoder that this crate cannot stream.
    TokenizerDecoder(String),
    /// The text cannot be tokenized.
    Encode(String),
    /// The text has more tokens than allowed: at least `at_least`.
    TooManyTokens { at_least: usize },
    /// The text has an indivisible stretch that is too long for tokenising at once.
    WordTooLong { max_bytes: usize },
    /// The result is no longer wanted.
    Abandoned,
    /// A file for the chat template cannot be used: the file, and the reason.
    TokenizerConfig(String),
    /// The chat template does not parse.
    TemplateSyntax(String),
    /// The template refused the conversation by `raise_exception`, with this message.
    TemplateRaised(String),
    /// The template failed on this conversation.
    TemplateRender(String),
    /// The template exceeded the work and memory of a conversation.
    TemplateTooExpensive,
    /// The template printed more than allowed.
    PromptTooLarge { max_bytes: usize },
    /// `continue_final_message` cannot be applied.
    ContinueFinalMessage(String),
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TokenizerFile(reason) => write!(f, "tokenizer.json: {reason}"),
            Self::TokenizerDecoder(reason) => write!(f, "tokenizer.json: decoder: {reason}"),
            Self::Encode(reason) => write!(f, "the text cannot be tokenized: {reason}"),
            Self::TooManyTokens { at_least } => write!(f, "has at least {at_least} tokens"),
            Self::WordTooLong { max_bytes } => write!(
                f,
                "holds a stretch of more than {max_bytes} bytes without a word boundary"
            ),
            Self::Abandoned => f.write_str("the client no longer waits for the answer"),
            Self::TokenizerConfig(reason) => f.write_str(reason),
            Self::TemplateSyntax(reason) => write!(f, "chat template: {reason}"),
            Self::TemplateRaised(reason) => f.write_str(reason),
            Self::TemplateRender(reason) => {
                write!(
                    f,
                    "the chat template cannot render these messages: {reason}"
                )
            }
            Self::TemplateTooExpensive => {
                f.write_str("the chat template needs too much work or memory for these messages")
            }
            Self::PromptTooLarge { max_bytes } => write!(
                f,
                "the chat template makes more than {max_bytes} bytes of these messages"
            ),
            Self::ContinueFinalMessage(reason) => write!(f, "continue_final_message: {reason}"),
        }
    }
}

impl std::error::Error for TextError {}
