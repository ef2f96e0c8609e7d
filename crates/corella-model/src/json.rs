//! JSON files of a model's folder: fields, errors, tokens and integers.

pub(crate) mod checkpoint_error;
pub(crate) mod end_token;
pub(crate) mod file_name;
pub(crate) mod json_object;
pub(crate) mod quantization;
pub(crate) mod sentence_piece;
pub(crate) mod tokenizer_json;
