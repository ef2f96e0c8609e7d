//! Errors of the disk while it is in use.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;

use corella_core::{
    BlockHasher, BlockList, FetchEnd, FetchId, Namespace, PageId, PageTable, SchedulerConfig,
};
use corella_model::{Executor, KvPages, MockConfig, MockExecutor};
use crossbeam_channel::{bounded, never};

use super::*;
use crate::kv_disk::page_list::{DiskPath, PathPage, path_pages};
use crate::kv_disk::read_task::ReadTask;
use crate::kv_disk::reader;
use crate::kv_disk::report::Report;
use crate::kv_disk::writer::{WriteTask, write};
use crate::wake::doorbell::{doorbell, loop_channel};

const NUM_BLOCKS: usize = 2;

fn config(folder: &Path) -> KvDiskConfig {
    KvDiskConfig {
        places: KvPlaces::Folders(vec![KvDiskFolder::new(folder, 1 << 20)]),
        label: KvDiskLabel::default(),
        identity: 1,
        keeps_salted: false,
        reads_always: false,
    }
}

fn fail(tier: &Tier) {
    let error = io::Error::other("it is pulled out");
    tier.switch_off("a test", DiskError { disk: 0, error });
}

/// Pages of four tokens, and a tier whose file is opened by these options.
fn tier(name: &str, options: &OpenOptions) -> (Arc<Tier>, Arc<dyn KvPages>) {
    let limits = SchedulerConfig::new(8, 4, 32);
    let pages = MockExecutor::new(MockConfig::new(50, limits.num_pages, 4)).kv_pages();
    let folder = std::env::temp_dir();
    let path = folder.join(format!("corella-kv-tier-{name}-{}", std::process::id()));
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let tier = Tier::new(&config(&folder), pages.clone());
    let file = options.open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    tier.use_file(0, Box::new(file));
    tier.store.open_disk(0);
    tier.store.scan(0, &tier.is_stopping).ok();
    tier.is_scanning.store(false, Ordering::Release);
    (Arc::new(tier), pages)
}

fn path() -> DiskPath {
    let (tokens, hasher) = ((0..4 * NUM_BLOCKS as u32).collect(), BlockHasher::new(1));
    let list = BlockList::new(Namespace::default(), tokens, &hasher, 4);
    DiskPath::new(list, SlotNamespace::default(), &hasher, 4)
}

fn pages(first: u32) -> Vec<PathPage> {
    path_pages(&[PageTable::whole(vec![PageId(first), PageId(first + 1)])])
}

fn write_task(tier: &Tier) -> WriteTask {
    let store = tier.store().unwrap();
    let path = path();
    WriteTask {
        pages: pages(0),
        state: None,
        validity: never(),
        time: store.begin_path(&path.hashes),
        epoch: store.epoch(),
        path,
    }
}

fn rows(tier: &Tier) -> Vec<u8> {
    vec![5; NUM_BLOCKS * tier.pages.geometry().page_bytes()]
}

#[test]
fn a_failed_write_switches_the_tier_off() {
    let (tier, _) = tier("write", OpenOptions::new().read(true));
    let task = write_task(&tier);
    assert!(!write(&tier, &task, &rows(&tier)));
    let stats = tier.stats();
    assert_eq!(
        (stats.is_on(), stats.num_errors, stats.num_stored),
        (false, 1, 0)
    );
    // Nothing more is tried.
    assert!(!write(&tier, &task, &rows(&tier)));
    assert_eq!(tier.stats().num_errors, 1);
}

#[test]
fn the_subscriber_learns_that_a_disk_was_tried() {
    let (tier, _) = tier("ring", OpenOptions::new().read(true));
    let (bell, rings) = bounded(1);
    assert!(tier.set_bell(bell));
    fail(&tier);
    assert_eq!(rings.try_recv(), Ok(()));
    assert!(!tier.try_again());
    assert_eq!(rings.try_recv(), Ok(()));
}

/// Another process has the file open at first.
#[test]
fn the_tier_comes_back_when_its_file_can_be_opened() {
    let folder = std::env::temp_dir();
    let folder = folder.join(format!("corella-kv-tier-again-{}", std::process::id()));
    let limits = SchedulerConfig::new(8, 4, 32);
    let pages = MockExecutor::new(MockConfig::new(50, limits.num_pages, 4)).kv_pages();
    let tier = Tier::new(&config(&folder), pages);
    let other = KvFile::open(&KvDiskFolder::new(&folder, 1 << 20), tier.layout).unwrap();
    assert!(!tier.try_again(), "nothing has failed");
    tier.open();
    assert!(!tier.try_again() && tier.store_to_write().is_none());
    drop(other);
    assert!(tier.try_again());
    assert!(write(&tier, &write_task(&tier), &rows(&tier)));
    let stats = tier.stats();
    assert_eq!((stats.is_on(), stats.num_errors), (true, 1));
    assert!(!tier.try_again(), "it is on");
    // When a failed disk works again, it has the blocks that it had before.
    fail(&tier);
    assert!(tier.store().is_none());
    assert!(tier.try_again());
    assert_eq!(tier.stats().num_pages, NUM_BLOCKS);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_failed_read_loses_the_fetch_and_switches_the_tier_off() {
    let (tier, kv) = tier("read", OpenOptions::new().write(true));
    // The blocks are in the index, and the file cannot be read.
    let store = tier.store().unwrap();
    assert!(store.erase(&[0]).is_empty());
    assert!(write(&tier, &write_task(&tier), &rows(&tier)));
    let (bell, _wake_receiver) = doorbell();
    let (report, reports) = loop_channel(8, bell);
    let (reads, shares) = bounded(1);
    let thread = reader::start(0, tier.clone(), kv, shares, report).unwrap();
    let task = ReadTask {
        fetch: Some(FetchId(3)),
        path: path(),
        first: 0,
        state: None,
        is_stopped: Arc::default(),
    };
    let (disk, share) = task.split(&pages(2), &[0; NUM_BLOCKS]).pop().unwrap();
    assert_eq!(disk, 0);
    reads.send(share).unwrap();
    drop(reads);
    thread.join().unwrap();
    let ended = reports.iter().find_map(|report| match report {
        Report::FetchEnded { id, end } => Some((id, end)),
        _ => None,
    });
    assert_eq!(ended, Some((FetchId(3), FetchEnd::Lost)));
    let stats = tier.stats();
    assert_eq!(
        (stats.is_on(), stats.num_errors, stats.num_read),
        (false, 1, 0)
    );
}

/// A file with two pages.
fn stored(name: &str) -> Arc<Tier> {
    let (tier, _) = tier(name, OpenOptions::new().read(true).write(true));
    assert!(write(&tier, &write_task(&tier), &rows(&tier)));
    assert_eq!(tier.stats().num_pages, NUM_BLOCKS);
    tier
}

#[test]
fn pages_that_had_to_be_erased_while_the_disk_failed_are_not_found_afterwards() {
    let tier = stored("late-reset");
    fail(&tier);
    tier.erase();
    assert!(tier.try_again());
    assert_eq!(tier.stats().num_pages, 0);
    assert!(write(&tier, &write_task(&tier), &rows(&tier)));

    let tier = stored("late-adapter");
    tier.add_adapter("a".into(), 5);
    fail(&tier);
    tier.remove_adapter("a");
    assert!(tier.try_again());
    assert_eq!(tier.stats().num_pages, 0);
    tier.add_adapter("b".into(), 6);
    assert!(write(&tier, &write_task(&tier), &rows(&tier)));
    tier.remove_adapter("b");
    assert_eq!(tier.stats().num_pages, NUM_BLOCKS, "its own pages alone");
    fail(&tier);
    assert!(tier.try_again());
    assert_eq!(tier.stats().num_pages, NUM_BLOCKS);
}

#[test]
fn callers_do_not_wait_for_a_tier_whose_thread_has_panicked() {
    let (tier, _) = tier("dead", OpenOptions::new().read(true).write(true));
    let (bell, rings) = bounded(1);
    assert!(tier.set_bell(bell));
    tier.give_up();
    tier.wait_opened(Duration::MAX);
    assert!(!tier.stats().is_on());
    assert_eq!(rings.try_recv(), Ok(()), "the subscriber learns it");
}
