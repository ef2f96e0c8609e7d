//! Comparisons of text functions with references: templates, tokenizers, replies.

mod chat_template;
mod corpus;
mod detokenizer;
mod reply;
mod template_bound;
mod tokenizer;
