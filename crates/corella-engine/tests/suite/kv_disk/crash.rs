//! Engines that open a file as a crash may leave it: each sector has its content from some time before the crash.
//! `CORELLA_DISK_CRASHES=1000` tries 1,000 crashes of each kind of model.

use super::*;
use crate::load::Dice;

const SECTOR: usize = 512;
/// Less than the prompts take, so that slots are written again.
fn max_bytes(num_disks: usize) -> u64 {
    LABEL_BYTES as u64 + 24 * 1024 / num_disks as u64
}

fn prompts() -> Vec<Vec<TokenId>> {
    let begun = |first, num_tokens| prompt(first).into_iter().take(num_tokens);
    vec![
        prompt(1),
        begun(1, 26).chain(7..27).collect(),
        prompt(2),
        begun(2, 20).chain(30..45).collect(),
        prompt(3),
        begun(1, 26).chain(20..49).collect(),
        begun(4, 26).chain(3..33).collect(),
    ]
}

fn start_on(limits: &SchedulerConfig, disks: &[PathBuf]) -> Engine {
    let config = disk_config(disks, max_bytes(disks.len()));
    let engine = engine_on(limits.clone(), config);
    engine.wait_disk_opened();
    engine
}

/// Stores the prompts one after the other. Returns the contents of each disk's file on the way.
fn contents(limits: &SchedulerConfig, disks: &[PathBuf]) -> Vec<Vec<Vec<u8>>> {
    let engine = start_on(limits, disks);
    let mut contents = vec![Vec::new(); disks.len()];
    let mut read = || {
        for (contents, disk) in contents.iter_mut().zip(disks) {
            contents.push(fs::read(file_in(disk)).unwrap());
        }
    };
    read();
    for prompt in prompts() {
        let num_stored = stats(&engine).num_stored;
        ask(&engine, prompt.clone(), Namespace::default());
        wait_until("a part of the prompt is stored", || {
            ask(&engine, prompt.clone(), Namespace::default());
            stats(&engine).num_stored > num_stored
        });
        // The thread may be writing.
        read();
    }
    stop(engine);
    read();
    contents
}

/// Returns one of the contents that has lost some of the later writes. Sometimes a bit is flipped, or the end is cut off.
fn crashed(contents: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    let newest = 1 + dice.roll(contents.len() - 1);
    let mut file = contents[newest].clone();
    let num_kept_of_four = dice.roll(5);
    for (at, sector) in file.chunks_mut(SECTOR).enumerate() {
        if dice.roll(4) >= num_kept_of_four {
            let older = &contents[dice.roll(newest + 1)];
            match older.get(at * SECTOR..at * SECTOR + sector.len()) {
                Some(older) => sector.copy_from_slice(older),
                None => sector.fill(0),
            }
        }
    }
    if dice.roll(4) == 0 {
        let at = dice.roll(file.len());
        file[at] ^= 1 << dice.roll(8);
    }
    if dice.roll(8) == 0 {
        file.truncate(dice.roll(file.len()));
    }
    file
}

fn crash(name: &str, num_disks: usize, limits: &SchedulerConfig) {
    let prompts = prompts();
    let lone = start(limits.clone(), model(limits));
    let expected: Vec<_> = prompts
        .iter()
        .map(|prompt| ask(&lone, prompt.clone(), Namespace::default()).0)
        .collect();
    stop(lone);
    let folder = Folder::new(name);
    let disks = folder.disks(num_disks);
    let contents = contents(limits, &disks);
    let number = std::env::var("CORELLA_DISK_CRASHES").ok();
    let num_crashes = number.map_or(30, |number| number.parse().expect("a number"));
    let (mut num_read, mut num_damaged) = (0, 0);
    for seed in 0..num_crashes {
        let mut dice = Dice(seed);
        for (disk, contents) in disks.iter().zip(&contents) {
            fs::write(file_in(disk), crashed(contents, &mut dice)).unwrap();
        }
        let engine = start_on(limits, &disks);
        for _ in 0..2 {
            let at = dice.roll(prompts.len());
            let tokens = ask(&engine, prompts[at].clone(), Namespace::default()).0;
            assert_eq!(tokens, expected[at], "crash {seed}, prompt {at}");
        }
        let found = stats(&engine);
        assert_eq!(found.num_errors, 0, "crash {seed}");
        (num_read, num_damaged) = (num_read + found.num_read, num_damaged + found.num_damaged);
        stop(engine);
    }
    println!("{num_crashes} crashes: {num_read} pages were read, and {num_damaged} were damaged");
    assert!(num_read > 0);
}

#[test]
fn after_a_crash_answers_are_those_without_a_disk() {
    crash("crash", 1, &limits(64, 1));
}

#[test]
fn after_a_crash_with_two_disks_answers_are_those_without_a_disk() {
    crash("crash-two", 2, &limits(64, 1));
}

#[test]
fn after_a_crash_answers_of_a_model_with_windows_are_those_without_a_disk() {
    let window = |window| KvGroup {
        window: Some(window),
    };
    let limits = SchedulerConfig {
        kv_groups: vec![window(8), KvGroup::default(), window(3)],
        ..limits(150, 2)
    };
    crash("crash-windows", 1, &limits);
}

#[test]
fn after_a_crash_answers_of_a_recurrent_model_are_those_without_a_disk() {
    crash("crash-recurrent", 1, &recurrent_limits());
}
