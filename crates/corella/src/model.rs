//! Models: their device and executor, tokenizer and text, and properties.

pub(crate) mod device;
pub(crate) mod device_choice;
pub(crate) mod device_plan;
pub(crate) mod draft_model;
pub(crate) mod end_token;
pub(crate) mod inspect;
pub(crate) mod llm;
pub(crate) mod model_file;
pub(crate) mod model_identity;
pub(crate) mod opened_model;
pub(crate) mod perplexity;
pub(crate) mod quantize;
pub(crate) mod tokenizer_loader;
pub(crate) mod vocabulary;
