//! Faults of the disk while it is in use, and jumps of the clock.

use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard};
use std::thread;

use super::*;
use crate::kv_disk::page_store::DiskError;
use crate::kv_disk::writer::Writer;

const DAY_US: u64 = 86_400_000_000;
/// The rows of each block are written, then synchronised, and then the headers.
const NUM_CHANGES: u32 = 2 * (NUM_BLOCKS as u32 + 1);

/// A file in memory whose operations fail or wait on demand.
#[derive(Clone, Default)]
struct FaultyFile(Arc<Content>);

#[derive(Default)]
struct Content {
    bytes: Mutex<Vec<u8>>,
    fault: Mutex<Option<Fault>>,
    /// Locked while reads are held.
    reads: Mutex<()>,
    /// The number of reads that have begun.
    num_reads: AtomicUsize,
    /// The places of reads and of reads ahead, in their order.
    places: Mutex<Vec<Place>>,
    /// Locked while synchronisations are held.
    syncs: Mutex<()>,
    /// The number of synchronisations that have begun.
    num_syncs: AtomicUsize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Ahead { at: u64, num_bytes: u64 },
    Read { at: u64, num_bytes: u64 },
}

struct Fault {
    /// If true, reads fail. If false, all operations that change the file fail.
    is_of_reads: bool,
    /// The number of operations before the first that fails.
    num_good: u32,
    errno: i32,
}

impl FaultyFile {
    fn fail(&self, is_of_reads: bool, num_good: u32, errno: i32) {
        *self.0.fault.lock().unwrap() = Some(Fault {
            is_of_reads,
            num_good,
            errno,
        });
    }

    fn mend(&self) {
        *self.0.fault.lock().unwrap() = None;
    }

    /// Reads wait until the guard is dropped.
    fn hold_reads(&self) -> MutexGuard<'_, ()> {
        self.0.reads.lock().unwrap()
    }

    /// Synchronisations wait until the guard is dropped.
    fn hold_syncs(&self) -> MutexGuard<'_, ()> {
        self.0.syncs.lock().unwrap()
    }

    fn num_reads(&self) -> usize {
        self.0.num_reads.load(Ordering::Relaxed)
    }

    fn num_syncs(&self) -> usize {
        self.0.num_syncs.load(Ordering::Relaxed)
    }

    fn begin(&self, is_read: bool) -> io::Result<MutexGuard<'_, Vec<u8>>> {
        let mut fault = self.0.fault.lock().unwrap();
        if let Some(fault) = fault.as_mut().filter(|it| it.is_of_reads == is_read) {
            if fault.num_good == 0 {
                return Err(io::Error::from_raw_os_error(fault.errno));
            }
            fault.num_good -= 1;
        }
        Ok(self.0.bytes.lock().unwrap())
    }
}

impl FileLayer for FaultyFile {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.0.num_reads.fetch_add(1, Ordering::Relaxed);
        let num_bytes = bytes.len() as u64;
        let mut places = self.0.places.lock().unwrap();
        places.push(Place::Read { at, num_bytes });
        drop(places);
        drop(self.0.reads.lock().unwrap());
        let content = self.begin(true)?;
        let there = content.get(at as usize..at as usize + bytes.len());
        bytes.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn read_ahead(&self, at: u64, num_bytes: u64) {
        let mut places = self.0.places.lock().unwrap();
        places.push(Place::Ahead { at, num_bytes });
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut content = self.begin(false)?;
        content[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.num_syncs.fetch_add(1, Ordering::Relaxed);
        drop(self.0.syncs.lock().unwrap());
        self.begin(false).map(|_| ())
    }

    fn reserve(&self, len: u64) -> io::Result<u64> {
        let mut content = self.begin(false)?;
        let len = content.len().max(len as usize);
        content.resize(len, 0);
        Ok(len as u64)
    }

    fn clear(&self) -> io::Result<()> {
        self.begin(false)?.clear();
        Ok(())
    }
}

fn bench(name: &str) -> (Bench, FaultyFile) {
    let file = FaultyFile::default();
    let bench = Bench::with_tier(name, 64, 1 << 20, |tier, _| {
        tier.use_file(0, Box::new(file.clone()));
    });
    (bench, file)
}

impl Bench {
    /// Answers the prompt from the disk, or computes it. Returns the number of computed tokens.
    fn fetch_and_answer(&mut self) -> usize {
        // However slow this machine is, the disk counts as quicker than computing.
        self.disk.paces = DiskPaces::new(self.disk.tier.num_disks());
        self.begin_fetch();
        self.run_until("the fetch has ended", |bench| bench.disk.fetches.is_empty());
        let request = self.request();
        self.answer(request, 26_000)
    }
}

/// Switches a disk off, as the threads do after an error.
fn fail(tier: &Tier, disk: usize) {
    let error = io::Error::other("it is pulled out");
    tier.switch_off("a test", DiskError { disk, error });
}

/// Each error comes at each of the operations that store a prompt, and then at all further ones.
#[test]
fn a_disk_that_takes_no_writes_is_off_until_it_takes_them() {
    for errno in [libc::ENOSPC, libc::EROFS, libc::EIO] {
        for num_good in 0..NUM_CHANGES {
            let (mut bench, file) = bench(&format!("writes-{errno}-{num_good}"));
            bench.compute();
            bench.compute();
            file.fail(false, num_good, errno);
            bench.disk.store_next(&mut bench.scheduler, bench.now_us);
            bench.run_until("the path is given up", |bench| bench.disk.path.is_none());
            let tier = bench.disk.tier.clone();
            let stats = tier.stats();
            assert_eq!((stats.is_on(), stats.num_errors), (false, 1));
            assert_eq!(stats.num_stored, 0);
            assert!(!tier.try_again());
            // Requests do without the disk.
            bench.scheduler.reset_prefix_cache().unwrap();
            assert_eq!(bench.fetch_and_answer(), 26);
            assert_eq!(tier.stats().num_errors, 1, "nothing more is tried");

            file.mend();
            // The thread that writes tries, too.
            wait_until("it is on", || tier.try_again() || tier.stats().is_on());
            bench.now_us += PAUSE_US;
            bench.store();
            assert_eq!(bench.fetch_and_answer(), 26 - 4 * NUM_BLOCKS as usize);
            assert_eq!(tier.stats().num_damaged, 0);
        }
    }
}

#[test]
fn an_error_in_the_middle_of_a_fetch_leaves_the_blocks_before_it() {
    for num_good in 0..NUM_BLOCKS as u32 {
        let (mut bench, file) = bench(&format!("reads-{num_good}"));
        bench.store();
        file.fail(true, num_good, libc::EIO);
        assert_eq!(bench.fetch_and_answer(), 26 - 4 * num_good as usize);
        let tier = bench.disk.tier.clone();
        let stats = tier.stats();
        assert_eq!((stats.is_on(), stats.num_errors), (false, 1));
        assert_eq!(stats.num_read, u64::from(num_good));

        file.mend();
        wait_until("it is on", || tier.try_again() || tier.stats().is_on());
        bench.scheduler.reset_prefix_cache().unwrap();
        assert_eq!(bench.fetch_and_answer(), 26 - 4 * NUM_BLOCKS as usize);
    }
}

#[test]
fn a_disk_reads_two_pages_ahead_and_each_page_once() {
    let (mut bench, file) = bench("ahead");
    bench.store();
    file.0.places.lock().unwrap().clear();
    assert_eq!(bench.fetch_and_answer(), 26 - 4 * NUM_BLOCKS as usize);
    let places = file.0.places.lock().unwrap();
    let order = |is_wanted: fn(&Place) -> bool| {
        let wanted = places.iter().enumerate().filter(|(_, it)| is_wanted(it));
        let wanted = wanted.map(|(order, &place)| match place {
            Place::Ahead { at, num_bytes } | Place::Read { at, num_bytes } => {
                (order, (at, num_bytes))
            }
        });
        wanted.unzip::<usize, (u64, u64), Vec<_>, Vec<_>>()
    };
    let (ahead_order, ahead) = order(|place| matches!(place, Place::Ahead { .. }));
    let (read_order, read) = order(|place| matches!(place, Place::Read { .. }));
    assert_eq!(read.len(), NUM_BLOCKS as usize);
    // The first page is read at once.
    assert_eq!(ahead, read[1..]);
    for (at, &order) in ahead_order.iter().enumerate() {
        // Page `at + 1` is asked for when the pages up to `at - 2` have been read, and page 0 has not.
        let num_read = read_order.iter().filter(|&&read| read < order).count();
        assert_eq!(num_read, at.saturating_sub(1), "page {}", at + 1);
    }
}

/// A bench with two disks of the same size. The blocks of the prompt lie on them in turn.
fn bench_of_two(name: &str) -> (Bench, [FaultyFile; 2]) {
    let files = [FaultyFile::default(), FaultyFile::default()];
    let bench = Bench::with_disks(name, 64, &[1 << 20; 2], |tier, _| {
        for (disk, file) in files.iter().enumerate() {
            tier.use_file(disk, Box::new(file.clone()));
        }
    });
    (bench, files)
}

#[test]
fn two_disks_read_a_prompt_at_the_same_time() {
    let (mut bench, files) = bench_of_two("two");
    bench.store();
    let nums_read = || files.each_ref().map(FaultyFile::num_reads);
    let before = nums_read();
    let held = files[0].hold_reads();
    bench.begin_fetch();
    let half = NUM_BLOCKS as usize / 2;
    bench.run_until("the second disk has read", |_| {
        nums_read() == [before[0] + 1, before[1] + half]
    });
    assert_eq!(bench.disk.fetches.len(), 1);
    drop(held);
    bench.run_until("the fetch has ended", |bench| bench.disk.fetches.is_empty());
    assert_eq!(nums_read(), before.map(|num| num + half));
    assert_eq!(bench.scheduler.stats().num_fetched_blocks, NUM_BLOCKS);
    let request = bench.request();
    assert_eq!(bench.answer(request, 26_000), 26 - 4 * NUM_BLOCKS as usize);
    assert!(bench.disk.paces.kilopage_us(0) > 0);
}

/// The first block is on the first disk, and the second block on the second disk.
#[test]
fn when_a_disk_fails_the_other_goes_on() {
    for bad in 0..2 {
        for is_of_reads in [false, true] {
            let (mut bench, files) = bench_of_two(&format!("one-of-two-{bad}-{is_of_reads}"));
            let tier = bench.disk.tier.clone();
            let counts = || {
                let stats = tier.stats();
                (
                    stats.num_on,
                    stats.num_off,
                    stats.num_errors,
                    stats.num_pages,
                )
            };
            let half = NUM_BLOCKS as usize / 2;
            if is_of_reads {
                bench.store();
                files[bad].fail(true, 0, libc::EIO);
                assert_eq!(bench.fetch_and_answer(), 26 - 4 * bad);
                assert_eq!(counts(), (1, 1, 1, half));
                // The pages of the failed disk are stored again, on the other one.
                bench.scheduler.reset_prefix_cache().unwrap();
                bench.store();
            } else {
                files[bad].fail(false, 0, libc::ENOSPC);
                bench.store();
            }
            assert_eq!(counts(), (1, 1, 1, NUM_BLOCKS as usize));
            assert_eq!(bench.fetch_and_answer(), 26 - 4 * NUM_BLOCKS as usize);

            files[bad].mend();
            wait_until("it is on", || tier.try_again() || tier.stats().num_off == 0);
            bench.scheduler.reset_prefix_cache().unwrap();
            assert_eq!(bench.fetch_and_answer(), 26 - 4 * NUM_BLOCKS as usize);
            assert_eq!((tier.stats().num_damaged, tier.stats().num_on), (0, 2));
            // A reset erases both.
            tier.erase();
            assert_eq!(counts(), (2, 0, 1, 0));
            bench.scheduler.reset_prefix_cache().unwrap();
            assert_eq!(bench.fetch_and_answer(), 26);
        }
    }
}

/// The closed form takes the disk that ends last.
#[test]
fn a_fetch_from_two_disks_takes_as_long_as_the_slower() {
    let (mut bench, _files) = bench_of_two("slower");
    bench.store();
    let slow = |bench: &mut Bench, disk: usize| {
        bench.disk.paces = DiskPaces::new(2);
        bench.disk.paces.note(1 - disk, 1000, 1000);
        bench.disk.paces.note(disk, 1, 60_000_000);
    };
    for disk in 0..2 {
        slow(&mut bench, disk);
        let slow_us = bench.disk.paces.kilopage_us(disk);
        bench.now_us += MEASURE_AFTER_US;
        bench.begin_fetch();
        assert!(bench.disk.fetches.is_empty());
        // The slow disk is measured, and not the other one.
        let others_us = bench.disk.paces.kilopage_us(1 - disk);
        bench.run_until("a page is measured", |bench| {
            bench.disk.paces.kilopage_us(disk) < slow_us
        });
        assert_eq!(bench.disk.paces.kilopage_us(1 - disk), others_us);
    }
    assert_eq!(bench.disk.tier.stats().num_read, 0, "no request has it");
}

/// The reads end long after the request has.
#[test]
fn a_request_does_not_wait_for_a_slow_disk() {
    let (mut bench, file) = bench("slow-reads");
    bench.store();
    let held = file.hold_reads();
    bench.begin_fetch();
    let request = bench.request();
    bench.scheduler.add_requests(vec![request]).unwrap();
    assert!(bench.scheduler.schedule(bench.now_us).is_none());
    // Computing six blocks takes less than the time that each fetch has at least.
    bench.now_us += LEAST_WAIT_US / 2;
    assert!(bench.scheduler.schedule(bench.now_us).is_none());
    bench.now_us += LEAST_WAIT_US;
    assert_eq!(bench.answer_waiting(26_000), 26);
    assert_eq!(bench.disk.fetches.len(), 1);
    drop(held);
    bench.run_until("the fetch has ended", |bench| bench.disk.fetches.is_empty());
    assert_eq!(bench.scheduler.stats().num_in_use_pages, 0);
    let stats = bench.disk.tier.stats();
    assert_eq!((stats.is_on(), stats.num_errors), (true, 0));
}

/// The machine sleeps for a day while a prompt is read, and for another one while a prompt is copied.
#[test]
fn a_clock_that_jumps_costs_only_time() {
    let (mut bench, file) = bench("jump");
    bench.store();
    let held = file.hold_reads();
    bench.begin_fetch();
    bench.now_us += DAY_US;
    let request = bench.request();
    assert_eq!(bench.answer(request, 26_000), 26);
    let cancelled = bench.scheduler.poll_fetch_cancel().unwrap();
    assert!(bench.disk.handle_fetch_cancelled(cancelled));
    drop(held);
    bench.run_until("the fetch has ended", |bench| bench.disk.fetches.is_empty());
    bench.scheduler.reset_prefix_cache().unwrap();
    assert_eq!(bench.fetch_and_answer(), 26 - 4 * NUM_BLOCKS as usize);

    bench.disk.tier.erase();
    bench.compute();
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    bench.now_us += DAY_US;
    bench.scheduler.note_time(bench.now_us);
    bench.run_until("the copy has ended", |bench| {
        bench.disk.path.as_ref().is_none_or(|path| !path.is_busy)
    });
    bench.now_us += PAUSE_US;
    bench.compute();
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    bench.run_until("the prompt is stored", |bench| {
        bench.disk.tier.stats().num_pages == NUM_BLOCKS as usize
    });
    bench.scheduler.reset_prefix_cache().unwrap();
    assert_eq!(bench.fetch_and_answer(), 26 - 4 * NUM_BLOCKS as usize);
}

/// The erasure comes while the file is scanned, or just after that.
#[test]
fn pages_that_are_erased_while_the_disk_comes_back_are_not_found() {
    let (mut bench, file) = bench("erased");
    bench.store();
    let tier = Tier::new(&config(&bench.folder, &[1 << 20]), bench.disk.pages.clone());
    tier.use_file(0, Box::new(file.clone()));
    fail(&tier, 0);
    let num_reads = file.num_reads();
    let held = file.hold_reads();
    thread::scope(|scope| {
        let comes_back = scope.spawn(|| tier.try_again());
        wait_until("the scan reads", || file.num_reads() > num_reads);
        let erased = scope.spawn(|| tier.erase());
        drop(held);
        assert!(comes_back.join().unwrap());
        erased.join().unwrap();
    });
    let stats = tier.stats();
    assert_eq!((stats.is_on(), stats.num_pages), (true, 0));
}

/// The scan reads the headers without an error, and a reader's error comes meanwhile.
#[test]
fn a_disk_that_fails_while_it_comes_back_is_tried_again() {
    let (mut bench, file) = bench("fails-again");
    bench.store();
    let tier = bench.disk.tier.clone();
    fail(&tier, 0);
    let num_reads = file.num_reads();
    thread::scope(|scope| {
        let held = file.hold_reads();
        let comes_back = scope.spawn(|| tier.try_again());
        wait_until("the scan reads", || file.num_reads() > num_reads);
        fail(&tier, 0);
        drop(held);
        assert!(!comes_back.join().unwrap());
    });
    let stats = tier.stats();
    assert_eq!((stats.num_off, stats.num_errors), (1, 2));
    wait_until("it is on", || tier.try_again() || tier.stats().num_off == 0);
    assert_eq!(tier.stats().num_on, 1);
    assert_eq!(bench.fetch_and_answer(), 26 - 4 * NUM_BLOCKS as usize);
}

/// The second disk hangs while it is tried.
#[test]
fn no_blocks_are_held_and_others_are_erased_while_a_disk_is_tried() {
    let (mut bench, files) = bench_of_two("tried");
    bench.compute();
    bench.compute();
    let tier = bench.disk.tier.clone();
    fail(&tier, 1);
    let num_syncs = files[1].num_syncs();
    thread::scope(|scope| {
        let held = files[1].hold_syncs();
        let tried = scope.spawn(|| tier.try_again());
        wait_until("it is tried", || files[1].num_syncs() > num_syncs);
        bench.disk.store_next(&mut bench.scheduler, bench.now_us);
        assert_eq!(bench.scheduler.stats().num_block_holds, 0);
        let erased = scope.spawn(|| tier.erase());
        wait_until("the first disk is erased", || erased.is_finished());
        drop(held);
        assert!(tried.join().unwrap());
    });
    bench.store();
    assert_eq!(tier.stats().num_on, 2);
}

/// The second disk hangs while it is tried.
#[test]
fn a_copy_that_was_sent_before_a_disk_is_tried_is_stored_first() {
    let (mut bench, files) = bench_of_two("sent-before");
    let tier = bench.disk.tier.clone();
    // The test takes the place of the bench's thread.
    let (writes, tasks) = bounded(1);
    let (bell, _wake_receiver) = doorbell();
    let (report, reports) = loop_channel(MAX_REPORTS, bell);
    let mut writer = Writer::new(tier.clone(), bench.disk.pages.clone(), tasks, report);
    (bench.disk.writes, bench.disk.reports) = (Some(writes), Some(reports));
    bench.compute();
    bench.compute();
    fail(&tier, 1);
    bench.disk.store_next(&mut bench.scheduler, bench.now_us);
    assert_eq!(bench.scheduler.stats().num_block_holds, 1);
    thread::scope(|scope| {
        let held = files[1].hold_syncs();
        let tried = scope.spawn(|| writer.try_again());
        bench.run_until("the copy is stored", |bench| {
            bench.disk.path.as_ref().is_none_or(|path| !path.is_busy)
        });
        let stats = tier.stats();
        assert_eq!((stats.num_stored, stats.num_off), (NUM_BLOCKS, 1));
        drop(held);
        assert!(tried.join().unwrap().is_ok());
    });
    let stats = tier.stats();
    assert_eq!((stats.num_on, stats.num_dropped), (2, 0));
}

/// The first disk hangs in the first scan.
#[test]
fn no_file_waits_for_the_scan_of_another_disk() {
    let files = [FaultyFile::default(), FaultyFile::default()];
    let pages = MockExecutor::new(MockConfig::new(50, 64, 4)).kv_pages();
    let tier = Tier::new(&config(Path::new("unused"), &[1 << 20; 2]), pages);
    for (disk, file) in files.iter().enumerate() {
        tier.use_file(disk, Box::new(file.clone()));
    }
    thread::scope(|scope| {
        let held = files[0].hold_reads();
        let opened = scope.spawn(|| tier.open());
        wait_until("both files are open", || tier.stats().num_on == 2);
        assert!(tier.store_to_write().is_none());
        drop(held);
        opened.join().unwrap();
    });
    assert!(tier.store_to_write().is_some());
}

#[test]
fn reads_from_a_disk_do_not_wait_for_another_one() {
    let (mut bench, files) = bench_of_two("queues");
    bench.store();
    let request = bench.request();
    // The block of each disk that has its number is read, and goes nowhere.
    let read = |disk: usize| {
        let limits = bench.scheduler.config();
        let list = known_blocks(&request, &limits.block_hasher, limits.page_size);
        let (block, page) = (disk as u32, PageId(0));
        let task = ReadTask {
            fetch: None,
            path: bench.disk.disk_path(list, &bench.scheduler).unwrap(),
            first: block,
            state: None,
            is_stopped: Arc::default(),
        };
        let page = PathPage {
            block,
            group: 0,
            page,
        };
        bench.disk.try_read(task, &[page], &[disk])
    };
    let _held = files[0].hold_reads();
    while read(0) {}
    assert!(read(1));
}
