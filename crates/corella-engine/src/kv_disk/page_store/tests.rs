//! Crashes at random points of writing, and faults of the file.

use std::collections::HashMap;

use corella_core::{KvEvent, Namespace};
use crossbeam_channel::{Receiver, bounded};

use super::*;
use crate::kv_disk::label::LABEL_BYTES;
use crate::kv_disk::slot::SlotNamespace;

mod two_disks;

const SHAPE: SlotShape = SlotShape {
    layout: 7,
    page_size: 2,
    row_bytes: 700,
};
const NUM_SLOTS: u32 = 12;
const NUM_STATE_PARTS: u32 = 2;
static RUNNING: AtomicBool = AtomicBool::new(false);

/// Numbers from a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// A file in memory. At a crash, any part of the sectors written since the last sync is lost.
struct LossyFile(Mutex<Content>);

struct Content {
    bytes: Vec<u8>,
    synced: Vec<u8>,
    /// The number of operations before all further ones fail.
    num_left: u64,
    /// The limit of the file's length.
    room: usize,
}

impl LossyFile {
    fn new(bytes: Vec<u8>, num_left: u64) -> Self {
        let synced = bytes.clone();
        Self(Mutex::new(Content {
            bytes,
            synced,
            num_left,
            room: usize::MAX,
        }))
    }

    fn begin(&self) -> io::Result<MutexGuard<'_, Content>> {
        let mut content = self.0.lock().unwrap();
        if content.num_left == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        content.num_left -= 1;
        Ok(content)
    }

    /// The file after a crash.
    fn after_crash(&self, random: &mut Random) -> Vec<u8> {
        let content = self.0.lock().unwrap();
        let mut bytes = content.synced.clone();
        bytes.resize(content.bytes.len(), 0);
        // Devices write whole sectors. Most crashes keep most of the written sectors, and some crashes keep few.
        let num_kept_of_four = random.below(5);
        let sectors = bytes.chunks_mut(512).zip(content.bytes.chunks(512));
        for (sector, written) in sectors {
            if random.below(4) < num_kept_of_four {
                sector.copy_from_slice(written);
            }
        }
        bytes
    }
}

impl FileLayer for LossyFile {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let content = self.0.lock().unwrap();
        let there = content.bytes.get(at as usize..at as usize + bytes.len());
        bytes.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut content = self.begin()?;
        let at = at as usize;
        // A write that is interrupted has written a part.
        let len = match content.num_left {
            0 => bytes.len() / 2,
            _ => bytes.len(),
        };
        content.bytes[at..at + len].copy_from_slice(&bytes[..len]);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut content = self.begin()?;
        content.synced = content.bytes.clone();
        Ok(())
    }

    fn reserve(&self, len: u64) -> io::Result<u64> {
        let mut content = self.0.lock().unwrap();
        let len = content.bytes.len().max(content.room.min(len as usize));
        content.bytes.resize(len, 0);
        Ok(len as u64)
    }

    fn clear(&self) -> io::Result<()> {
        let mut content = self.begin()?;
        content.bytes.clear();
        content.synced.clear();
        Ok(())
    }
}

/// A path of blocks, identified by its first token.
struct Path {
    tokens: Vec<u32>,
    hashes: Vec<PageHash>,
    /// The pages in other groups than the first, each by its block and its group.
    further: Vec<(usize, u32)>,
    /// The numbers of blocks after which a request can continue. Empty if a request can continue after each block.
    ends: Vec<usize>,
}

impl Path {
    fn new(first: u32, num_blocks: u32) -> Self {
        let tokens: Vec<u32> = (0..2 * num_blocks).map(|at| first * 100 + at).collect();
        let hasher = corella_core::BlockHasher::new(3);
        let hashes = hasher.hashes(&Default::default(), &tokens, 2).collect();
        Self {
            tokens,
            hashes,
            further: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// A path with a recurrent state after its last block.
    fn recurrent(first: u32, num_blocks: u32) -> Self {
        Self::new(first, num_blocks).with_states_after(vec![num_blocks as usize])
    }

    /// A path with recurrent states after every second block and after the last block.
    fn with_states(first: u32, num_blocks: u32) -> Self {
        let num_blocks = num_blocks as usize;
        let is_state = |end: &usize| end.is_multiple_of(2) || *end == num_blocks;
        let ends = (1..=num_blocks).filter(is_state).collect();
        Self::new(first, num_blocks as u32).with_states_after(ends)
    }

    fn with_states_after(self, ends: Vec<usize>) -> Self {
        let parts = |&end: &usize| (1..=NUM_STATE_PARTS).map(move |group| (end - 1, group));
        Self {
            further: ends.iter().flat_map(parts).collect(),
            ends,
            ..self
        }
    }

    /// A path whose end has pages in a group with a window of two blocks.
    fn windowed(first: u32, num_blocks: u32) -> Self {
        let num_blocks = num_blocks as usize;
        let read = num_blocks.saturating_sub(2)..num_blocks;
        Self {
            // If the path has only two blocks, the window after the first block is stored, too.
            ends: if num_blocks == 2 {
                vec![1, 2]
            } else {
                vec![num_blocks]
            },
            further: read.map(|block| (block, 1)).collect(),
            ..Self::new(first, num_blocks as u32)
        }
    }

    fn names(&self) -> Vec<PageName<'_>> {
        let blocks = self.hashes.iter().zip(self.tokens.chunks(2)).enumerate();
        let name = |(at, (&hash, tokens)): (usize, (&PageHash, _))| PageName {
            key: PageKey { hash, group: 0 },
            namespace: SlotNamespace::default(),
            parent: at.checked_sub(1).map(|at| self.hashes[at]),
            depth: at as u32,
            tokens,
        };
        let mut names: Vec<_> = blocks.map(name).collect();
        for &(block, group) in &self.further {
            let page = names[block];
            let key = PageKey { group, ..page.key };
            names.push(PageName { key, ..page });
        }
        names.sort_by_key(|name| (name.depth, name.key.group));
        names
    }

    fn rows(&self, version: u64) -> Vec<u8> {
        let names = self.names();
        let rows = names.iter().flat_map(|PageName { key, .. }| {
            let mut random = Random(key.hash.0 as u64 ^ version ^ u64::from(key.group) << 32);
            std::iter::repeat_with(move || random.below(256) as u8).take(SHAPE.row_bytes)
        });
        rows.collect()
    }
}

fn label() -> KvDiskLabel {
    KvDiskLabel {
        model: "a model".to_owned(),
        ..KvDiskLabel::default()
    }
}

fn open(file: LossyFile) -> PageStore<LossyFile> {
    open_all(vec![file])
}

fn open_all(files: Vec<LossyFile>) -> PageStore<LossyFile> {
    open_with(files, None)
}

/// A store for a model with recurrent layers, whose states have several parts.
fn open_recurrent(files: Vec<LossyFile>) -> PageStore<LossyFile> {
    open_with(files, Some(Box::new(|_| NUM_STATE_PARTS)))
}

/// A store for a model whose second group has a window of two blocks.
fn open_windowed(files: Vec<LossyFile>) -> PageStore<LossyFile> {
    open_groups(files, windowed_groups(), None, &sizes(NUM_SLOTS))
}

fn windowed_groups() -> Vec<KvGroup> {
    vec![KvGroup::default(), KvGroup { window: Some(4) }]
}

fn open_with(files: Vec<LossyFile>, state_parts: StateParts) -> PageStore<LossyFile> {
    open_groups(
        files,
        vec![KvGroup::default()],
        state_parts,
        &sizes(NUM_SLOTS),
    )
}

/// One disk with all slots, and two disks with a third and two thirds of them.
fn sizes(num_slots: u32) -> [Vec<u64>; 2] {
    let size = |num_slots: u32| {
        LABEL_BYTES as u64 + u64::from(num_slots) * SHAPE.slot_bytes() as u64 + 100
    };
    let third = num_slots / 3;
    [
        vec![size(num_slots)],
        vec![size(num_slots - third), size(third)],
    ]
}

/// A store with a disk for each file, whose sizes are those for this number of files.
fn open_groups(
    files: Vec<LossyFile>,
    groups: Vec<KvGroup>,
    state_parts: StateParts,
    sizes: &[Vec<u64>; 2],
) -> PageStore<LossyFile> {
    let sizes = &sizes[files.len() - 1];
    let store = PageStore::new(SHAPE, groups, state_parts, &label(), sizes);
    use_files(&store, files);
    store
}

fn use_files(store: &PageStore<LossyFile>, files: Vec<LossyFile>) {
    for (disk, file) in files.into_iter().enumerate() {
        store.file(disk).prepare(&file).unwrap();
        store.file(disk).set(file);
        store.open_disk(disk);
        store.scan(disk, &RUNNING).unwrap();
    }
}

/// The content of a disk's file.
fn content(store: &PageStore<LossyFile>, disk: usize) -> MutexGuard<'_, Content> {
    store.file(disk).test_file().0.lock().unwrap()
}

fn store_path(store: &PageStore<LossyFile>, path: &Path) -> io::Result<u32> {
    let (time, epoch) = (store.begin_path(&path.hashes), store.epoch());
    stored(store.store(&path.names(), &path.rows(0), time, epoch))
}

/// The number of stored pages, if no disk has failed.
fn stored(stored: Stored) -> io::Result<u32> {
    match stored.failed.into_iter().next() {
        Some(failed) => Err(failed.error),
        None => Ok(stored.num_pages),
    }
}

/// Checks that each block is right or absent. Returns the number of right ones.
fn check(store: &PageStore<LossyFile>, path: &Path) -> usize {
    let mut slot = vec![0; store.slot_bytes()];
    let rows = path.rows(0);
    let rows = rows.chunks(SHAPE.row_bytes);
    let names = path.names();
    let is_right = |(block, rows): (&PageName, &[u8])| match store.read(block, &mut slot) {
        Ok(Found::Rows(found)) => {
            assert_eq!(found, rows, "a block has other rows");
            true
        }
        Ok(Found::Nothing | Found::Damaged) => false,
        Err(failed) => panic!("{failed:?}"),
    };
    names
        .iter()
        .zip(rows)
        .map(is_right)
        .filter(|&right| right)
        .count()
}

type Open = fn(Vec<LossyFile>) -> PageStore<LossyFile>;

#[test]
fn after_a_crash_at_any_write_each_block_is_right_or_absent() {
    crash(1, open_all, Path::new);
}

#[test]
fn after_a_crash_at_any_write_to_two_disks_each_block_is_right_or_absent() {
    crash(2, open_all, Path::new);
}

#[test]
fn after_a_crash_at_any_write_each_recurrent_state_is_right_or_absent() {
    assert!(crash(1, open_recurrent, Path::with_states) > 100);
}

#[test]
fn after_a_crash_at_any_write_to_two_disks_each_recurrent_state_is_right_or_absent() {
    assert!(crash(2, open_recurrent, Path::with_states) > 100);
}

#[test]
fn after_a_crash_at_any_write_each_window_is_right_or_absent() {
    crash(1, open_windowed, Path::windowed);
}

#[test]
fn after_a_crash_at_any_write_to_two_disks_each_window_is_right_or_absent() {
    crash(2, open_windowed, Path::windowed);
}

/// Returns the number of paths that a crash has shortened, but not to nothing.
fn crash(num_disks: usize, open: Open, new_path: fn(u32, u32) -> Path) -> usize {
    let mut counts = [0; 4];
    for seed in 0..1_000 {
        let random = &mut Random(seed);
        let mut bytes = vec![Vec::new(); num_disks];
        let mut paths: HashMap<u32, Path> = HashMap::new();
        for _ in 0..4 {
            let files = bytes.into_iter();
            let files = files.map(|bytes| LossyFile::new(bytes, 2 + random.below(60)));
            let store = open(files.collect());
            for path in paths.values() {
                check(&store, path);
            }
            let mut last = None;
            loop {
                let first = random.below(9) as u32;
                let num_blocks = 1 + first % 5;
                let path = new_path(first, num_blocks);
                let stored = store_path(&store, &path);
                paths.insert(first, path);
                match stored {
                    Ok(_) => last = Some(first),
                    Err(_) => break,
                }
            }
            let files = (0..num_disks).map(|disk| store.file(disk).test_file());
            bytes = files.map(|file| file.after_crash(random)).collect();
            let files = bytes.iter().cloned();
            let files = files.map(|bytes| LossyFile::new(bytes, u64::MAX));
            let reopened = open(files.collect());
            for path in paths.values().filter(|path| !path.ends.is_empty()) {
                // A prefix without a whole state or window after it does not count.
                let num_usable = reopened.num_usable(&path.hashes, 0) as usize;
                assert!(num_usable == 0 || path.ends.contains(&num_usable));
                counts[3] += usize::from(num_usable > 0 && num_usable < path.hashes.len());
            }
            let num_right: usize = paths.values().map(|path| check(&reopened, path)).sum();
            assert!(num_right <= NUM_SLOTS as usize);
            counts[0] += num_right;
            counts[1] += paths.values().map(|path| path.names().len()).sum::<usize>() - num_right;
            // The interrupted path may have replaced blocks of the previous path, but only when it needed their slots.
            if let Some(last) = last {
                counts[2] += usize::from(check(&reopened, &paths[&last]) > 0);
            }
        }
    }
    assert!(counts[..3].iter().all(|&count| count > 1_000), "{counts:?}");
    counts[3]
}

/// If a slot was never used before, its header survives a crash only together with its rows, so that no fetch begins in
/// vain.
#[test]
fn after_a_crash_a_header_has_its_rows() {
    let mut num_found = 0;
    for seed in 0..300 {
        let random = &mut Random(seed);
        let store = open(LossyFile::new(Vec::new(), 3 + random.below(13)));
        let path = Path::new(1, 5);
        store_path(&store, &path).ok();
        let bytes = store.file(0).test_file().after_crash(random);
        let reopened = open(LossyFile::new(bytes, u64::MAX));
        let num_blocks = reopened.num_pages();
        assert_eq!(check(&reopened, &path), num_blocks, "seed {seed}");
        num_found += num_blocks;
    }
    assert!(num_found > 300, "{num_found}");
}

#[test]
fn a_stored_path_survives_the_loss_of_all_later_writes() {
    let store = open(LossyFile::new(Vec::new(), u64::MAX));
    let (kept, lost) = (Path::new(1, 4), Path::new(2, 5));
    assert_eq!(store_path(&store, &kept).unwrap(), 4);
    assert_eq!(store_path(&store, &kept).unwrap(), 0, "they are there");
    content(&store, 0).num_left = 3;
    store_path(&store, &lost).unwrap_err();
    let synced = content(&store, 0).synced.clone();
    let reopened = open(LossyFile::new(synced, u64::MAX));
    assert_eq!((reopened.num_pages(), check(&reopened, &kept)), (4, 4));
    assert_eq!(check(&reopened, &lost), 0);
}

#[test]
fn the_least_recently_used_path_makes_room() {
    let store = open(LossyFile::new(Vec::new(), u64::MAX));
    let paths = [1, 2, 3].map(|first| Path::new(first, 5));
    assert_eq!(store_path(&store, &paths[0]).unwrap(), 5);
    assert_eq!(store_path(&store, &paths[1]).unwrap(), 5);
    store.begin_path(&paths[0].hashes);
    assert_eq!(store_path(&store, &paths[2]).unwrap(), 5);
    assert_eq!(check(&store, &paths[0]), 5);
    assert_eq!(check(&store, &paths[2]), 5);
    // The last three blocks of the path were replaced.
    assert_eq!(store.num_usable(&paths[1].hashes, 0), 2);
    assert_eq!(store.num_usable(&paths[1].hashes, 2), 2);
    // A path that is longer than the file keeps its beginning.
    let long = Path::new(4, 20);
    assert_eq!(store_path(&store, &long).unwrap(), NUM_SLOTS);
    assert_eq!(store.num_usable(&long.hashes, 0), NUM_SLOTS);
}

/// The file grows by an eighth of its slots, rounded up to two.
#[test]
fn the_file_grows_as_far_as_there_is_room() {
    let store = open(LossyFile::new(Vec::new(), u64::MAX));
    let num_reserved = || store.file(0).reserved().len();
    assert_eq!((num_reserved(), store.max_pages()), (2, NUM_SLOTS));
    let paths = [1, 2].map(|first| Path::new(first, 5));
    assert_eq!(store_path(&store, &paths[0]).unwrap(), 5);
    assert_eq!(num_reserved(), 6);
    content(&store, 0).room = store.file(0).offset(8) as usize;
    assert_eq!(store_path(&store, &paths[1]).unwrap(), 5);
    assert_eq!((num_reserved(), store.max_pages()), (8, 8));
    assert_eq!((check(&store, &paths[0]), check(&store, &paths[1])), (3, 5));
    content(&store, 0).room = usize::MAX;
    assert_eq!(store_path(&store, &Path::new(3, 3)).unwrap(), 3);
    assert_eq!((num_reserved(), store.max_pages()), (12, NUM_SLOTS));
    assert_eq!(check(&store, &paths[0]), 3);
    let bytes = content(&store, 0).bytes.clone();
    assert_eq!(open(LossyFile::new(bytes, 0)).num_pages(), 11);
}

#[test]
fn a_disk_is_tried_without_harm_to_its_blocks() {
    let store = open(LossyFile::new(Vec::new(), u64::MAX));
    let path = Path::new(1, 4);
    store_path(&store, &path).unwrap();
    content(&store, 0).num_left = 0;
    let tried = store.try_to_write(0);
    assert_eq!(tried.unwrap_err().kind(), io::ErrorKind::StorageFull);
    content(&store, 0).num_left = u64::MAX;
    store.try_to_write(0).unwrap();
    let synced = content(&store, 0).synced.clone();
    assert_eq!(check(&open(LossyFile::new(synced, u64::MAX)), &path), 4);
}

#[test]
fn a_damaged_block_is_absent_and_the_others_stay() {
    let store = open(LossyFile::new(Vec::new(), u64::MAX));
    let path = Path::new(1, 4);
    store_path(&store, &path).unwrap();
    let slot = store.index().slot(path.names()[1].key).unwrap();
    let at = store.file(0).offset(slot) as usize;
    content(&store, 0).bytes[at + 600] ^= 1;
    let mut slot = vec![0; store.slot_bytes()];
    let names = path.names();
    assert_eq!(store.read(&names[1], &mut slot).unwrap(), Found::Damaged);
    assert_eq!(store.read(&names[1], &mut slot).unwrap(), Found::Nothing);
    assert_eq!((store.num_pages(), check(&store, &path)), (3, 3));
    assert_eq!(store_path(&store, &path).unwrap(), 1, "it is stored again");
    assert_eq!(check(&store, &path), 4);
    // A file of another layout has no block.
    let bytes = content(&store, 0).bytes.clone();
    let foreign = SlotShape { layout: 8, ..SHAPE };
    let groups = vec![KvGroup::default()];
    let foreign = PageStore::new(foreign, groups, None, &label(), &[99_000]);
    use_files(&foreign, vec![LossyFile::new(bytes, 9)]);
    assert_eq!(foreign.num_pages(), 0);
}

#[test]
fn an_erased_store_has_nothing_and_takes_nothing_of_before() {
    let store = open(LossyFile::new(Vec::new(), u64::MAX));
    let path = Path::new(1, 4);
    store_path(&store, &path).unwrap();
    let (time, epoch) = (store.begin_path(&[]), store.epoch());
    assert!(store.erase(&[0]).is_empty());
    let late = Path::new(2, 2);
    let late = store.store(&late.names(), &late.rows(0), time, epoch);
    assert_eq!(stored(late).unwrap(), 0);
    let bytes = content(&store, 0).bytes.clone();
    assert!(bytes[LABEL_BYTES..].iter().all(|&byte| byte == 0));
    assert_eq!(store.num_pages(), 0);
    assert_eq!(store_path(&store, &path).unwrap(), 4);
    assert_eq!(check(&store, &path), 4);
}

/// In the second of two groups, a query after n blocks reads the pages of the last two of them.
#[test]
fn a_path_is_usable_up_to_an_end_whose_windows_are_there() {
    let file = LossyFile::new(Vec::new(), u64::MAX);
    let store = PageStore::new(SHAPE, windowed_groups(), None, &label(), &[99_999]);
    use_files(&store, vec![file]);
    let path = Path::new(1, 8);
    let put = |group: u32, blocks: std::ops::Range<usize>| {
        let names = path.names();
        let of_group = |name: &PageName<'_>| PageKey { group, ..name.key };
        let names: Vec<_> = names[blocks.clone()]
            .iter()
            .map(|name| PageName {
                key: of_group(name),
                ..*name
            })
            .collect();
        let rows = &path.rows(0)[..blocks.len() * SHAPE.row_bytes];
        stored(store.store(&names, rows, 1, store.epoch())).unwrap();
    };
    let num_usable = |first| store.num_usable(&path.hashes, first);
    put(0, 0..8);
    assert_eq!((num_usable(0), num_usable(3), num_usable(8)), (0, 3, 8));
    assert_eq!(store.num_before_missing(&path.hashes, &[8]), 6);
    put(1, 3..5);
    assert_eq!((num_usable(0), num_usable(4), num_usable(5)), (5, 5, 5));
    put(1, 7..8);
    assert_eq!((num_usable(0), num_usable(6)), (5, 6));
    assert_eq!(num_usable(7), 8, "the block before it is in memory");
    put(1, 6..7);
    assert_eq!(num_usable(0), 8);
    assert_eq!(store.num_before_missing(&path.hashes, &[8]), 8);
    assert_eq!(store.num_usable(&path.hashes[..7], 0), 5);
}

#[test]
fn a_path_is_usable_up_to_its_last_whole_state() {
    let store = open_recurrent(vec![LossyFile::new(Vec::new(), u64::MAX)]);
    let (path, shorter) = (Path::recurrent(1, 5), Path::recurrent(1, 3));
    assert_eq!(store_path(&store, &shorter).unwrap(), 5);
    assert_eq!(store_path(&store, &path).unwrap(), 4);
    let num_usable = |first| store.num_usable(&path.hashes, first);
    assert_eq!((num_usable(0), num_usable(4)), (5, 5));
    assert_eq!(store.num_before_missing(&path.hashes, &[5]), 5);
    assert!(store.has_room_for(&path.hashes, &[5]));
    let forget = |name: &PageName| {
        let mut index = store.index();
        let slot = index.slot(name.key).unwrap();
        index.forget(name.key, slot);
    };
    forget(&path.names()[6]);
    assert_eq!((num_usable(0), num_usable(3), num_usable(4)), (3, 3, 4));
    assert_eq!(store.num_before_missing(&path.hashes, &[5]), 4);
    assert_eq!(store.num_usable(&path.hashes[..2], 0), 0);
    forget(&shorter.names()[3]);
    assert_eq!(num_usable(0), 0);
    let long = Path::recurrent(2, 11);
    assert!(!store.has_room_for(&long.hashes, &[11]));
    assert!(store.has_room_for(&long.hashes, &[4, 8]));
    assert!(!store.has_room_for(&long.hashes, &[2, 4, 8]));
}

/// Each state has two pages. The rows of two blocks have two pages, too.
#[test]
fn a_state_is_stored_if_the_rows_before_it_take_as_many_bytes() {
    let store = open_recurrent(vec![LossyFile::new(Vec::new(), u64::MAX)]);
    let path = Path::recurrent(1, 5);
    let choose = |states: &[u32]| store.choose_states(&path.hashes, states);
    assert_eq!(choose(&[1, 2, 3, 4, 5]), [2, 4, 5]);
    assert_eq!(choose(&[3, 4]), [3, 4], "the last one is always chosen");
    assert!(choose(&[]).is_empty());
    store_path(&store, &Path::recurrent(1, 3)).unwrap();
    let num_before_missing = |ends: &[u32]| store.num_before_missing(&path.hashes, ends);
    assert_eq!(num_before_missing(&[3]), 3);
    assert_eq!(
        num_before_missing(&[2, 3]),
        1,
        "the state after the second block"
    );
    assert_eq!(choose(&[1, 3, 4, 5]), [5], "the third one is there");
    assert_eq!(choose(&[1, 3]), [3]);
    assert_eq!(num_before_missing(&[3, 5]), 3);
}

/// A subscriber to KV events, which knows blocks by their names and the tokens up to their ends.
struct EventReader {
    known: HashMap<PageHash, Vec<u32>>,
    bell: Receiver<()>,
}

const EVENT_SALT: u64 = 5;

impl EventReader {
    fn new(store: &PageStore<LossyFile>) -> Self {
        let (ring, bell) = bounded(1);
        store.watch(ring);
        let known = HashMap::new();
        Self { known, bell }
    }

    fn apply(&mut self, event: KvEvent) {
        match event {
            KvEvent::Cleared => panic!("it would also clear what is known of memory"),
            KvEvent::Removed { page } => assert!(self.known.remove(&page).is_some()),
            KvEvent::Stored {
                page,
                parent,
                tokens,
                namespace,
            } => {
                assert_eq!(namespace, Namespace::default());
                let mut path = parent.map_or_else(Vec::new, |parent| self.known[&parent].clone());
                path.extend(&tokens[..]);
                // The names are those of memory's events.
                let root = PageHash::root(EVENT_SALT, &Namespace::default());
                let blocks = path.chunks(2);
                assert_eq!(
                    page,
                    blocks.fold(root, |hash, block| hash.next(EVENT_SALT, block))
                );
                assert_eq!(self.known.insert(page, path), None);
            }
        }
    }

    fn catch_up(&mut self, store: &PageStore<LossyFile>) {
        while let Some(event) = store.next_event(EVENT_SALT).unwrap() {
            self.apply(event);
        }
    }

    fn num_known(&self, path: &Path) -> usize {
        let is_known = |&end: &usize| {
            self.known
                .values()
                .any(|known| *known == path.tokens[..end])
        };
        (2..=path.tokens.len())
            .step_by(2)
            .take_while(is_known)
            .count()
    }
}

#[test]
fn a_subscriber_knows_the_blocks_of_the_file() {
    let random = &mut Random(4);
    let paths: Vec<_> = (0..9)
        .map(|first| Path::new(first, 1 + first % 5))
        .collect();
    let mut bytes = Vec::new();
    let (mut num_known, mut num_erased) = (0, 0);
    for _ in 0..20 {
        let store = open(LossyFile::new(bytes, u64::MAX));
        let mut reader = EventReader::new(&store);
        for _ in 0..60 {
            // A slow subscriber never hears of most changes.
            match random.below(4) {
                0 => {
                    reader.catch_up(&store);
                    let usable = |path: &Path| store.num_usable(&path.hashes, 0) as usize;
                    for path in &paths {
                        assert_eq!(reader.num_known(path), usable(path));
                    }
                    assert_eq!(reader.known.len(), paths.iter().map(usable).sum::<usize>());
                    num_known += reader.known.len();
                    assert!(store.next_event(EVENT_SALT).unwrap().is_none());
                    while reader.bell.try_recv().is_ok() {}
                }
                1 if random.below(20) == 0 => {
                    assert!(store.erase(&[0]).is_empty());
                    num_erased += 1;
                }
                _ => {
                    let path = &paths[random.below(9) as usize];
                    if store_path(&store, path).unwrap() > 0 {
                        assert!(!reader.bell.is_empty());
                    }
                }
            }
        }
        bytes = content(&store, 0).synced.clone();
    }
    assert!(
        num_known > 1_000 && num_erased > 3,
        "{num_known} {num_erased}"
    );
}

#[test]
fn a_disk_that_is_off_has_no_blocks_until_it_is_on_again() {
    let store = open(LossyFile::new(Vec::new(), u64::MAX));
    let path = Path::new(1, 4);
    store_path(&store, &path).unwrap();
    let mut reader = EventReader::new(&store);
    reader.catch_up(&store);
    assert_eq!(reader.num_known(&path), 4);
    store.close_disk(0);
    reader.catch_up(&store);
    assert_eq!(reader.known.len(), 0);
    store.open_disk(0);
    store.scan(0, &RUNNING).unwrap();
    reader.catch_up(&store);
    assert_eq!(reader.num_known(&path), 4);
}

#[test]
fn blocks_with_a_namespace_make_no_events() {
    let store = open(LossyFile::new(Vec::new(), u64::MAX));
    let path = Path::new(1, 3);
    let mut names = path.names();
    for name in &mut names {
        name.namespace.salt = 1;
    }
    stored(store.store(&names, &path.rows(0), 1, store.epoch())).unwrap();
    assert_eq!(store.num_usable(&path.hashes, 0), 3);
    let mut reader = EventReader::new(&store);
    reader.catch_up(&store);
    assert_eq!(reader.known.len(), 0);
}
