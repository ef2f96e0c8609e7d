//! The adapters of the mock executor: names alone, which change the draws.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Adapter, Adapters};

#[derive(Default)]
pub struct MockAdapters(Mutex<BTreeSet<String>>);

impl MockAdapters {
    pub fn has(&self, name: &str) -> bool {
        self.lock().contains(name)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Adapters for MockAdapters {
    fn max_rank(&self) -> usize {
        usize::MAX
    }

    fn add(&self, name: &str, _: &Adapter) {
        self.lock().insert(name.to_owned());
    }

    fn remove(&self, name: &str) {
        self.lock().remove(name);
    }
}
