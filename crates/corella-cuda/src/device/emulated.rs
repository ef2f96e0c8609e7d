//! A device in the host's memory: it runs the same kernel sources, compiled by a host compiler, so that all code above
//! a device can be tested without a GPU.
//!
//! It finds errors that a GPU would hide: threads that miss a barrier, reads of unwritten shared memory, accesses
//! beyond an allocation, parameters of the wrong size, work on released events. Streams run at once, and graphs are
//! lists of work to repeat.

use std::collections::{BTreeMap, HashSet};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use corella_model::DeviceError;

use super::loaded_kernels::LoadedKernels;
use super::{
    Device, DevicePointer, DeviceProperties, Event, Graph, Grid, Kernel, ModuleSource, Product,
    SharedDevice, Stream,
};

mod fault;
mod guarded_memory;
mod host_compiler;
mod library;
mod product;
#[cfg(test)]
mod tests;

use guarded_memory::GuardedMemory;
use library::{Function, Library};

/// The size of memory that the device reports.
const TOTAL_BYTES: usize = 1 << 30;
/// The limit of the smallest supported device, `sm_80`.
const MAX_SHARED_BYTES: usize = 163 << 10;

#[derive(Debug)]
pub struct EmulatedDevice {
    properties: DeviceProperties,
    memory: Mutex<Memory>,
    /// Loaded functions, by the number in `Kernel`.
    functions: Mutex<Vec<Arc<Function>>>,
    loaded: LoadedKernels,
    work: Mutex<Work>,
}

#[derive(Debug, Default)]
struct Memory {
    allocations: BTreeMap<u64, GuardedMemory>,
    num_bytes: usize,
}

#[derive(Debug, Default)]
struct Work {
    num_events: u64,
    live_events: HashSet<u64>,
    captured: Option<Vec<Operation>>,
    graphs: Vec<Arc<Vec<Operation>>>,
}

#[derive(Clone, Debug)]
enum Operation {
    Launch {
        function: Arc<Function>,
        grid: Grid,
        args: Vec<u8>,
    },
    Multiply(Product),
    Copy {
        to: DevicePointer,
        from: DevicePointer,
        num_bytes: usize,
    },
}

impl EmulatedDevice {
    pub fn open() -> SharedDevice {
        fault::install_handler();
        Arc::new(Self {
            properties: DeviceProperties {
                name: "emulated device".into(),
                architecture: "emulated".into(),
                num_multiprocessors: 4,
                max_shared_bytes: MAX_SHARED_BYTES,
                total_bytes: TOTAL_BYTES,
                free_bytes: TOTAL_BYTES,
                uses_wgmma: false,
            },
            memory: Mutex::default(),
            functions: Mutex::default(),
            loaded: LoadedKernels::default(),
            work: Mutex::default(),
        })
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap()
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap()
    }

    fn allocate_guarded(&self, num_bytes: usize) -> Result<u64, DeviceError> {
        let mut memory = self.memory();
        let num_free = TOTAL_BYTES - memory.num_bytes;
        if num_bytes > num_free {
            return Err(DeviceError(format!(
                "the emulated device is out of memory: {num_bytes} bytes wanted, {num_free} free"
            )));
        }
        let allocation = GuardedMemory::new(num_bytes)?;
        let address = allocation.address();
        memory.num_bytes += num_bytes;
        memory.allocations.insert(address, allocation);
        Ok(address)
    }

    fn free_guarded(&self, address: u64) {
        let mut memory = self.memory();
        let allocation = (memory.allocations.remove(&address))
            .unwrap_or_else(|| panic!("{address:#x} is freed, but nothing was allocated there"));
        memory.num_bytes -= allocation.num_bytes();
        drop(memory);
        allocation.check();
    }

    /// Whether a range lies in one allocation, of the device or pinned.
    fn check_range(
        &self,
        what: &str,
        pointer: DevicePointer,
        num_bytes: usize,
    ) -> Result<(), DeviceError> {
        let memory = self.memory();
        let is_inside = (memory.allocations.range(..=pointer.0).next_back()).is_some_and(
            |(address, allocation)| {
                pointer.0 - address + num_bytes as u64 <= allocation.num_bytes() as u64
            },
        );
        if num_bytes == 0 || is_inside {
            return Ok(());
        }
        Err(DeviceError(format!(
            "{what} of {num_bytes} bytes at {:#x} is not within one allocation",
            pointer.0
        )))
    }

    /// # Safety
    /// As for the call of the trait that makes the operation.
    unsafe fn perform(&self, operation: &Operation) -> Result<(), DeviceError> {
        match operation {
            Operation::Launch {
                function,
                grid,
                args,
            } => {
                // SAFETY: the caller's promise about the launch.
                unsafe { function.run(*grid, args) }
            }
            Operation::Multiply(product) => {
                let Product { m, n, k, .. } = *product;
                let out_len = if m == 0 {
                    0
                } else {
                    (m - 1) * product.out_stride + n
                };
                let sizes = [
                    (
                        "the input",
                        product.input,
                        m * k * product.element.num_bytes(),
                    ),
                    (
                        "the weight",
                        product.weight,
                        n * k * product.element.num_bytes(),
                    ),
                    (
                        "the output",
                        product.out,
                        out_len * product.out_element.num_bytes(),
                    ),
                ];
                for (what, pointer, num_bytes) in sizes {
                    self.check_range(&format!("{what} of a product"), pointer, num_bytes)?;
                }
                // SAFETY: the ranges are allocated, and by the caller's promise no other work changes them.
                unsafe { product::multiply(product) };
                Ok(())
            }
            Operation::Copy {
                to,
                from,
                num_bytes,
            } => {
                self.check_range("the destination of a copy", *to, *num_bytes)?;
                self.check_range("the source of a copy", *from, *num_bytes)?;
                // SAFETY: both ranges are allocated, and by the caller's promise no other work changes them.
                unsafe {
                    std::ptr::copy(from.0 as *const u8, to.0 as *mut u8, *num_bytes);
                }
                Ok(())
            }
        }
    }

    /// Runs an operation of a stream at once, or records it in the captured graph.
    ///
    /// # Safety
    /// As for `perform`.
    unsafe fn run(&self, stream: Stream, operation: Operation) -> Result<(), DeviceError> {
        if stream == Stream::Compute
            && let Some(captured) = &mut self.work().captured
        {
            captured.push(operation);
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.perform(&operation) }
    }
}

impl Device for EmulatedDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn allocate(&self, num_bytes: usize) -> Result<DevicePointer, DeviceError> {
        self.allocate_guarded(num_bytes).map(DevicePointer)
    }

    unsafe fn free(&self, pointer: DevicePointer) {
        self.free_guarded(pointer.0);
    }

    fn allocate_pinned(&self, num_bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let address = self.allocate_guarded(num_bytes)?;
        Ok(NonNull::new(address as *mut u8).expect("memory has an address"))
    }

    unsafe fn free_pinned(&self, pointer: NonNull<u8>, _: usize) {
        self.free_guarded(pointer.as_ptr() as u64);
    }

    fn load(&self, source: &ModuleSource, names: &[&str]) -> Result<Vec<Kernel>, DeviceError> {
        self.loaded.get_or_load(source, names, || {
            let object = host_compiler::compile(source)?;
            let library = Arc::new(Library::open(source.name, &object)?);
            let mut kernels = Vec::with_capacity(names.len());
            for name in names {
                let function = Function::find(&library, name)?;
                let mut functions = self.functions.lock().unwrap();
                kernels.push(Kernel(functions.len() as u64));
                functions.push(Arc::new(function));
            }
            Ok(kernels)
        })
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: Kernel,
        grid: Grid,
        args: &[u8],
    ) -> Result<(), DeviceError> {
        let function = {
            self.functions
                .lock()
                .unwrap()
                .get(kernel.0 as usize)
                .cloned()
        };
        let function =
            function.ok_or_else(|| DeviceError(format!("no kernel has number {}", kernel.0)))?;
        function.check(grid, args.len(), self.properties.max_shared_bytes)?;
        let args = args.to_vec();
        let launch = Operation::Launch {
            function,
            grid,
            args,
        };
        // SAFETY: the caller's promise.
        unsafe { self.run(stream, launch) }
    }

    unsafe fn multiply(&self, product: &Product) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.run(Stream::Compute, Operation::Multiply(*product)) }
    }

    unsafe fn copy(
        &self,
        stream: Stream,
        to: DevicePointer,
        from: DevicePointer,
        num_bytes: usize,
    ) -> Result<(), DeviceError> {
        let copy = Operation::Copy {
            to,
            from,
            num_bytes,
        };
        // SAFETY: the caller's promise.
        unsafe { self.run(stream, copy) }
    }

    fn record(&self, stream: Stream) -> Result<Event, DeviceError> {
        let mut work = self.work();
        if stream == Stream::Compute && work.captured.is_some() {
            return Err(DeviceError("an event cannot be recorded in a graph".into()));
        }
        let event = work.num_events;
        work.num_events += 1;
        work.live_events.insert(event);
        Ok(Event(event))
    }

    fn wait_on(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        if stream == Stream::Compute && self.work().captured.is_some() {
            return Err(DeviceError("a graph cannot wait for an event".into()));
        }
        self.is_done(event).map(|_| ())
    }

    fn is_done(&self, event: Event) -> Result<bool, DeviceError> {
        match self.work().live_events.contains(&event.0) {
            true => Ok(true),
            false => Err(DeviceError(format!("event {} is forgotten", event.0))),
        }
    }

    fn synchronize(&self, event: Event) -> Result<(), DeviceError> {
        match self.work().live_events.remove(&event.0) {
            true => Ok(()),
            false => Err(DeviceError(format!("event {} is forgotten", event.0))),
        }
    }

    fn begin_capture(&self) -> Result<(), DeviceError> {
        let mut work = self.work();
        if work.captured.is_some() {
            return Err(DeviceError("a graph is being captured already".into()));
        }
        work.captured = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<Graph, DeviceError> {
        let mut work = self.work();
        let captured = work
            .captured
            .take()
            .ok_or_else(|| DeviceError("no graph is being captured".into()))?;
        work.graphs.push(Arc::new(captured));
        Ok(Graph(work.graphs.len() as u64 - 1))
    }

    unsafe fn launch_graph(&self, graph: Graph) -> Result<(), DeviceError> {
        let operations = {
            let work = self.work();
            if work.captured.is_some() {
                return Err(DeviceError("a graph cannot launch another".into()));
            }
            work.graphs.get(graph.0 as usize).cloned()
        };
        let operations =
            operations.ok_or_else(|| DeviceError(format!("no graph has number {}", graph.0)))?;
        for operation in operations.iter() {
            // SAFETY: the caller's promise.
            unsafe { self.perform(operation)? };
        }
        Ok(())
    }
}
