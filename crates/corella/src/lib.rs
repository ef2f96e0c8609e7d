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
//!
//! The rooms of the crate, from bottom to top. A room uses only those above it in this list:
//!
//! * `built_in`: the model inside the program.
//! * `input`: texts that users give: files, variables, and names with typing errors.
//! * `process`: the process: its open files, its memory, and its supervisor.
//! * `error`: all errors, and the words in them.
//! * `client`: clients of servers and collectors.
//! * `options`: options for loading and running a model.
//! * `memory`: KV pages and weights in the memory of a device, and limits of certain kinds of models.
//! * `model`: models: their device and executor, tokenizer and text, and properties.
//! * `terminal`: lines on a terminal.
//! * `foreign`: flags, verbs, variables and endpoints of other servers.
//! * `arguments`: the command line and files of options, as configuration.
//! * `serve`: a server and its node of a cluster.
//! * `command`: the command, and its verbs.

mod arguments;
mod built_in;
mod client;
mod error;
mod foreign;
mod input;
mod memory;
mod model;
mod options;
mod process;
mod terminal;

mod command;
mod serve;

pub use client::event_stream::{EventStream, Refusal};
pub use client::patient_client::{PatientClient, PatientResponse};
pub use command::keyword_options::{
    KeywordKind, foreign_keywords, keywords, load as load_by_keywords,
};
pub use command::{command_line, run_command};
pub use corella_engine::KvDiskFolder;
pub use corella_quantize::{QuantizeFormat, QuantizeProgress, Quantized};
pub use error::Error;
pub use error::display_bytes::display_bytes;
pub use memory::token_cost::TokenCost;
pub use model::device::{DraftHardware, Hardware};
pub use model::device_plan::MemoryPlan;
pub use model::inspect::{
    Inspection, KvSize, ModelReport, TemplateReport, TokenizerReport, WeightReport, inspect,
};
pub use model::llm::{Finish, GenerateParams, Generation, Llm, TextEvent, TextEvents};
pub use model::model_identity::ModelIdentity;
pub use model::perplexity::Perplexity;
pub use model::quantize::{CalibrationText, QuantizeOptions, quantize};
pub use options::generation_choice::{GenerationChoice, GenerationSource};
pub use options::step_limits::StepLimits;
pub use options::weight_cache::{WeightCache, WeightKeeper};
pub use options::{
    Device, DraftOptions, KvDiskOptions, KvSpill, LlmOptions, LoadWatcher, ModelSource,
};
pub use serve::local_server::LocalServer;

/// Runs the examples of the book's page on this crate as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/src/rust.md")]
pub struct BookExamples;
