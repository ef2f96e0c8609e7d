//! Adapters, which callers name in place of the model, and the endpoints that load and unload them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use corella_engine::LoadedAdapter;
use serde::Deserialize;
use serde_json::json;

use crate::api_error::ApiError;
use crate::call::json_response;
use crate::request_body::RequestBody;
use crate::server_state::{ServerState, unix_now_s};

/// Reads adapters for the model that is served.
pub trait AdapterLoader: Send + Sync {
    /// Loads the adapter of a folder under a name that no other adapter has had. `Err` says what is wrong
    /// with it.
    fn load(&self, name: &str, path: &str) -> Result<LoadedAdapter, String>;
}

/// The adapters that are served.
pub struct ServedAdapters {
    loader: Option<Arc<dyn AdapterLoader>>,
    max_adapters: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// `None` while an adapter is being loaded.
    by_name: BTreeMap<String, Option<ServedAdapter>>,
    /// How many have been loaded in all.
    num_loaded: u64,
}

/// An adapter as callers know it.
#[derive(Clone)]
pub struct ServedAdapter {
    pub path: String,
    pub created: u64,
    pub loaded: Arc<LoadedAdapter>,
}

impl ServedAdapters {
    pub fn new(loader: Option<Arc<dyn AdapterLoader>>, max_adapters: usize) -> Self {
        Self {
            loader,
            max_adapters,
            table: Mutex::default(),
        }
    }

    pub fn get(&self, name: &str) -> Option<ServedAdapter> {
        self.lock().by_name.get(name).cloned().flatten()
    }

    /// All adapters by name, in alphabetical order.
    pub fn list(&self) -> Vec<(String, ServedAdapter)> {
        let table = self.lock();
        let loaded = table.by_name.iter();
        let loaded = loaded.filter_map(|(name, adapter)| Some((name.clone(), adapter.clone()?)));
        loaded.collect()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads and packs an adapter, which takes a while. The others are served meanwhile.
    fn load(&self, name: &str, path: &str) -> Result<(), ApiError> {
        let loader = self.loader()?;
        let number = {
            let mut table = self.lock();
            if table.by_name.len() >= self.max_adapters && !table.by_name.contains_key(name) {
                return Err(ApiError::conflict(format!(
                    "There are {} adapters already; unload one, or start the server with a larger --max-loras.",
                    self.max_adapters
                )));
            }
            match table.by_name.entry(name.to_owned()) {
                Entry::Vacant(entry) => entry.insert(None),
                Entry::Occupied(_) => {
                    let problem = format!("is {name:?}, which is loaded already; unload it first");
                    return Err(ApiError::invalid("lora_name", problem));
                }
            };
            table.num_loaded += 1;
            table.num_loaded
        };
        // Requests share cached prefixes by this name, and what was cached for another adapter of the same
        // name is not for this one. The number makes it unlike any other, whatever callers choose.
        let key = format!("{name}#{number}");
        let loaded = loader.load(&key, path);
        let mut table = self.lock();
        match loaded {
            Ok(loaded) => {
                let adapter = ServedAdapter {
                    path: path.to_owned(),
                    created: unix_now_s(),
                    loaded: Arc::new(loaded),
                };
                table.by_name.insert(name.to_owned(), Some(adapter));
                Ok(())
            }
            Err(problem) => {
                table.by_name.remove(name);
                Err(ApiError::invalid(
                    "lora_path",
                    format!("cannot be loaded: {problem}"),
                ))
            }
        }
    }

    /// Takes no new requests for an adapter. Those that run go on with it.
    fn unload(&self, name: &str) -> Result<(), ApiError> {
        self.loader()?;
        let mut table = self.lock();
        match table.by_name.get(name) {
            Some(Some(_)) => {
                table.by_name.remove(name);
                Ok(())
            }
            Some(None) => Err(ApiError::conflict(format!(
                "Adapter {name:?} is being loaded."
            ))),
            None => {
                let problem = format!("is {name:?}, and no adapter of that name is loaded");
                Err(ApiError::invalid("lora_name", problem))
            }
        }
    }

    fn loader(&self) -> Result<&dyn AdapterLoader, ApiError> {
        self.loader.as_deref().ok_or_else(|| {
            let problem = "This server takes no adapters; start it with --enable-lora.";
            ApiError::conflict(problem)
        })
    }
}

impl ServerState {
    /// Loads the adapter of a folder, which callers then name in `model`. `Err` says why it cannot be.
    pub fn load_adapter(&self, name: &str, path: &str) -> Result<(), String> {
        let loaded = self.try_load_adapter(name, path);
        loaded.map_err(|error| error.message().to_owned())
    }

    fn try_load_adapter(&self, name: &str, path: &str) -> Result<(), ApiError> {
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            let problem = format!("must have 1 to {MAX_NAME_BYTES} bytes");
            return Err(ApiError::invalid("lora_name", problem));
        }
        if self
            .config
            .served_model_names
            .iter()
            .any(|model| model == name)
        {
            let problem = format!("is {name:?}, which is the model's name");
            return Err(ApiError::invalid("lora_name", problem));
        }
        self.adapters.load(name, path)
    }
}

const MAX_NAME_BYTES: usize = 256;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct LoadFields {
    lora_name: Option<String>,
    lora_path: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct UnloadFields {
    lora_name: Option<String>,
    /// vLLM numbers its adapters; here, names are enough.
    #[serde(rename = "lora_int_id")]
    _lora_int_id: Option<i64>,
}

/// `POST /v1/load_lora_adapter`
pub async fn load_adapter(
    State(state): State<Arc<ServerState>>,
    body: Body,
) -> Result<Response, ApiError> {
    let body = RequestBody::read(body, &state).await?;
    let fields: LoadFields = body.parse()?;
    let name = required("lora_name", fields.lora_name)?;
    let path = required("lora_path", fields.lora_path)?;
    let load = move |state: &ServerState, _: &_| {
        state.try_load_adapter(&name, &path)?;
        Ok(json_response(
            &json!({"id": name, "object": "model", "root": path}),
        ))
    };
    state.run_blocking(0, load).await
}

/// `POST /v1/unload_lora_adapter`
pub async fn unload_adapter(
    State(state): State<Arc<ServerState>>,
    body: Body,
) -> Result<Response, ApiError> {
    let body = RequestBody::read(body, &state).await?;
    let fields: UnloadFields = body.parse()?;
    let name = required("lora_name", fields.lora_name)?;
    state.adapters.unload(&name)?;
    Ok(json_response(
        &json!({"id": name, "object": "model", "deleted": true}),
    ))
}

fn required(field: &'static str, value: Option<String>) -> Result<String, ApiError> {
    value.ok_or_else(|| ApiError::invalid(field, "is required"))
}
