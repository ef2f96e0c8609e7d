//! `bench cache`: replays the prefixes of a request trace through the prefix cache.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use corella_core::{KvCache, KvGroup, Namespace, Parent, StepId, TokenId};
use serde::Deserialize;

use crate::BenchError;

#[derive(Debug, Clone)]
pub struct CacheReplayOptions {
    /// A file of JSON lines with `hash_ids`: the ids of a prompt's blocks. Equal prefixes have equal ids (the format of
    /// the Mooncake traces, FAST 2025).
    pub trace: PathBuf,
    /// Sizes of the pool in blocks; 0 means unlimited.
    pub num_blocks: Vec<u32>,
}

/// The result of a replay with one size of the pool.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheReplay {
    pub num_blocks: u32,
    pub num_requests: usize,
    pub num_queried: u64,
    pub num_hits: u64,
    pub num_evicted: u64,
    pub duration: Duration,
}

#[derive(Deserialize)]
struct Line {
    hash_ids: Vec<TokenId>,
}

pub fn run(options: &CacheReplayOptions) -> Result<Vec<CacheReplay>, BenchError> {
    let prompts = read(&options.trace)?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let num_distinct = prompts.iter().flatten().collect::<HashSet<_>>().len();
    options
        .num_blocks
        .iter()
        .map(|&num_blocks| match num_blocks as usize {
            0 => Ok(replay(&prompts, num_distinct as u32)),
            size if size < longest => Err(BenchError::Option(format!(
                "--num-blocks {size}: the longest prompt of the trace has {longest} blocks"
            ))),
            _ => Ok(replay(&prompts, num_blocks)),
        })
        .collect()
}

/// Replays the requests in order: match, lock, allocate, publish, release. A block is a page of one
/// token.
fn replay(prompts: &[Vec<TokenId>], num_blocks: u32) -> CacheReplay {
    let mut cache = KvCache::new(num_blocks, 1, &[KvGroup::default()]);
    let namespace = Namespace::default();
    let mut num_queried = 0;
    let mut num_hits = 0;
    let start = Instant::now();
    for prompt in prompts {
        let blocks = cache.match_prefix(&namespace, prompt).blocks;
        let pages = blocks.iter().filter_map(|&block| cache.page(block, 0));
        let mut table: Vec<_> = pages.collect();
        let num_matched = table.len();
        for &page in &table {
            cache.lock(page);
        }
        let fits = cache.try_allocate(prompt.len() - num_matched, &mut table);
        assert!(fits, "the pool does not hold the longest prompt");
        let mut parent = match blocks.last() {
            None => Parent::Root(&namespace),
            Some(&last) => Parent::Block(last),
        };
        for at in num_matched..prompt.len() {
            let page = |_| Some(table[at]);
            let published = cache.publish(parent, &prompt[at..=at], page, StepId(0));
            let block =
                published.expect("the cache does not have the block, which it did not match");
            parent = Parent::Block(block);
        }
        cache.unlock_all(table);
        num_queried += prompt.len() as u64;
        num_hits += num_matched as u64;
    }
    CacheReplay {
        num_blocks,
        num_requests: prompts.len(),
        num_queried,
        num_hits,
        num_evicted: cache.num_evicted(),
        duration: start.elapsed(),
    }
}

impl CacheReplay {
    /// The share of queried blocks that were cached.
    pub fn hit_rate(&self) -> f64 {
        self.num_hits as f64 / (self.num_queried as f64).max(1.0)
    }
}

impl fmt::Display for CacheReplay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>10} blocks  {:>6.2} % of {} block queries hit, {} evicted, {:.0} ns a query",
            self.num_blocks,
            100.0 * self.hit_rate(),
            self.num_queried,
            self.num_evicted,
            self.duration.as_nanos() as f64 / (self.num_queried as f64).max(1.0),
        )
    }
}

fn read(path: &Path) -> Result<Vec<Vec<TokenId>>, BenchError> {
    let error = |reason: String| BenchError::File(format!("{}: {reason}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
    let mut prompts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line: Line = serde_json::from_str(line)
            .map_err(|cause| error(format!("line {}: {cause}", index + 1)))?;
        prompts.push(line.hash_ids);
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worked out by hand: with an unbounded pool the second prompt finds two blocks, the third
    /// one, and the fourth three. With four blocks the third prompt has evicted the ends of the
    /// first two, so the fourth finds only two.
    #[test]
    fn hits_are_counted() {
        let prompts = [vec![1, 2, 3], vec![1, 2, 4], vec![1, 5, 6], vec![1, 2, 3]];
        let unbounded = replay(&prompts, 6);
        assert_eq!((unbounded.num_queried, unbounded.num_hits), (12, 6));
        assert_eq!(unbounded.num_evicted, 0);
        let small = replay(&prompts, 4);
        assert_eq!(small.num_hits, 2 + 1 + 2);
        assert!(small.num_evicted > 0);
    }

    #[test]
    fn a_wrong_line_is_named() {
        let path = std::env::temp_dir().join(format!("corella-trace-{}.jsonl", std::process::id()));
        std::fs::write(&path, "{\"hash_ids\": [1]}\n{\"hash_ids\": \"x\"}\n").unwrap();
        let run = |num_blocks| {
            run(&CacheReplayOptions {
                trace: path.clone(),
                num_blocks,
            })
        };
        assert!(run(vec![0]).unwrap_err().to_string().contains("line 2"));
        std::fs::write(&path, "{\"hash_ids\": [1, 2]}\n").unwrap();
        assert!(run(vec![1]).unwrap_err().to_string().contains("2 blocks"));
        std::fs::remove_file(&path).unwrap();
    }
}
