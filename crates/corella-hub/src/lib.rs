//! Models by name: fetches them from the Hugging Face hub into the hub's own cache, which other programs share.
//!
//! The rooms of the crate, from bottom to top. A room uses only those above it in this list:
//!
//! * `error`: errors, for the person who named a model.
//! * `hub_config`: the configuration of access to the hub.
//! * `free_space`: the free space of a file system.
//! * `uri`: addresses.
//! * `selection`: chooses the files of a model.
//! * `short_name`: names of Ollama's library.
//! * `model_name`: names of models, as users type them.
//! * `ollama_store`: models that Ollama has on the disk.
//! * `fetch_event`: the events of a fetch.
//! * `listing`: the files of a repository.
//! * `lock`: lets one process at a time fetch a file.
//! * `cache`: keeps files in the layout of the Python package `huggingface_hub`.
//! * `client`: requests to the hub.
//! * `download`: fetches files and checks them.
//! * `hub`: a model by its name, from the cache or the hub.

mod cache;
mod client;
mod download;
mod error;
mod fetch_event;
mod free_space;
mod hub;
mod hub_config;
mod listing;
mod lock;
mod model_name;
mod ollama_store;
mod selection;
mod short_name;
mod uri;

pub use cache::{CachedModel, Removed};
pub use error::HubError;
pub use fetch_event::{FetchEvent, Observer};
pub use hub::{Fetched, Hub};
pub use hub_config::HubConfig;
pub use listing::Digest;
pub use model_name::ModelName;
pub use ollama_store::{OllamaModel, OllamaStore};
pub use selection::DEFAULT_QUANTISATION;
pub use short_name::{library_names, short_names};
