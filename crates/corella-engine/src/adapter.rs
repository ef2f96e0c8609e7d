//! Adapters of an engine's executor, kept while a request or a caller may use them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use corella_model::{Adapter, Adapters};

/// An adapter of the executor. It is removed when the last request that uses it has ended and no other owner holds it.
pub struct LoadedAdapter {
    name: Arc<str>,
    fingerprint: u128,
    adapters: Arc<dyn Adapters>,
}

/// Adapters for requests of other nodes, found by their contents.
#[derive(Default)]
pub struct AdapterIndex(Mutex<Vec<Weak<LoadedAdapter>>>);

impl LoadedAdapter {
    /// Gives an adapter to an executor. No other loaded adapter may have the same name, because requests share cached
    /// prefixes by adapter name.
    pub fn new(name: &str, adapter: &Adapter, adapters: Arc<dyn Adapters>) -> Self {
        adapters.add(name, adapter);
        Self {
            name: name.into(),
            fingerprint: adapter.fingerprint(),
            adapters,
        }
    }

    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Equal adapters have equal fingerprints, whatever their names.
    pub fn fingerprint(&self) -> u128 {
        self.fingerprint
    }
}

impl AdapterIndex {
    pub fn add(&self, adapter: &Arc<LoadedAdapter>) {
        let mut adapters = self.lock();
        adapters.retain(|other| other.strong_count() > 0);
        adapters.push(Arc::downgrade(adapter));
    }

    pub fn remove(&self, adapter: &Arc<LoadedAdapter>) {
        let is_another = |other: &Weak<LoadedAdapter>| other.as_ptr() != Arc::as_ptr(adapter);
        self.lock().retain(is_another);
    }

    pub fn find(&self, fingerprint: u128) -> Option<Arc<LoadedAdapter>> {
        let adapters = self.lock();
        let mut adapters = adapters.iter().filter_map(Weak::upgrade);
        adapters.find(|adapter| adapter.fingerprint == fingerprint)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<LoadedAdapter>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LoadedAdapter {
    fn drop(&mut self) {
        self.adapters.remove(&self.name);
    }
}

impl fmt::Debug for LoadedAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LoadedAdapter").field(&self.name).finish()
    }
}
