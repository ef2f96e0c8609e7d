//! A device that only records the requested modules.

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use corella_model::DeviceError;

use super::model_shape;
use crate::device::{
    Device, DevicePointer, DeviceProperties, Event, Graph, Grid, Kernel, ModuleSource, Product,
    SharedDevice, Stream, Tensor, TensorMap,
};

#[derive(Debug)]
pub struct RecordingDevice {
    properties: DeviceProperties,
    modules: Mutex<Modules>,
}

/// The set of modules, and the same modules in the order of their first request.
type Modules = (HashSet<ModuleSource>, Vec<RecordedModule>);

/// A module, and its requested kernels.
#[derive(Clone, Debug)]
pub struct RecordedModule {
    pub source: ModuleSource,
    pub kernels: Vec<String>,
}

impl RecordingDevice {
    /// The modules of all shapes of models on a device of this architecture.
    pub fn modules_for(architecture: &str) -> Result<Vec<RecordedModule>, DeviceError> {
        // A100, H100 and B200.
        let (num_multiprocessors, max_shared_bytes) = match architecture {
            "sm_80" => (108, 163 << 10),
            "sm_90a" => (132, 227 << 10),
            _ => (148, 227 << 10),
        };
        let mut modules = Modules::default();
        // On Hopper, some operations have a kernel with `wgmma` and a kernel without.
        let choices = match architecture {
            "sm_90a" => &[false, true][..],
            _ => &[false],
        };
        for &uses_wgmma in choices {
            let recorder = Arc::new(Self {
                properties: DeviceProperties {
                    name: "a device that runs nothing".into(),
                    architecture: architecture.into(),
                    num_multiprocessors,
                    max_shared_bytes,
                    total_bytes: 80 << 30,
                    free_bytes: 80 << 30,
                    uses_wgmma,
                },
                modules: Mutex::new(modules),
            });
            let device: SharedDevice = recorder.clone();
            model_shape::load_all(&device)?;
            modules = std::mem::take(&mut *recorder.modules.lock().unwrap());
        }
        Ok(modules.1)
    }
}

fn refused<T>() -> Result<T, DeviceError> {
    Err(DeviceError(
        "this device only notes which kernels are loaded".into(),
    ))
}

impl Device for RecordingDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn load(&self, source: &ModuleSource, names: &[&str]) -> Result<Vec<Kernel>, DeviceError> {
        let (known, modules) = &mut *self.modules.lock().unwrap();
        if known.insert(source.clone()) {
            modules.push(RecordedModule {
                source: source.clone(),
                kernels: names.iter().map(|&name| name.into()).collect(),
            });
        }
        Ok(names.iter().map(|_| Kernel(0)).collect())
    }

    fn allocate(&self, _: usize) -> Result<DevicePointer, DeviceError> {
        refused()
    }

    unsafe fn free(&self, _: DevicePointer) {}

    fn allocate_pinned(&self, _: usize) -> Result<NonNull<u8>, DeviceError> {
        refused()
    }

    unsafe fn free_pinned(&self, _: NonNull<u8>, _: usize) {}

    unsafe fn launch(&self, _: Stream, _: Kernel, _: Grid, _: &[u8]) -> Result<(), DeviceError> {
        refused()
    }

    /// Kernels are only compiled here, and read no tensor map.
    fn tensor_map(&self, _: &Tensor) -> Result<TensorMap, DeviceError> {
        Ok(TensorMap::default())
    }

    unsafe fn multiply(&self, _: &Product) -> Result<(), DeviceError> {
        refused()
    }

    unsafe fn copy(
        &self,
        _: Stream,
        _: DevicePointer,
        _: DevicePointer,
        _: usize,
    ) -> Result<(), DeviceError> {
        refused()
    }

    fn record(&self, _: Stream) -> Result<Event, DeviceError> {
        refused()
    }

    fn wait_on(&self, _: Stream, _: Event) -> Result<(), DeviceError> {
        refused()
    }

    fn is_done(&self, _: Event) -> Result<bool, DeviceError> {
        refused()
    }

    fn synchronize(&self, _: Event) -> Result<(), DeviceError> {
        refused()
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        refused()
    }

    fn end_capture(&self) -> Result<Graph, DeviceError> {
        refused()
    }

    unsafe fn launch_graph(&self, _: Graph) -> Result<(), DeviceError> {
        refused()
    }
}
