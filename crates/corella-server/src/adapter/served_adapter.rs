//! The LoRA adapters that callers can name in `model`, and the loading of adapters.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use corella_engine::{AdapterIndex, LoadedAdapter};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::adapter::adapter_name::unique_name;
use crate::adapter::adapter_use::AdapterUses;
use crate::clock::unix_now_s;
use crate::config::serve_config::ServeConfig;
use crate::wire::api_error::ApiError;

/// Reads adapters for the served model.
pub trait AdapterLoader: Send + Sync {
    /// Loads the adapter in folder `path` under a name that no other adapter has had. The error names the adapter's
    /// fault.
    fn load(&self, name: &str, path: &str) -> Result<LoadedAdapter, String>;
}

const MAX_NAME_BYTES: usize = 256;
/// Limits the adapters that are read at the same time. Each is read on a thread of its own, so a stalled file system
/// holds up no other work.
const MAX_NUM_READ: usize = 4;

/// The served adapters.
pub struct ServedAdapters {
    /// The names of the model, which no adapter may have.
    model_names: Vec<String>,
    loader: Option<Arc<dyn AdapterLoader>>,
    max_adapters: usize,
    is_fixed: bool,
    load_timeout: Duration,
    table: Arc<Mutex<Table>>,
    uses: Arc<AdapterUses>,
    /// The index of adapters for requests of other nodes.
    index: Arc<AdapterIndex>,
}

#[derive(Default)]
struct Table {
    by_name: BTreeMap<String, AdapterState>,
    /// Number of loads begun since the start.
    num_loads: u64,
    /// Number of adapters being read. An adapter that is unloaded meanwhile counts until its read has ended.
    num_read: usize,
}

enum AdapterState {
    /// The load with this number has not ended. The load's caller is told if the adapter is unloaded meanwhile.
    Loading {
        number: u64,
        unloaded: oneshot::Sender<()>,
    },
    Served(ServedAdapter),
}

/// An adapter under the name that callers use.
#[derive(Clone)]
pub struct ServedAdapter {
    pub path: String,
    pub created: u64,
    pub loaded: Arc<LoadedAdapter>,
}

impl ServedAdapters {
    pub fn new(
        loader: Option<Arc<dyn AdapterLoader>>,
        config: &ServeConfig,
        index: Arc<AdapterIndex>,
        uses: Arc<AdapterUses>,
    ) -> Self {
        Self {
            model_names: config.served_model_names.clone(),
            loader,
            max_adapters: config.max_num_adapters,
            is_fixed: config.has_fixed_adapters,
            load_timeout: config.adapter_load_timeout,
            table: Arc::default(),
            uses,
            index,
        }
    }

    /// Returns whether the server takes adapters.
    pub fn is_on(&self) -> bool {
        self.loader.is_some()
    }

    pub fn uses(&self) -> &Arc<AdapterUses> {
        &self.uses
    }

    pub fn get(&self, name: &str) -> Option<ServedAdapter> {
        match self.lock().by_name.get(name)? {
            AdapterState::Served(adapter) => Some(adapter.clone()),
            AdapterState::Loading { .. } => None,
        }
    }

    /// All adapters by name, in alphabetical order.
    pub fn list(&self) -> Vec<(String, ServedAdapter)> {
        let table = self.lock();
        let served = |(name, state): (&String, &AdapterState)| match state {
            AdapterState::Served(adapter) => Some((name.clone(), adapter.clone())),
            AdapterState::Loading { .. } => None,
        };
        table.by_name.iter().filter_map(served).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Reserves a place for an adapter. The receiver is told when the adapter is unloaded before its load ends.
    fn begin(
        &self,
        name: &str,
        path: &str,
    ) -> Result<(AdapterLoad, oneshot::Receiver<()>), ApiError> {
        self.check_name(name)?;
        let loader = self.loader()?.clone();
        let mut table = self.lock();
        if table.by_name.len() >= self.max_adapters && !table.by_name.contains_key(name) {
            return Err(ApiError::conflict(format!(
                "There are {} adapters already; unload one, or start the server with a larger --max-loras.",
                self.max_adapters
            )));
        }
        if table.num_read >= MAX_NUM_READ {
            return Err(ApiError::conflict(format!(
                "{MAX_NUM_READ} adapters are being loaded already; wait for one of them. If none ends, their file \
                 system does not answer."
            )));
        }
        let number = table.num_loads + 1;
        let (sender, unloaded) = oneshot::channel();
        match table.by_name.entry(name.to_owned()) {
            Entry::Vacant(entry) => entry.insert(AdapterState::Loading {
                number,
                unloaded: sender,
            }),
            Entry::Occupied(_) => {
                let problem = format!("is {name:?}, which is loaded already; unload it first");
                return Err(ApiError::invalid("lora_name", problem));
            }
        };
        table.num_loads = number;
        table.num_read += 1;
        let load = AdapterLoad {
            loader,
            table: self.table.clone(),
            index: self.index.clone(),
            name: name.to_owned(),
            path: path.to_owned(),
            number,
        };
        Ok((load, unloaded))
    }

    /// Reads an adapter on this thread.
    pub fn load_here(&self, name: &str, path: &str) -> Result<(), ApiError> {
        let (load, _unloaded) = self.begin(name, path)?;
        load.run()
    }

    /// Reads an adapter on a thread of its own. A load that exceeds `load_timeout` is given up, even if the caller has
    /// left. The thread ends when the file system answers.
    pub async fn load(&self, name: &str, path: &str) -> Result<(), ApiError> {
        self.check_may_change()?;
        let (load, unloaded) = self.begin(name, path)?;
        let wait = Wait {
            table: self.table.clone(),
            timeout: self.load_timeout,
            name: name.to_owned(),
            path: path.to_owned(),
            number: load.number,
        };
        let (sender, ended) = oneshot::channel();
        let thread = thread::Builder::new().name("corella-adapter".to_owned());
        let started = thread.spawn(move || {
            let _ = sender.send(load.run());
        });
        started.map_err(|error| ApiError::engine(format!("No thread can be started: {error}.")))?;
        let waiting = tokio::spawn(wait.end(ended, unloaded));
        let failed = |_| Err(ApiError::engine("Loading the adapter failed."));
        waiting.await.unwrap_or_else(failed)
    }

    /// Refuses new requests for an adapter, or gives up its load. Running requests continue with the adapter. Blocks
    /// until the disk has none of the adapter's pages.
    pub fn unload(&self, name: &str) -> Result<(), ApiError> {
        self.loader()?;
        self.check_may_change()?;
        let removed = self.lock().by_name.remove(name);
        match removed {
            None => {
                let problem = format!("is {name:?}, and no adapter of that name is loaded");
                Err(ApiError::invalid("lora_name", problem))
            }
            Some(AdapterState::Loading { unloaded, .. }) => {
                // The load's caller may have left.
                let _ = unloaded.send(());
                Ok(())
            }
            Some(AdapterState::Served(adapter)) => {
                self.index.remove(&adapter.loaded);
                Ok(())
            }
        }
    }

    /// An adapter that no table has would be gone after the model's next load.
    fn check_may_change(&self) -> Result<(), ApiError> {
        match self.is_fixed {
            true => Err(ApiError::fixed_adapters()),
            false => Ok(()),
        }
    }

    fn check_name(&self, name: &str) -> Result<(), ApiError> {
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            let problem = format!("must have 1 to {MAX_NAME_BYTES} bytes");
            return Err(ApiError::invalid("lora_name", problem));
        }
        if self.model_names.iter().any(|model| model == name) {
            let problem = format!("is {name:?}, which is the model's name");
            return Err(ApiError::invalid("lora_name", problem));
        }
        Ok(())
    }

    fn loader(&self) -> Result<&Arc<dyn AdapterLoader>, ApiError> {
        self.loader.as_ref().ok_or_else(|| {
            let problem = "This server takes no adapters; start it with --enable-lora.";
            ApiError::conflict(problem)
        })
    }
}

impl Table {
    /// Frees the place of an unfinished load.
    fn forget(&mut self, name: &str, number: u64) {
        if self.is_loading(name, number) {
            self.by_name.remove(name);
        }
    }

    fn is_loading(&self, name: &str, number: u64) -> bool {
        matches!(self.by_name.get(name), Some(AdapterState::Loading { number: other, .. }) if *other == number)
    }
}

/// Waits for the end of a load.
struct Wait {
    table: Arc<Mutex<Table>>,
    timeout: Duration,
    name: String,
    path: String,
    number: u64,
}

impl Wait {
    async fn end(
        self,
        ended: oneshot::Receiver<Result<(), ApiError>>,
        unloaded: oneshot::Receiver<()>,
    ) -> Result<(), ApiError> {
        let end = async {
            tokio::select! {
                result = ended => {
                    result.unwrap_or_else(|_| Err(ApiError::engine("Loading the adapter failed.")))
                }
                // A dropped sender means that the load has ended by itself.
                Ok(()) = unloaded => Err(unloaded_meanwhile(&self.name)),
            }
        };
        match timeout(self.timeout, end).await {
            Ok(result) => result,
            Err(_) => {
                lock(&self.table).forget(&self.name, self.number);
                let problem = format!(
                    "was not read within {} s, and is given up; look at the file system of {}, or raise \
                     --adapter-load-timeout",
                    self.timeout.as_secs(),
                    self.path
                );
                Err(ApiError::invalid("lora_path", problem))
            }
        }
    }
}

fn unloaded_meanwhile(name: &str) -> ApiError {
    ApiError::conflict(format!("Adapter {name:?} was unloaded before it was read."))
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An adapter being read. Dropping the load frees the adapter's place, unless the adapter is served by then.
struct AdapterLoad {
    loader: Arc<dyn AdapterLoader>,
    table: Arc<Mutex<Table>>,
    index: Arc<AdapterIndex>,
    name: String,
    path: String,
    number: u64,
}

impl AdapterLoad {
    /// Reads and packs the adapter, which takes a while.
    fn run(self) -> Result<(), ApiError> {
        let key = unique_name(&self.name, self.number);
        let loaded = self.loader.load(&key, &self.path).map_err(|problem| {
            ApiError::invalid("lora_path", format!("cannot be loaded: {problem}"))
        })?;
        let mut table = lock(&self.table);
        if !table.is_loading(&self.name, self.number) {
            return Err(unloaded_meanwhile(&self.name));
        }
        let adapter = ServedAdapter {
            path: self.path.clone(),
            created: unix_now_s(),
            loaded: Arc::new(loaded),
        };
        self.index.add(&adapter.loaded);
        table
            .by_name
            .insert(self.name.clone(), AdapterState::Served(adapter));
        Ok(())
    }
}

impl Drop for AdapterLoad {
    fn drop(&mut self) {
        let mut table = lock(&self.table);
        table.num_read -= 1;
        table.forget(&self.name, self.number);
    }
}
