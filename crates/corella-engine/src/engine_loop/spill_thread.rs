//! Host memory for the KV of preempted requests, and the thread that copies KV to host memory and back.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::{self, JoinHandle};

use corella_core::{PageId, RequestId, Scheduler, SpillTask};
use corella_model::KvPages;

use crate::log::panic_message::panic_message;
use crate::wake::doorbell::{Doorbell, LoopSender, loop_channel};
use crate::wake::feed::{Feed, FeedReader, subscription};

/// Carries out the scheduler's [`SpillTask`]s one by one. The loop never copies and never waits for a copy.
pub(crate) struct SpillThread {
    tasks: Feed<SpillTask>,
    /// `None` while the thread ends.
    ended: Option<Receiver<EndedCopy>>,
    thread: Option<JoinHandle<()>>,
}

enum EndedCopy {
    Stored { request: RequestId, is_done: bool },
    Restored { request: RequestId, is_done: bool },
}

/// The limit of waiting tasks, and of waiting reports of ended copies. Further tasks wait in the scheduler.
const MAX_UNREAD: usize = 16;

impl SpillThread {
    /// Starts the thread. It allocates host memory when it is first used, up to `max_pages` pages, and keeps it.
    pub(crate) fn start(
        pages: Arc<dyn KvPages>,
        max_pages: u32,
        doorbell: Doorbell,
    ) -> io::Result<Self> {
        let (sender, tasks) = subscription(MAX_UNREAD, doorbell.clone());
        let (report, ended) = loop_channel(MAX_UNREAD, doorbell);
        let mut memory = HostMemory::new(pages, max_pages as usize);
        let thread = thread::Builder::new()
            .name("corella-spill".to_owned())
            .spawn(move || memory.run(&tasks, &report))?;
        let mut tasks = Feed::default();
        tasks.subscribe(sender);
        Ok(Self {
            tasks,
            ended: Some(ended),
            thread: Some(thread),
        })
    }

    /// Passes the scheduler's tasks to the thread until the channel is full.
    pub(crate) fn forward_tasks(&mut self, scheduler: &mut Scheduler) {
        self.tasks.forward(|| scheduler.poll_spill_task());
    }

    /// Reports ended copies to the scheduler.
    pub(crate) fn take_ended(&mut self, scheduler: &mut Scheduler) {
        for ended in self.ended.iter().flat_map(Receiver::try_iter) {
            match ended {
                EndedCopy::Stored { request, is_done } => scheduler.handle_stored(request, is_done),
                EndedCopy::Restored { request, is_done } => {
                    scheduler.handle_restored(request, is_done)
                }
            };
        }
    }
}

impl Drop for SpillThread {
    fn drop(&mut self) {
        self.tasks = Feed::default();
        // The thread must not wait for room for its reports.
        self.ended = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct HostMemory {
    pages: Arc<dyn KvPages>,
    stored: HashMap<RequestId, Vec<PageBytes>>,
    unused: Vec<PageBytes>,
    num_pages: usize,
    max_pages: usize,
}

/// All layers of a page, one after the other.
type PageBytes = Vec<u8>;

impl HostMemory {
    fn new(pages: Arc<dyn KvPages>, max_pages: usize) -> Self {
        Self {
            pages,
            stored: HashMap::new(),
            unused: Vec::new(),
            num_pages: 0,
            max_pages,
        }
    }

    fn run(&mut self, tasks: &FeedReader<SpillTask>, report: &LoopSender<EndedCopy>) {
        while let Some(task) = tasks.next_blocking() {
            let ended = match task {
                SpillTask::Store { request, pages } => EndedCopy::Stored {
                    request,
                    is_done: self.try_copy(request, |memory| memory.store(request, &pages)),
                },
                SpillTask::Restore { request, pages } => {
                    let is_done = self.try_copy(request, |memory| memory.restore(request, &pages));
                    self.discard(request);
                    EndedCopy::Restored { request, is_done }
                }
                SpillTask::Discard { request } => {
                    self.discard(request);
                    continue;
                }
            };
            if !report.send(ended) {
                return;
            }
        }
    }

    /// A copy that fails costs one request the time to compute its KV again, so no error in a copy ends the thread.
    fn try_copy(
        &mut self,
        request: RequestId,
        copy: impl FnOnce(&mut Self) -> Result<(), String>,
    ) -> bool {
        let copied = catch_unwind(AssertUnwindSafe(|| copy(self)));
        let copied = copied.unwrap_or_else(|panic| Err(panic_message(&*panic)));
        if let Err(reason) = &copied {
            tracing::warn!(%request, reason, "KV is not copied between its pages and host memory");
        }
        copied.is_ok()
    }

    fn store(&mut self, request: RequestId, pages: &[PageId]) -> Result<(), String> {
        for &page in pages {
            let mut bytes = self.take_page()?;
            // SAFETY: until `handle_stored`, which comes after this, the scheduler keeps the pages of the preempted
            // request locked, no step names the request, and no write reaches shared pages.
            unsafe { self.pages.read_whole(&[page], &mut bytes) };
            self.stored.entry(request).or_default().push(bytes);
        }
        Ok(())
    }

    fn restore(&mut self, request: RequestId, pages: &[(u32, PageId)]) -> Result<(), String> {
        let stored = self.stored.get(&request);
        for &(number, page) in pages {
            let bytes = stored.and_then(|stored| stored.get(number as usize));
            let bytes = bytes.ok_or("it was not stored")?;
            // SAFETY: the scheduler has reserved these pages for this request, which has no slot, and gives them to no
            // other request until `handle_restored`, which comes after this.
            unsafe { self.pages.write_whole(&[page], bytes) };
        }
        Ok(())
    }

    fn discard(&mut self, request: RequestId) {
        let stored = self.stored.remove(&request);
        self.unused.extend(stored.into_iter().flatten());
    }

    fn take_page(&mut self) -> Result<PageBytes, String> {
        if let Some(bytes) = self.unused.pop() {
            return Ok(bytes);
        }
        if self.num_pages == self.max_pages {
            return Err(format!("all {} pages are taken", self.max_pages));
        }
        let page_bytes = self.pages.geometry().page_bytes();
        let mut bytes = Vec::new();
        let reserved = bytes.try_reserve_exact(page_bytes);
        reserved.map_err(|error| error.to_string())?;
        bytes.resize(page_bytes, 0);
        self.num_pages += 1;
        Ok(bytes)
    }
}
