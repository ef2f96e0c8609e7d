//! A language model as a value: load it, then generate answers.
//!
//! ```no_run
//! use corella::{GenerateParams, Llm, LlmOptions, ModelSource};
//!
//! let llm = Llm::load(&ModelSource::BuiltIn, &LlmOptions::default())?;
//! let answer = llm.generate("Tell me a story about a fox.", &GenerateParams::default())?;
//! println!("{}", answer.text);
//! # Ok::<(), corella::Error>(())
//! ```

mod built_in;
mod device;
mod device_choice;
mod draft_head_limit;
mod draft_model;
mod encoder_limit;
mod end_token;
mod error;
mod generation_choice;
mod inspect;
mod kv_disk_limit;
mod kv_plan;
mod llm;
mod model_identity;
mod options;
mod perplexity;
mod quantize;
mod recurrent_limit;
mod shared_kv_limit;
mod token_cost;
mod tokenizer_loader;
mod vocabulary;
mod weight_cache;
mod weight_fit;

// The command, and the modules that it shares with programs in other languages.
mod adapter_loader;
mod api_key_file;
mod args;
mod batch;
mod bench;
mod chat;
mod cluster;
mod command;
mod config;
mod config_file;
#[cfg(test)]
mod endpoint_table;
mod environment;
mod event_stream;
mod fetch_display;
#[cfg(test)]
mod flag_reference;
mod flag_table;
mod foreign_flag;
mod foreign_key;
mod foreign_value;
mod foreign_variable;
mod foreign_verb;
mod generate;
mod hub_command;
mod inspect_command;
mod keyword_options;
mod limit_share;
mod load_display;
mod local_server;
mod log_format;
mod malloc_arena;
mod manual;
mod model_lookup;
mod nearest_name;
mod open_files;
mod option_file;
mod option_name;
mod option_value;
mod otlp;
mod patient_client;
mod profile_table;
mod progress_line;
mod quantize_command;
mod reload;
mod remote_server;
mod serve;
mod server_socket;
mod supervisor;
mod tls_client;
mod unknown_flag;

pub use command::{command_line, run_command};
pub use corella_quantize::{QuantizeFormat, QuantizeProgress, Quantized};
pub use device::{DraftHardware, Hardware};
pub use device_choice::StepLimits;
pub use error::Error;
pub use event_stream::{EventStream, Refusal};
pub use generation_choice::{GenerationChoice, GenerationSource};
pub use inspect::{
    Inspection, KvSize, ModelReport, TemplateReport, TokenizerReport, WeightReport, inspect,
};
pub use keyword_options::{KeywordKind, foreign_keywords, keywords, load as load_by_keywords};
pub use kv_plan::display_bytes;
pub use llm::{Finish, GenerateParams, Generation, Llm, TextEvent, TextEvents};
pub use local_server::LocalServer;
pub use model_identity::ModelIdentity;
pub use options::{
    Device, DraftOptions, KvDiskOptions, KvSpill, LlmOptions, LoadWatcher, ModelSource,
};
pub use patient_client::{PatientClient, PatientResponse};
pub use perplexity::Perplexity;
pub use quantize::{CalibrationText, QuantizeOptions, quantize};
pub use token_cost::TokenCost;
pub use weight_cache::{WeightCache, WeightKeeper};

/// Runs the examples of the book's page on this crate as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/rust.md")]
pub struct BookExamples;
