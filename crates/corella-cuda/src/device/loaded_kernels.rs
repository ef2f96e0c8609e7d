//! The loaded kernels of a device: many matrices share a kernel.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use corella_model::DeviceError;

use super::{Kernel, ModuleSource};

/// Kernels by their source and name.
#[derive(Debug, Default)]
pub struct LoadedKernels(Mutex<HashMap<(ModuleSource, String), Kernel>>);

impl LoadedKernels {
    /// Returns the kernels of these names, and calls `load` if some have not been loaded.
    pub fn get_or_load(
        &self,
        source: &ModuleSource,
        names: &[&str],
        load: impl FnOnce() -> Result<Vec<Kernel>, DeviceError>,
    ) -> Result<Vec<Kernel>, DeviceError> {
        let mut kernels = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = |name: &&str| (source.clone(), String::from(*name));
        let found: Option<Vec<Kernel>> = names
            .iter()
            .map(|name| kernels.get(&key(name)).copied())
            .collect();
        if let Some(found) = found {
            return Ok(found);
        }
        let loaded = load()?;
        kernels.extend(names.iter().map(key).zip(loaded.iter().copied()));
        Ok(loaded)
    }
}
