//! Adapters of an engine's executor, kept while a request or a caller may use them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use corella_model::{Adapter, Adapters};

use crate::kv_disk::Tier;

/// An adapter of the executor. It is removed when the last request that uses it has ended and no other owner holds it.
pub struct LoadedAdapter {
    name: Arc<str>,
    fingerprint: u128,
    adapters: Arc<dyn Adapters>,
}

/// The served adapters: requests of other nodes find them by their contents, and the disk keeps their blocks.
pub struct AdapterIndex {
    adapters: Mutex<Vec<Weak<LoadedAdapter>>>,
    tier: Option<Arc<Tier>>,
}

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
    pub(crate) fn new(tier: Option<Arc<Tier>>) -> Self {
        Self {
            adapters: Mutex::default(),
            tier,
        }
    }

    pub fn add(&self, adapter: &Arc<LoadedAdapter>) {
        let mut adapters = self.lock();
        adapters.retain(|other| other.strong_count() > 0);
        adapters.push(Arc::downgrade(adapter));
        if let Some(tier) = &self.tier {
            tier.add_adapter(adapter.name().clone(), adapter.fingerprint);
        }
    }

    /// Removes an adapter, and erases its blocks from the disk. Blocks until they are erased.
    pub fn remove(&self, adapter: &Arc<LoadedAdapter>) {
        let is_another = |other: &Weak<LoadedAdapter>| other.as_ptr() != Arc::as_ptr(adapter);
        self.lock().retain(is_another);
        if let Some(tier) = &self.tier {
            tier.remove_adapter(adapter.name());
        }
    }

    pub fn find(&self, fingerprint: u128) -> Option<Arc<LoadedAdapter>> {
        let adapters = self.lock();
        let mut adapters = adapters.iter().filter_map(Weak::upgrade);
        adapters.find(|adapter| adapter.fingerprint == fingerprint)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<LoadedAdapter>>> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
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
