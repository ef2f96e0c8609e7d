//! Errors about text, worded for the person who can act on them.

/// An error about text.
///
/// `Tokenizer*` and `TemplateSyntax` concern the person who chose the model files. The other errors concern one
/// request, which gets the status 400.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// tokenizer.json cannot be used.
    #[error("tokenizer.json: {0}")]
    TokenizerFile(String),
    /// tokenizer.json names a decoder that this crate cannot stream.
    #[error("tokenizer.json: decoder: {0}")]
    TokenizerDecoder(String),
    /// The text cannot be tokenized.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
    /// The text has more tokens than allowed: at least `at_least`.
    #[error("has at least {at_least} tokens")]
    TooManyTokens { at_least: usize },
    /// The text has an indivisible stretch that is too long for tokenising at once.
    #[error("holds a stretch of more than {max_bytes} bytes without a word boundary")]
    WordTooLong { max_bytes: usize },
    /// The result is no longer wanted.
    #[error("the client no longer waits for the answer")]
    Abandoned,
    /// A file for the chat template cannot be used: the file, and the reason.
    #[error("{0}")]
    TokenizerConfig(String),
    /// The chat template does not parse.
    #[error("chat template: {0}")]
    TemplateSyntax(String),
    /// The template refused the conversation by `raise_exception`, with this message.
    #[error("{0}")]
    TemplateRaised(String),
    /// The template failed on this conversation.
    #[error("the chat template cannot render these messages: {0}")]
    TemplateRender(String),
    /// The template exceeded the work and memory of a conversation.
    #[error("the chat template needs too much work or memory for these messages")]
    TemplateTooExpensive,
    /// The template printed more than allowed.
    #[error("the chat template makes more than {max_bytes} bytes of these messages")]
    PromptTooLarge { max_bytes: usize },
    /// `continue_final_message` cannot be applied.
    #[error("continue_final_message: {0}")]
    ContinueFinalMessage(String),
}
