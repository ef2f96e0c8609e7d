//! Blocks on a disk: another engine finds them, and no fault of the disk changes an answer. The mock executor checks
//! the rows that it reads.

mod document;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use corella_core::{
    BlockHasher, BlockList, KvEvent, KvGroup, Namespace, RecurrentState, SchedulerConfig, TokenId,
};
use corella_engine::{
    DiskEvents, Engine, EngineConfig, KvDiskConfig, KvDiskFolder, KvDiskLabel, KvDiskStats,
    KvFileContent, KvPlaces, LoadedAdapter, StreamEvent, Submission, inspect_kv_disk,
};
use corella_model::{Adapter, Checkpoint};
use corella_test::wait_until;

use crate::fixture::*;

mod crash;
mod memory;

const MAX_BYTES: u64 = 1 << 20;
/// The length of a file's beginning, before its pages.
const LABEL_BYTES: usize = 4096;

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("corella-kv-disk-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn file(&self) -> PathBuf {
        file_in(&self.0)
    }

    /// The folders of several disks.
    fn disks(&self, num_disks: usize) -> Vec<PathBuf> {
        let names = (0..num_disks).map(|disk| disk.to_string());
        names.map(|name| self.0.join(name)).collect()
    }
}

/// The only file in a folder.
fn file_in(folder: &Path) -> PathBuf {
    let mut entries = fs::read_dir(folder).unwrap();
    entries.next().unwrap().unwrap().path()
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
        let _ = fs::remove_file(&self.0);
    }
}

fn engine_of(limits: SchedulerConfig, folder: &Path, identity: u128) -> Engine {
    engine_with(limits, folder, identity, false)
}

fn engine_with(
    limits: SchedulerConfig,
    folder: &Path,
    identity: u128,
    keeps_salted: bool,
) -> Engine {
    let disk = KvDiskConfig {
        identity,
        keeps_salted,
        ..disk_config(&[folder], MAX_BYTES)
    };
    engine_on(limits, disk)
}

/// A disk of this size for each folder.
fn disk_config(folders: &[impl AsRef<Path>], max_bytes: u64) -> KvDiskConfig {
    let folders = folders.iter();
    let folders = folders.map(|path| KvDiskFolder::new(path.as_ref(), max_bytes));
    KvDiskConfig {
        places: KvPlaces::Folders(folders.collect()),
        label: KvDiskLabel::default(),
        identity: 1,
        keeps_salted: false,
        reads_always: true,
    }
}

fn engine_on(limits: SchedulerConfig, disk: KvDiskConfig) -> Engine {
    let mock = model(&limits);
    let mut config = EngineConfig::new(SchedulerConfig {
        max_fetched_pages: limits.num_pages,
        max_served_pages: limits.num_pages,
        ..limits
    });
    config.kv_disk = Some(disk);
    start_with(config, mock)
}

fn engine(folder: &Path) -> Engine {
    engine_of(limits(64, 1), folder, 1)
}

fn stats(engine: &Engine) -> KvDiskStats {
    engine.stats().kv_disk.expect("it has a disk")
}

fn prompt(first: TokenId) -> Vec<TokenId> {
    (0..26).map(|at| (first + at * 7) % 50).collect()
}

/// The tokens of an answer, and the number of cached prompt tokens.
fn ask(engine: &Engine, prompt: Vec<TokenId>, namespace: Namespace) -> (Vec<TokenId>, u32) {
    let mut request = submission(prompt, 5);
    request.namespace = namespace;
    answer(engine, request)
}

fn answer(engine: &Engine, request: Submission) -> (Vec<TokenId>, u32) {
    let mut stream = submit_one(engine, request);
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    let (mut tokens, mut num_cached) = (Vec::new(), 0);
    while let Some(event) = stream.next_blocking() {
        let StreamEvent::Output(output) = event else {
            panic!("{event:?}");
        };
        num_cached = output.cache_use.num_cached_tokens;
        tokens.extend(output.sample.map(|sample| sample.token));
    }
    assert_eq!(tokens.len(), 5);
    (tokens, num_cached)
}

fn ask_plain(engine: &Engine, first: TokenId) -> (Vec<TokenId>, u32) {
    ask(engine, prompt(first), Namespace::default())
}

fn stop(engine: Engine) {
    assert_at_rest(&engine);
    engine.shutdown();
}

fn wait_opened(engine: &Engine) {
    wait_until("the file is open", || stats(engine).is_on());
}

fn wait_stored(engine: &Engine, num_blocks: u64) {
    wait_until("the blocks are stored", || {
        stats(engine).num_stored >= num_blocks
    });
}

/// Stores a prompt, which has six whole blocks of four tokens, by asking twice. Returns its answer.
fn store_plain(engine: &Engine, first: TokenId) -> Vec<TokenId> {
    wait_opened(engine);
    let tokens = ask_plain(engine, first).0;
    ask_plain(engine, first);
    wait_stored(engine, 6);
    tokens
}

#[test]
fn a_prompt_that_came_twice_is_found_by_the_next_engine() {
    let folder = Folder::new("twice");
    let first = engine(&folder.0);
    wait_opened(&first);
    let (tokens, num_cached) = ask_plain(&first, 1);
    assert_eq!(num_cached, 0);
    let (other_tokens, _) = ask_plain(&first, 2);
    assert_eq!(stats(&first).num_stored, 0, "no prompt came twice");
    assert_eq!(ask_plain(&first, 1), (tokens.clone(), 25));
    wait_stored(&first, 6);
    assert_eq!(stats(&first).num_pages, 6);
    let mode = fs::metadata(folder.file()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(
        fs::metadata(&folder.0).unwrap().permissions().mode() & 0o777,
        0o700
    );
    stop(first);

    let second = engine(&folder.0);
    wait_until("the file is scanned", || stats(&second).num_pages == 6);
    assert_eq!(ask_plain(&second, 1), (tokens.clone(), 24));
    assert_eq!(ask_plain(&second, 2), (other_tokens, 0));
    let found = stats(&second);
    assert_eq!(
        (found.num_read, found.num_damaged, found.num_errors),
        (6, 0, 0)
    );
    wait_until("the fetch has ended", || {
        second.stats().scheduler.num_fetched_blocks == 6
    });
    // The blocks are in memory now.
    assert_eq!(ask_plain(&second, 1), (tokens, 25));
    assert_eq!(stats(&second).num_read, 6);
    stop(second);

    // Rows of another model are in another file.
    let other = engine_of(limits(64, 1), &folder.0, 2);
    wait_opened(&other);
    assert_eq!(ask_plain(&other, 1).1, 0);
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 2);
    stop(other);
}

/// Two of three groups have windows. A query after the prompt reads the last two pages of the first group, and the last
/// page of the third. The mock executor checks that each row that it reads is the one that it computed.
#[test]
fn of_windows_only_the_pages_are_stored_that_a_query_after_the_prompt_reads() {
    let folder = Folder::new("windows");
    let windowed = |window| KvGroup {
        window: Some(window),
    };
    let limits = SchedulerConfig {
        kv_groups: vec![windowed(8), KvGroup::default(), windowed(3)],
        ..limits(99, 2)
    };
    let first = engine_of(limits.clone(), &folder.0, 1);
    wait_opened(&first);
    let longer: Vec<_> = prompt(1).into_iter().chain(7..27).collect();
    let answers =
        [prompt(1), longer.clone()].map(|prompt| ask(&first, prompt, Namespace::default()).0);
    ask_plain(&first, 1);
    wait_stored(&first, 6 + 2 + 1);
    stop(first);

    let second = engine_of(limits.clone(), &folder.0, 1);
    wait_until("the file is scanned", || stats(&second).num_pages == 9);
    let found = ask(&second, longer.clone(), Namespace::default());
    assert_eq!(found, (answers[1].clone(), 24));
    assert_eq!(stats(&second).num_read, 9);
    // The longer prompt is stored, too, without the pages of the first six blocks that are there.
    ask(&second, longer.clone(), Namespace::default());
    wait_until("the longer prompt is stored", || {
        stats(&second).num_stored == 5 + 2 + 1
    });
    stop(second);

    let third = engine_of(limits, &folder.0, 1);
    wait_until("the file is scanned", || stats(&third).num_pages == 17);
    assert_eq!(ask_plain(&third, 1), (answers[0].clone(), 24));
    let found = ask(&third, longer, Namespace::default());
    assert_eq!(found, (answers[1].clone(), 44));
    stop(third);
}

fn recurrent_limits() -> SchedulerConfig {
    let mut limits = limits(64, 1);
    limits.set_recurrent_state(RecurrentState {
        num_snapshots: 6,
        snapshot_interval: 100,
        least_distance: 100,
    });
    limits
}

/// The state after a prompt takes one page more than the prompt's rows. The mock executor checks that a request
/// continues from the state after its own tokens.
#[test]
fn a_conversation_goes_on_from_its_last_recurrent_state() {
    let folder = Folder::new("recurrent");
    let longer: Vec<_> = prompt(1).into_iter().chain(7..27).collect();
    let other: Vec<_> = prompt(1)[..20].iter().copied().chain(30..40).collect();
    let prompts = [prompt(1), longer.clone(), other.clone()];
    let lone = start(recurrent_limits(), model(&recurrent_limits()));
    let answers = prompts.map(|prompt| ask(&lone, prompt, Namespace::default()).0);
    stop(lone);

    let first = engine_of(recurrent_limits(), &folder.0, 1);
    wait_opened(&first);
    assert_eq!(ask_plain(&first, 1), (answers[0].clone(), 0));
    assert_eq!(ask_plain(&first, 1), (answers[0].clone(), 24));
    wait_stored(&first, 6 + 1);
    stop(first);

    let second = engine_of(recurrent_limits(), &folder.0, 1);
    wait_until("the file is scanned", || stats(&second).num_pages == 7);
    // The last block with a state is not a part of this prompt.
    let found = ask(&second, other, Namespace::default());
    assert_eq!(found, (answers[2].clone(), 0));
    assert_eq!(stats(&second).num_read, 0);
    let found = ask(&second, longer.clone(), Namespace::default());
    assert_eq!(found, (answers[1].clone(), 24));
    assert_eq!(stats(&second).num_read, 7);
    ask(&second, longer.clone(), Namespace::default());
    wait_until("the longer prompt is stored", || {
        stats(&second).num_stored == 5 + 1
    });
    stop(second);

    let third = engine_of(recurrent_limits(), &folder.0, 1);
    wait_until("the file is scanned", || stats(&third).num_pages == 13);
    let found = ask(&third, longer, Namespace::default());
    assert_eq!(found, (answers[1].clone(), 44));
    assert_eq!(stats(&third).num_read, 11 + 1);
    assert_eq!(ask_plain(&third, 1), (answers[0].clone(), 24));
    stop(third);
}

#[test]
fn a_damaged_recurrent_state_costs_only_time() {
    let folder = Folder::new("damaged-state");
    let first = engine_of(recurrent_limits(), &folder.0, 1);
    wait_opened(&first);
    let tokens = ask_plain(&first, 1).0;
    ask_plain(&first, 1);
    wait_stored(&first, 6 + 1);
    stop(first);
    let mut content = fs::read(folder.file()).unwrap();
    let slot_bytes = slot_bytes(&content);
    content[LABEL_BYTES + 6 * slot_bytes + 512] ^= 0x10;
    fs::write(folder.file(), &content).unwrap();

    let second = engine_of(recurrent_limits(), &folder.0, 1);
    wait_until("the file is scanned", || stats(&second).num_pages == 7);
    assert_eq!(ask_plain(&second, 1), (tokens.clone(), 0));
    wait_until("the read has ended", || stats(&second).num_damaged == 1);
    // The state is stored anew.
    assert_eq!(ask_plain(&second, 1), (tokens, 24));
    wait_until("the state is stored", || stats(&second).num_pages == 7);
    stop(second);
}

/// The pool has room for one prompt and its answer at a time.
#[test]
fn blocks_next_to_be_evicted_are_found_again() {
    let folder = Folder::new("evicted");
    let engine = engine_of(limits(18, 1), &folder.0, 1);
    wait_opened(&engine);
    let answers: Vec<_> = (0..4).map(|first| ask_plain(&engine, first).0).collect();
    wait_until("a prompt that came once is stored", || {
        for first in 0..4 {
            assert_eq!(ask_plain(&engine, first).0, answers[first as usize]);
        }
        stats(&engine).num_read > 0
    });
    assert!(engine.stats().scheduler.num_evicted_pages > 0);
    stop(engine);
}

/// No prompt came twice, and the pool has room for all.
#[test]
fn a_cache_that_is_about_to_end_is_stored_whole() {
    let folder = Folder::new("whole");
    let limit = Duration::from_secs(300);
    let first = engine(&folder.0);
    let answers: Vec<_> = (0..3).map(|at| ask_plain(&first, at).0).collect();
    assert_eq!(stats(&first).num_stored, 0);
    assert!(first.store_prefix_cache(limit));
    let num_stored = stats(&first).num_stored;
    // Each prompt has 30 computed tokens with its answer, and 28 of them fill blocks.
    assert_eq!(num_stored, 3 * 7);
    assert!(first.store_prefix_cache(limit));
    assert_eq!(stats(&first).num_stored, num_stored);
    stop(first);
    let second = engine(&folder.0);
    assert!(second.wait_disk_opened_for(limit));
    for (at, tokens) in (0..3).zip(answers) {
        assert_eq!(ask_plain(&second, at), (tokens, 24));
    }
    stop(second);
    let without = start_with(EngineConfig::new(limits(64, 1)), model(&limits(64, 1)));
    assert!(!without.has_disk() && !without.store_prefix_cache(limit));
    stop(without);
}

const SALT: &str = "a salt of a caller";

fn salted(salt: &str) -> Namespace {
    Namespace {
        cache_salt: Some(salt.into()),
        ..Namespace::default()
    }
}

/// The number of slots with a page. None may have a salt in plain text.
fn num_slots(folder: &Folder) -> usize {
    let content = fs::read(folder.file()).unwrap();
    let mut windows = content.windows(SALT.len());
    assert!(windows.all(|bytes| bytes != SALT.as_bytes()));
    let is_header = |sector: &&[u8]| sector.starts_with(b"CORKV");
    content[LABEL_BYTES..].chunks(512).filter(is_header).count()
}

#[test]
fn prompts_with_a_salt_are_not_stored() {
    let folder = Folder::new("salt");
    let engine = engine(&folder.0);
    wait_opened(&engine);
    for _ in 0..2 {
        ask(&engine, prompt(1), salted(SALT));
    }
    for _ in 0..2 {
        ask_plain(&engine, 2);
    }
    // The paths are stored in order.
    wait_stored(&engine, 6);
    assert_eq!(stats(&engine).num_pages, 6);
    stop(engine);
    assert_eq!(num_slots(&folder), 6);
}

#[test]
fn prompts_with_a_salt_are_found_by_their_salt_alone() {
    let folder = Folder::new("salted");
    let first = engine_with(limits(64, 1), &folder.0, 1, true);
    wait_opened(&first);
    let tokens = ask(&first, prompt(1), salted(SALT)).0;
    ask(&first, prompt(1), salted(SALT));
    wait_stored(&first, 6);
    stop(first);
    assert_eq!(num_slots(&folder), 6);

    let second = engine_with(limits(64, 1), &folder.0, 1, true);
    wait_until("the file is scanned", || stats(&second).num_pages == 6);
    assert_eq!(ask_plain(&second, 1).1, 0);
    assert_eq!(ask(&second, prompt(1), salted("another salt")).1, 0);
    assert_eq!(stats(&second).num_read, 0);
    let found = ask(&second, prompt(1), salted(SALT));
    assert_eq!(found, (tokens.clone(), 24));
    stop(second);

    let third = engine(&folder.0);
    wait_until("the file is scanned", || stats(&third).num_pages == 6);
    assert_eq!(ask(&third, prompt(1), salted(SALT)), (tokens, 0));
    assert_eq!(stats(&third).num_read, 0);
    stop(third);
}

/// Loads an adapter of a folder. The mock executor draws by its name.
fn load(engine: &Engine, name: &str, folder: &str) -> Arc<LoadedAdapter> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let model = Checkpoint::open(golden.join("llama-gqa-tied")).unwrap();
    let adapter = Adapter::open(&golden.join("adapters").join(folder), model.config()).unwrap();
    let adapters = engine.adapters().unwrap().clone();
    let loaded = Arc::new(LoadedAdapter::new(name, &adapter, adapters));
    engine.served_adapters().add(&loaded);
    loaded
}

fn ask_adapter(engine: &Engine, adapter: &Arc<LoadedAdapter>) -> (Vec<TokenId>, u32) {
    let mut request = submission(prompt(1), 5);
    request.adapter = Some(adapter.clone());
    answer(engine, request)
}

/// Stores a prompt of an adapter. Returns its answer, too.
fn store_adapter(engine: &Engine) -> (Arc<LoadedAdapter>, Vec<TokenId>) {
    wait_opened(engine);
    let adapter = load(engine, "a", "llama-all");
    let tokens = ask_adapter(engine, &adapter).0;
    ask_adapter(engine, &adapter);
    wait_stored(engine, 6);
    (adapter, tokens)
}

#[test]
fn blocks_of_an_adapter_are_found_by_its_content() {
    let folder = Folder::new("adapter");
    let first = engine(&folder.0);
    let (_, tokens) = store_adapter(&first);
    stop(first);

    let second = engine(&folder.0);
    wait_until("the file is scanned", || stats(&second).num_pages == 6);
    let other = load(&second, "a", "llama-some");
    assert_eq!(ask_adapter(&second, &other).1, 0);
    assert_eq!(ask_plain(&second, 1).1, 0);
    assert_eq!(stats(&second).num_read, 0);
    stop(second);

    let third = engine(&folder.0);
    wait_until("the file is scanned", || stats(&third).num_pages == 6);
    let same = load(&third, "a", "llama-all");
    assert_eq!(ask_adapter(&third, &same), (tokens, 24));
    stop(third);
}

#[test]
fn blocks_of_a_removed_adapter_are_erased() {
    let folder = Folder::new("removed-adapter");
    let first = engine(&folder.0);
    let (adapter, tokens) = store_adapter(&first);
    let same = load(&first, "b", "llama-all");
    let plain = ask_plain(&first, 1).0;
    ask_plain(&first, 1);
    wait_stored(&first, 12);
    let adapters = first.served_adapters();
    adapters.remove(&same);
    assert_eq!(stats(&first).num_pages, 12, "another one has the content");
    adapters.remove(&adapter);
    assert_eq!(stats(&first).num_pages, 6);
    assert_eq!(num_slots(&folder), 6);
    // Requests that still use the adapter leave nothing on the disk.
    wait_until("no page is in use", || first.reset_prefix_cache().is_ok());
    for _ in 0..2 {
        assert_eq!(ask_adapter(&first, &adapter).0, tokens);
    }
    for _ in 0..2 {
        ask_plain(&first, 2);
    }
    wait_stored(&first, 18);
    stop(first);
    assert_eq!(num_slots(&folder), 12);

    let second = engine(&folder.0);
    wait_until("the file is scanned", || stats(&second).num_pages == 12);
    let again = load(&second, "a", "llama-all");
    assert_eq!(ask_adapter(&second, &again), (tokens, 0));
    assert_eq!(ask_plain(&second, 1), (plain, 24));
    stop(second);
}

#[test]
fn a_damaged_foreign_or_short_file_costs_only_time() {
    let folder = Folder::new("damaged");
    let first = engine(&folder.0);
    let tokens = store_plain(&first, 1);
    stop(first);
    let file = folder.file();
    let whole = fs::read(&file).unwrap();

    // Rows of the fourth block. Paths are stored from the first slot on.
    let slot_bytes = slot_bytes(&whole);
    let mut damaged = whole.clone();
    damaged[LABEL_BYTES + 3 * slot_bytes + 512] ^= 0x10;
    fs::write(&file, &damaged).unwrap();
    let second = engine(&folder.0);
    wait_until("the file is scanned", || stats(&second).num_pages == 6);
    assert_eq!(ask_plain(&second, 1), (tokens.clone(), 12));
    wait_until("the read has ended", || stats(&second).num_damaged == 1);
    stop(second);

    // Each slot is of another version of the layout.
    let mut foreign = whole.clone();
    for slot in foreign[LABEL_BYTES..].chunks_mut(slot_bytes).take(6) {
        slot[7] += 1;
    }
    fs::write(&file, &foreign).unwrap();
    let other = engine(&folder.0);
    wait_opened(&other);
    assert_eq!(ask_plain(&other, 1), (tokens.clone(), 0));
    assert_eq!(stats(&other).num_read, 0);
    stop(other);

    // The file is cut off while the engine runs.
    fs::write(&file, &whole).unwrap();
    let third = engine(&folder.0);
    wait_until("the file is scanned", || stats(&third).num_pages == 6);
    let short = fs::OpenOptions::new().write(true).open(&file).unwrap();
    let len = LABEL_BYTES + 2 * slot_bytes;
    short.set_len(len as u64).unwrap();
    assert_eq!(ask_plain(&third, 1), (tokens.clone(), 8));
    stop(third);
}

/// The magic number of the first slot comes again in the second one.
fn slot_bytes(file: &[u8]) -> usize {
    let mut sectors = file[LABEL_BYTES..].chunks(512);
    let first = sectors.next().unwrap();
    let num_between = sectors.position(|sector| sector[..8] == first[..8]);
    512 * (1 + num_between.expect("there are several slots"))
}

#[test]
fn without_a_usable_file_requests_are_served() {
    // The folder is a file.
    let folder = Folder::new("file");
    fs::write(&folder.0, "").unwrap();
    let engine_without = engine(&folder.0);
    wait_until("it is off", || stats(&engine_without).num_errors == 1);
    let expected = ask_plain(&engine_without, 1);
    assert_eq!(ask_plain(&engine_without, 1).0, expected.0);
    assert!(!stats(&engine_without).is_on());
    stop(engine_without);

    // Another engine has the file.
    let folder = Folder::new("locked");
    let first = engine(&folder.0);
    wait_opened(&first);
    let second = engine(&folder.0);
    wait_until("it is off", || stats(&second).num_errors == 1);
    assert_eq!(ask_plain(&second, 1), expected);
    stop(second);
    assert!(stats(&first).is_on());
    stop(first);
    let third = engine(&folder.0);
    wait_opened(&third);
    stop(third);
}

/// The pages of a prompt lie on both disks in turn.
#[test]
fn two_disks_keep_a_prompt_together_and_each_comes_and_goes_alone() {
    let folder = Folder::new("two");
    let disks = folder.disks(2);
    let start = || engine_on(limits(64, 1), disk_config(&disks, MAX_BYTES));
    let first = start();
    first.wait_disk_opened();
    let expected = store_plain(&first, 1);
    assert_eq!((stats(&first).num_on, stats(&first).num_pages), (2, 6));
    stop(first);
    let pages = |disk: &PathBuf| {
        let mut files = inspect_kv_disk(disk).unwrap();
        match files.pop().unwrap().content {
            KvFileContent::Pages(pages) => pages.num_whole,
            content => panic!("{content:?}"),
        }
    };
    assert_eq!(disks.iter().map(pages).collect::<Vec<_>>(), [3, 3]);

    let second = start();
    second.wait_disk_opened();
    assert_eq!(ask_plain(&second, 1), (expected.clone(), 24));
    assert_eq!(stats(&second).num_read, 6);
    stop(second);

    // Another process has the second disk. Only the first block is found, and the others are stored again.
    let other = engine(&disks[1]);
    wait_opened(&other);
    let third = start();
    third.wait_disk_opened();
    let found = stats(&third);
    assert_eq!((found.num_on, found.num_off, found.num_errors), (1, 1, 1));
    assert_eq!(found.num_pages, 3);
    assert_eq!(ask_plain(&third, 1), (expected.clone(), 4));
    ask_plain(&third, 1);
    wait_until("all blocks are on the first disk", || {
        stats(&third).num_pages == 6
    });
    stop(third);
    stop(other);

    // A block on both disks counts once.
    let fourth = start();
    fourth.wait_disk_opened();
    assert_eq!((stats(&fourth).num_on, stats(&fourth).num_pages), (2, 6));
    assert_eq!(ask_plain(&fourth, 1), (expected, 24));
    wait_until("no page is in use", || {
        fourth.reset_prefix_cache_and_tiers().is_ok()
    });
    assert_eq!(stats(&fourth).num_pages, 0);
    stop(fourth);
    for disk in &disks {
        let file = fs::read(file_in(disk)).unwrap();
        assert!(file[LABEL_BYTES..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn a_reset_of_the_tiers_erases_the_file() {
    let folder = Folder::new("erased");
    let engine = engine(&folder.0);
    let expected = (store_plain(&engine, 1), 0);
    wait_until("no page is in use", || engine.reset_prefix_cache().is_ok());
    assert_eq!(ask_plain(&engine, 1).0, expected.0);
    wait_until("the blocks are read again", || stats(&engine).num_read == 6);
    wait_until("no page is in use", || {
        engine.reset_prefix_cache_and_tiers().is_ok()
    });
    assert_eq!(stats(&engine).num_pages, 0);
    assert!(
        fs::read(folder.file()).unwrap()[LABEL_BYTES..]
            .iter()
            .all(|&byte| byte == 0)
    );
    assert_eq!(ask_plain(&engine, 1), expected);
    stop(engine);
}

#[test]
fn limits_without_blocks_are_refused() {
    let mut limits = limits(64, 1);
    limits.enable_prefix_caching = false;
    let mock = model(&limits);
    let mut config = EngineConfig::new(limits);
    config.kv_disk = Some(disk_config(&[Path::new("/nowhere")], MAX_BYTES));
    let executor = Box::new(corella_model::MockExecutor::new(mock));
    let refusal = Engine::start(config, executor).err().unwrap().to_string();
    assert!(
        refusal.contains("kv_disk needs prefix caching"),
        "{refusal}"
    );
}

/// A router may be told of the blocks of an earlier engine's file at once.
#[test]
fn a_subscriber_is_told_the_blocks_of_the_file_until_it_is_erased() {
    let folder = Folder::new("events");
    let first = engine(&folder.0);
    wait_opened(&first);
    let mut events = first.subscribe_disk_events(7).expect("it is the first");
    assert!(first.subscribe_disk_events(7).is_none());
    ask_plain(&first, 1);
    ask_plain(&first, 1);
    let names: Vec<_> = told(&mut events, 6)
        .into_iter()
        .map(|event| match event {
            KvEvent::Stored { page, .. } => page,
            _ => panic!("{event:?}"),
        })
        .collect();
    let tokens = prompt(1);
    let expected = BlockHasher::new(7).hashes(&Namespace::default(), &tokens, 4);
    assert_eq!(names, expected.collect::<Vec<_>>());
    stop(first);
    assert_eq!(events.next_blocking(10), None, "the engine has stopped");
    drop(events);

    let second = engine(&folder.0);
    let mut events = second.subscribe_disk_events(7).expect("it is the first");
    assert_eq!(told(&mut events, 6).len(), 6);
    assert!(second.reset_prefix_cache_and_tiers().is_ok());
    let mut removed: Vec<_> = told(&mut events, 6)
        .into_iter()
        .map(|event| match event {
            KvEvent::Removed { page } => page,
            _ => panic!("{event:?}"),
        })
        .collect();
    let mut names = names;
    names.sort_unstable();
    removed.sort_unstable();
    assert_eq!(removed, names);
    stop(second);
}

/// Takes this many events.
fn told(events: &mut DiskEvents, num_events: usize) -> Vec<KvEvent> {
    let mut told = Vec::new();
    while told.len() < num_events {
        let next = events.next_blocking(2).expect("the engine runs");
        assert!((1..=2).contains(&next.len()));
        told.extend(next);
    }
    told
}

#[test]
fn the_disk_of_an_engine_is_known_before_a_request_comes() {
    let folder = Folder::new("known");
    let first = engine(&folder.0);
    let list = |first| BlockList::new(Namespace::default(), prompt(first), &Default::default(), 4);
    wait_opened(&first);
    ask_plain(&first, 1);
    ask_plain(&first, 1);
    wait_stored(&first, 6);
    stop(first);
    let second = engine(&folder.0);
    second.wait_disk_opened();
    assert_eq!(stats(&second).num_pages, 6);
    // Blocks can be lent once a step has returned.
    ask_plain(&second, 3);
    let exchange = second.block_exchange();
    assert_eq!(exchange.num_on_disk(&list(1), 0), 6);
    assert_eq!(exchange.num_on_disk(&list(2), 0), 0);
    for (first, num_blocks) in [(1, 6), (2, 0)] {
        block_on(exchange.bring_from_disk(list(first)));
        assert_eq!(block_on(exchange.look_up(list(first))), Some(num_blocks));
    }
    stop(second);
    let without = engine_of(limits(64, 1), Path::new("/proc/none"), 1);
    without.wait_disk_opened();
    let exchange = without.block_exchange();
    assert_eq!(exchange.num_on_disk(&list(1), 0), 0);
    block_on(exchange.bring_from_disk(list(1)));
    stop(without);
}
