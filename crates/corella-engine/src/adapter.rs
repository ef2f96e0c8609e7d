//! Adapters of an engine's executor, which it keeps as long as somebody may use them.

use std::fmt;
use std::sync::Arc;

use corella_model::{Adapter, Adapters};

/// An adapter that the executor has. It is removed when the last request that uses it has ended and nobody
/// else holds it.
pub struct LoadedAdapter {
    name: Arc<str>,
    adapters: Arc<dyn Adapters>,
}

impl LoadedAdapter {
    /// Gives an adapter to an executor. The name must be one that no other loaded adapter has: requests
    /// share cached prefixes by it.
    pub fn new(name: &str, adapter: &Adapter, adapters: Arc<dyn Adapters>) -> Self {
        adapters.add(name, adapter);
        Self {
            name: name.into(),
            adapters,
        }
    }

    pub fn name(&self) -> &Arc<str> {
        &self.name
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
