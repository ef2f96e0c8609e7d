//! The threads that copy KV rows from and to sockets.

use std::future::Future;
use std::io;
use std::sync::Arc;

use tokio::runtime::{Builder, Runtime};

/// Few, because they take turns with the executor's workers. Sender and receiver of a node may share
/// them, and nothing else runs there: a task may copy for as long as a chunk takes.
#[derive(Clone)]
pub struct TransferThreads {
    runtime: Arc<OwnRuntime>,
}

/// A runtime that ends without waiting for its tasks, so that it may end anywhere.
struct OwnRuntime(Option<Runtime>);

impl TransferThreads {
    pub fn start(num_threads: usize) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(num_threads)
            .max_blocking_threads(1)
            .thread_name("kv-transfer")
            .enable_all()
            .build()?;
        let runtime = Arc::new(OwnRuntime(Some(runtime)));
        Ok(Self { runtime })
    }

    pub(super) fn runtime(&self) -> &Runtime {
        self.runtime
            .0
            .as_ref()
            .expect("it ends with the last owner")
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime().spawn(task);
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
