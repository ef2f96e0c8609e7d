//! The tier with a scheduler whose clock the test sets.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use corella_core::{Batch, BatchOutput, RequestId, Sample, SchedulerConfig};
use corella_model::{Executor, MockConfig, MockExecutor};
use corella_test::wait_until;

use super::fetch_wait::{LEAST_WAIT_US, LONGEST_WAIT_US};
use super::file_layer::FileLayer;
use super::*;
use crate::request::submission::Submission;
use crate::wake::doorbell::{WakeReceiver, doorbell};

mod fault;
mod store_all;
mod trace;

/// A prompt of six whole blocks and a part of a seventh.
const NUM_BLOCKS: u64 = 6;

struct Bench {
    disk: KvDisk,
    scheduler: Scheduler,
    now_us: u64,
    num_requests: u64,
    folder: PathBuf,
    _wake_receiver: WakeReceiver,
}

/// A file whose reads and writes panic on demand.
struct PanickingFile {
    file: File,
    panics: Arc<AtomicBool>,
}

impl PanickingFile {
    fn check(&self) {
        assert!(!self.panics.load(Ordering::Relaxed), "a panic on demand");
    }
}

impl FileLayer for PanickingFile {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.check();
        self.file.read_at(bytes, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.check();
        self.file.write_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn reserve(&self, len: u64) -> io::Result<u64> {
        self.file.reserve(len)
    }

    fn clear(&self) -> io::Result<()> {
        self.file.clear()
    }
}

fn config(folder: &Path, sizes: &[u64]) -> KvDiskConfig {
    let folders = sizes.iter().enumerate();
    let folders = folders
        .map(|(disk, &max_bytes)| KvDiskFolder::new(folder.join(disk.to_string()), max_bytes));
    KvDiskConfig {
        places: KvPlaces::Folders(folders.collect()),
        label: KvDiskLabel::default(),
        identity: 1,
        keeps_salted: false,
        reads_always: false,
    }
}

impl Bench {
    fn new(name: &str) -> Self {
        Self::with_tier(name, 64, 1 << 20, |_, _| {})
    }

    /// A bench whose file panics when the flag is set.
    fn panicking(name: &str) -> (Self, Arc<AtomicBool>) {
        let panics = Arc::new(AtomicBool::new(false));
        let flag = panics.clone();
        let bench = Self::with_tier(name, 64, 1 << 20, |tier, folder| {
            fs::create_dir_all(folder).unwrap();
            let mut options = File::options();
            options.read(true).write(true).create_new(true);
            let file = options.open(folder.join("file")).unwrap();
            tier.use_file(0, Box::new(PanickingFile { file, panics: flag }));
        });
        (bench, panics)
    }

    fn with_tier(
        name: &str,
        num_pages: u32,
        max_bytes: u64,
        prepare: impl FnOnce(&Tier, &Path),
    ) -> Self {
        Self::with_disks(name, num_pages, &[max_bytes], prepare)
    }

    /// A bench with disks of these sizes.
    fn with_disks(
        name: &str,
        num_pages: u32,
        sizes: &[u64],
        prepare: impl FnOnce(&Tier, &Path),
    ) -> Self {
        let mut limits = SchedulerConfig::new(num_pages, 4, 4 * num_pages);
        (limits.max_fetched_pages, limits.max_served_pages) = (num_pages, num_pages);
        let mut scheduler = Scheduler::new(limits).unwrap();
        let name = format!("corella-kv-bench-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        let config = config(&folder, sizes);
        let pages = MockExecutor::new(MockConfig::new(50, num_pages, 4)).kv_pages();
        let (bell, wake_receiver) = doorbell();
        let tier = Tier::new(&config, pages.clone());
        prepare(&tier, &folder);
        let disk = KvDisk::start_with(tier, pages, &mut scheduler, bell).unwrap();
        wait_until("the file is open", || disk.tier.store_to_write().is_some());
        Self {
            disk,
            scheduler,
            now_us: 1,
            num_requests: 0,
            folder,
            _wake_receiver: wake_receiver,
        }
    }

    fn request(&mut self) -> Request {
        self.request_of((0..26).collect())
    }

    fn request_of(&mut self, prompt: Vec<TokenId>) -> Request {
        self.num_requests += 1;
        Submission::new(prompt, 1).into_request(RequestId(self.num_requests), self.now_us)
    }

    /// Computes the prompt in a step of 26 ms, a millisecond for each token.
    fn compute(&mut self) {
        let request = self.request();
        self.answer(request, 26_000);
    }

    /// Answers a request in one step. Returns the number of computed tokens.
    fn answer(&mut self, request: Request, step_us: u64) -> usize {
        self.scheduler.add_requests(vec![request]).unwrap();
        self.answer_waiting(step_us)
    }

    /// Answers the waiting request.
    fn answer_waiting(&mut self, step_us: u64) -> usize {
        let batch = self.scheduler.schedule(self.now_us).unwrap();
        let num_tokens = batch.num_tokens();
        let Batch { step, spans, .. } = batch;
        self.now_us += step_us;
        let sample = Sample {
            token: 1,
            logprobs: None,
        };
        self.scheduler.update_from_output(&BatchOutput {
            step,
            samples: vec![(spans[0].slot, sample)],
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: Vec::new(),
        });
        assert!(self.scheduler.schedule(self.now_us).is_none());
        num_tokens
    }

    fn begin_fetch(&mut self) {
        let request = self.request();
        self.begin_fetch_of(&request);
    }

    fn begin_fetch_of(&mut self, request: &Request) {
        self.scheduler.note_time(self.now_us);
        self.disk
            .begin_fetch(request, &mut self.scheduler, self.now_us);
    }

    /// Passes reports on until a condition holds.
    fn run_until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        wait_until(what, || {
            self.disk.take_reports(&mut self.scheduler, self.now_us);
            condition(self)
        });
        self.scheduler.check_invariants();
    }

    /// Stores the prompt, and forgets it in memory.
    fn store(&mut self) {
        self.compute();
        self.compute();
        self.disk.store_next(&mut self.scheduler, self.now_us);
        while self.disk.path.is_some() {
            self.run_until("a part of the prompt is stored", |bench| {
                bench.disk.path.as_ref().is_none_or(|path| !path.is_busy)
            });
            self.disk.store_next(&mut self.scheduler, self.now_us);
        }
        assert_eq!(self.disk.tier.stats().num_pages, NUM_BLOCKS as usize);
        self.scheduler.reset_prefix_cache().unwrap();
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn a_prompt_on_the_disk_is_fetched_before_it_is_known_to_be_slow() {
    let mut bench = Bench::new("fetched");
    bench.store();
    bench.begin_fetch();
    assert_eq!(bench.disk.fetches.len(), 1);
    // A request with the same prompt waits for the fetch.
    let request = bench.request();
    bench.scheduler.add_requests(vec![request]).unwrap();
    assert!(bench.scheduler.schedule(bench.now_us).is_none());
    bench.run_until("it is fetched", |bench| bench.disk.fetches.is_empty());
    assert_eq!(bench.scheduler.stats().num_fetched_blocks, NUM_BLOCKS);
    let batch = bench.scheduler.schedule(bench.now_us).unwrap();
    assert_eq!(batch.num_tokens(), 26 - 4 * NUM_BLOCKS as usize);
    assert!(bench.disk.paces.kilopage_us(0) > 0);
}

/// A block takes 4 ms to compute. Reads of a minute each are not chosen, until short ones have been measured.
#[test]
fn a_slow_disk_is_measured_and_not_used() {
    let mut bench = Bench::new("slow");
    bench.store();
    bench.disk.paces.note(0, 1, 60_000_000);
    let slow_us = bench.disk.paces.kilopage_us(0);
    bench.begin_fetch();
    assert_eq!(
        bench.disk.tier.stats().bytes_read,
        0,
        "it was measured just now"
    );
    bench.now_us += MEASURE_AFTER_US;
    bench.begin_fetch();
    assert!(bench.disk.fetches.is_empty());
    bench.run_until("a block is measured", |bench| {
        bench.disk.paces.kilopage_us(0) < slow_us
    });
    assert_eq!(bench.disk.tier.stats().num_read, 0, "no request has it");
    assert_eq!(bench.scheduler.stats().num_fetching_pages, 0);
    bench.disk.paces = DiskPaces::new(1);
    bench.disk.paces.note(0, 1000, 1000);
    bench.begin_fetch();
    assert_eq!(bench.disk.fetches.len(), 1);
    bench.run_until("it is fetched", |bench| bench.disk.fetches.is_empty());
}

/// The hold of a copy ends when requests need its pages, or at its time.
#[test]
fn a_copy_whose_hold_has_ended_is_not_written() {
    let mut bench = Bench::new("held");
    bench.compute();
    bench.compute();
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    assert_eq!(bench.scheduler.stats().num_block_holds, 1);
    bench.now_us += HOLD_US;
    bench.scheduler.note_time(bench.now_us);
    let ended = bench.scheduler.poll_ended_hold().unwrap();
    assert!(bench.disk.has_hold(ended));
    bench.run_until("the copy is given up", |bench| bench.disk.path.is_none());
    let stats = bench.disk.tier.stats();
    assert_eq!((stats.num_stored, stats.bytes_written), (0, 0));
    assert_eq!(bench.scheduler.stats().num_block_holds, 0);
    // The path is offered again at its next use, after a pause.
    bench.compute();
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    assert_eq!(bench.scheduler.stats().num_block_holds, 0);
    bench.now_us += PAUSE_US;
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    bench.run_until("it is stored", |bench| {
        bench.disk.tier.stats().num_stored == NUM_BLOCKS
    });
}

#[test]
fn a_cancelled_fetch_ends_and_gives_its_pages_back() {
    let mut bench = Bench::new("cancelled");
    bench.store();
    bench.begin_fetch();
    bench.now_us += LONGEST_WAIT_US;
    bench.scheduler.note_time(bench.now_us);
    let id = bench.scheduler.poll_fetch_cancel().unwrap();
    assert!(bench.disk.handle_fetch_cancelled(id));
    assert!(!bench.disk.handle_fetch_cancelled(FetchId(99)));
    bench.run_until("it has ended", |bench| bench.disk.fetches.is_empty());
    assert_eq!(bench.scheduler.stats().num_in_use_pages, 0);
}

#[test]
fn a_panic_of_the_reader_loses_its_fetches_and_ends_the_tier() {
    let (mut bench, panics) = Bench::panicking("dead-reader");
    bench.store();
    panics.store(true, Ordering::Relaxed);
    bench.begin_fetch();
    assert_eq!(bench.disk.fetches.len(), 1);
    let request = bench.request();
    bench.scheduler.add_requests(vec![request]).unwrap();
    assert!(bench.scheduler.schedule(bench.now_us).is_none());
    bench.run_until("the fetch is lost", |bench| bench.disk.fetches.is_empty());
    let batch = bench.scheduler.schedule(bench.now_us).unwrap();
    assert_eq!(batch.num_tokens(), 26);
    let stats = bench.disk.tier.stats();
    assert_eq!((stats.is_on(), stats.num_errors), (false, 1));
    panics.store(false, Ordering::Relaxed);
    assert!(!bench.disk.tier.try_again());
    bench.begin_fetch();
    assert!(bench.disk.fetches.is_empty());
}

#[test]
fn a_panic_of_the_writer_releases_its_hold_and_ends_the_tier() {
    let (mut bench, panics) = Bench::panicking("dead-writer");
    bench.compute();
    bench.compute();
    panics.store(true, Ordering::Relaxed);
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    assert_eq!(bench.scheduler.stats().num_block_holds, 1);
    bench.run_until("the path is given up", |bench| bench.disk.path.is_none());
    assert_eq!(bench.scheduler.stats().num_block_holds, 0);
    let stats = bench.disk.tier.stats();
    assert_eq!(
        (stats.is_on(), stats.num_errors, stats.num_stored),
        (false, 1, 0)
    );
    bench.now_us += PAUSE_US;
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    assert!(bench.disk.path.is_none());
}

/// The loop ends after it has taken the report of a copy, and before it answers.
#[test]
fn a_copy_whose_report_is_not_answered_does_not_keep_the_threads() {
    let mut bench = Bench::new("not-answered");
    bench.compute();
    bench.compute();
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    let report = bench.disk.reports.as_ref().unwrap().recv().unwrap();
    assert!(matches!(report, Report::Copied));
    let tier = Arc::downgrade(bench.disk.tier());
    let ended = std::thread::spawn(move || drop(bench));
    wait_until("the threads have ended", || ended.is_finished());
    assert!(tier.upgrade().is_none(), "the file is closed");
}
