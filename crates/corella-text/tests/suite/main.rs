//! Text beside references: templates, tokenizers, replies.

mod chat_template;
mod detokenizer;
mod reply;
mod tokenizer;
