//! The threads that copy KV rows from and to sockets.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::watch;

/// The threads are few, because they compete with the executor's workers. A node's sender and receiver may share them.
/// Nothing else runs on them, because a task may copy for as long as a chunk takes.
///
/// A connection stays on one thread with all of its tasks, so that no message needs another thread to be woken.
#[derive(Clone)]
pub struct TransferThreads {
    threads: Arc<Threads>,
}

struct Threads {
    handles: Vec<Handle>,
    next: AtomicUsize,
    /// The threads end when the last owner drops this sender.
    _alive: watch::Sender<()>,
}

impl TransferThreads {
    pub fn start(num_threads: usize) -> io::Result<Self> {
        let (alive, _) = watch::channel(());
        let start = |_| {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let handle = runtime.handle().clone();
            let mut is_alive = alive.subscribe();
            thread::Builder::new()
                .name("kv-transfer".to_owned())
                .spawn(move || {
                    runtime.block_on(async { while is_alive.changed().await.is_ok() {} })
                })?;
            Ok(handle)
        };
        let handles = (0..num_threads.max(1)).map(start);
        Ok(Self {
            threads: Arc::new(Threads {
                handles: handles.collect::<io::Result<_>>()?,
                next: AtomicUsize::new(0),
                _alive: alive,
            }),
        })
    }

    /// Returns the threads in turn.
    pub(super) fn next(&self) -> &Handle {
        self.get(self.threads.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the same thread for the same index.
    pub(super) fn get(&self, index: usize) -> &Handle {
        &self.threads.handles[index % self.threads.handles.len()]
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.next().spawn(task);
    }
}
