//! The costs of the prefix cache: per token of one prompt, and per operation in a cache of many pages.

use std::fmt;
use std::time::Instant;

use corella_core::{
    BlockId, KvCache, KvEvent, KvGroup, Namespace, PageId, Parent, StepId, TokenId,
};
use serde_json::{Value, json};

use crate::sample::summary::Summary;

const SALT: u64 = 7;
const NUM_EVICTED: usize = 125;
const NUM_STEP_TOKENS: usize = 8192;

/// The costs of a single prompt in an empty cache, in nanoseconds per token.
#[derive(Debug, Clone, Copy)]
pub struct CacheCost {
    pub num_tokens: usize,
    pub insert_ns: f64,
    pub match_ns: f64,
    pub evict_ns: f64,
}

/// How the pages of a full cache are related.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Each page is the only one of its namespace, as when every client sends its own salt.
    Namespaces,
    /// All pages are the first pages of one namespace, as if no two prompts shared a beginning.
    Siblings,
    /// Each page follows the previous one: a single long prompt.
    Path,
}

/// The cost of each operation in a cache that is full of `num_pages` pages.
#[derive(Debug, Clone)]
pub struct OperationCosts {
    pub shape: Shape,
    pub page_size: u32,
    pub num_pages: usize,
    /// Microseconds to publish one page.
    pub publish_us: Summary,
    /// Microseconds to match a prompt: 8,192 tokens in a path, and otherwise one page.
    pub match_us: Summary,
    /// Microseconds to allocate 125 pages, for which 125 cached pages are evicted.
    pub evict_us: Summary,
    /// Nanoseconds per page to begin a subscription and read the whole cache.
    pub watch_ns: Summary,
    /// Microseconds to read the events of a step of 8,192 tokens: of the pages evicted before the step returns, and of
    /// the step's own pages afterwards.
    pub poll_us: Summary,
}

/// Measures one prompt alone in the tree, so that only its length matters.
pub(crate) fn cache_cost(num_tokens: usize, page_size: u32) -> CacheCost {
    let num_pages = num_tokens / page_size as usize;
    let tokens: Vec<TokenId> = (0..num_tokens as TokenId).collect();
    let namespace = Namespace::default();
    let mut cache = KvCache::new(num_pages as u32, page_size, &[KvGroup::default()]);
    let per_token = |start: Instant| start.elapsed().as_nanos() as f64 / num_tokens as f64;

    let start = Instant::now();
    let mut table = Vec::new();
    assert!(
        cache.try_allocate(num_pages, &mut table),
        "the pool is too small"
    );
    let mut parent = Parent::Root(&namespace);
    for (page_tokens, &page) in tokens.chunks_exact(page_size as usize).zip(&table) {
        let published = cache.publish(parent, page_tokens, |_| Some(page), StepId(0));
        parent = Parent::Block(published.expect("the cache is empty"));
    }
    cache.unlock_all(table);
    let insert_ns = per_token(start);

    let num_matches = (10_000_000 / num_tokens).clamp(3, 100);
    let mut match_ns = Vec::new();
    for _ in 0..num_matches {
        let start = Instant::now();
        let matched = cache.match_prefix(&namespace, &tokens);
        match_ns.push(per_token(start));
        assert_eq!(matched.blocks.len(), num_pages);
    }

    let start = Instant::now();
    cache.clear();
    let evict_ns = per_token(start);
    assert_eq!(cache.num_free(), num_pages);
    CacheCost {
        num_tokens,
        insert_ns,
        match_ns: Summary::new(match_ns).median,
        evict_ns,
    }
}

/// A full cache of one shape, in which new pages replace the oldest.
struct Crowd {
    shape: Shape,
    cache: KvCache,
    page_size: u32,
    /// The number of pages published so far. A page's tokens follow from its number.
    num_published: usize,
    /// The blocks of the path, in order.
    path: Vec<BlockId>,
    step: StepId,
}

impl Crowd {
    fn new(shape: Shape, num_pages: usize, page_size: u32) -> Self {
        let mut crowd = Self {
            shape,
            cache: KvCache::new(num_pages as u32, page_size, &[KvGroup::default()]),
            page_size,
            num_published: 0,
            path: Vec::new(),
            step: StepId(0),
        };
        let mut table = Vec::new();
        assert!(crowd.cache.try_allocate(num_pages, &mut table));
        crowd.publish(table);
        assert_eq!(crowd.cache.num_cached(), num_pages);
        crowd
    }

    fn tokens(&self, number: usize) -> Vec<TokenId> {
        let mut tokens = vec![number as TokenId; self.page_size as usize];
        tokens[0] = scatter(number);
        tokens
    }

    fn namespace(&self, number: usize) -> Namespace {
        Namespace {
            cache_salt: (self.shape == Shape::Namespaces)
                .then(|| format!("{:08x}", scatter(number)).into()),
            ..Namespace::default()
        }
    }

    fn evict(&mut self, num_pages: usize) -> (Vec<PageId>, f64) {
        let mut table = Vec::with_capacity(num_pages);
        let start = Instant::now();
        assert!(self.cache.try_allocate(num_pages, &mut table));
        let evict_us = micros(start);
        if self.shape == Shape::Path {
            self.path.truncate(self.path.len() - num_pages);
            self.num_published -= num_pages;
        }
        (table, evict_us)
    }

    /// Publishes the pages, and returns the microseconds that each took.
    fn publish(&mut self, table: Vec<PageId>) -> Vec<f64> {
        self.step.0 += 1;
        let mut publish_us = Vec::with_capacity(table.len());
        for &page in &table {
            let tokens = self.tokens(self.num_published);
            let namespace = self.namespace(self.num_published);
            let parent = match self.path.last() {
                Some(&last) => Parent::Block(last),
                None => Parent::Root(&namespace),
            };
            let start = Instant::now();
            let published = self
                .cache
                .publish(parent, &tokens, |_| Some(page), self.step);
            publish_us.push(micros(start));
            let block = published.expect("its tokens are new");
            self.num_published += 1;
            if self.shape == Shape::Path {
                self.path.push(block);
            }
        }
        self.cache.unlock_all(table);
        publish_us
    }

    /// Returns the microseconds to match one of the prompts published last.
    fn match_us(&self, at: usize) -> f64 {
        let num_pages = match self.shape {
            Shape::Path => (NUM_STEP_TOKENS / self.page_size as usize).min(self.path.len()),
            Shape::Namespaces | Shape::Siblings => 1,
        };
        let first = match self.shape {
            Shape::Path => 0,
            Shape::Namespaces | Shape::Siblings => {
                self.num_published - 1 - at * 7919 % (self.cache.num_cached() / 2)
            }
        };
        let pages = first..first + num_pages;
        let prompt: Vec<_> = pages.flat_map(|number| self.tokens(number)).collect();
        let namespace = self.namespace(first);
        let start = Instant::now();
        let matched = self.cache.match_prefix(&namespace, &prompt);
        let match_us = micros(start);
        assert_eq!(matched.blocks.len(), num_pages);
        match_us
    }

    /// Reads all events up to `step`, the last step that has returned. Returns the microseconds taken.
    fn poll(&mut self, step: u64, mut handle: impl FnMut(KvEvent)) -> f64 {
        let start = Instant::now();
        while let Some(event) = self.cache.poll_event(Some(StepId(step))) {
            handle(event);
        }
        micros(start)
    }
}

pub(crate) fn operation_costs(
    shape: Shape,
    num_pages: usize,
    page_size: u32,
    num_steps: usize,
) -> OperationCosts {
    let mut crowd = Crowd::new(shape, num_pages, page_size);
    let most = num_pages / 2;
    let (mut publish_us, mut match_us, mut evict_us) = (Vec::new(), Vec::new(), Vec::new());
    for at in 0..num_steps {
        match_us.push(crowd.match_us(at));
        let (table, micros) = crowd.evict(NUM_EVICTED.min(most));
        evict_us.push(micros);
        publish_us.extend(crowd.publish(table));
    }

    let mut watch_ns = Vec::new();
    for _ in 0..num_steps.min(10) {
        let mut num_told = 0;
        let start = Instant::now();
        crowd.cache.watch(SALT);
        crowd.poll(crowd.step.0, |_| num_told += 1);
        watch_ns.push(start.elapsed().as_nanos() as f64 / num_pages as f64);
        assert_eq!(num_told, 1 + num_pages);
    }

    let mut poll_us = Vec::new();
    let num_step_pages = (NUM_STEP_TOKENS / page_size as usize).min(most);
    for _ in 0..num_steps {
        let (mut num_stored, mut num_removed) = (0, 0);
        let mut count = |event| match event {
            KvEvent::Stored { .. } => num_stored += 1,
            KvEvent::Removed { .. } => num_removed += 1,
            KvEvent::Cleared => {}
        };
        let (table, _) = crowd.evict(num_step_pages);
        crowd.publish(table);
        let before = crowd.poll(crowd.step.0 - 1, &mut count);
        let after = crowd.poll(crowd.step.0, &mut count);
        poll_us.push(before + after);
        assert_eq!((num_stored, num_removed), (num_step_pages, num_step_pages));
    }
    OperationCosts {
        shape,
        page_size,
        num_pages,
        publish_us: Summary::new(publish_us),
        match_us: Summary::new(match_us),
        evict_us: Summary::new(evict_us),
        watch_ns: Summary::new(watch_ns),
        poll_us: Summary::new(poll_us),
    }
}

/// A permutation of all token ids, so that new pages are at random places among their siblings.
fn scatter(number: usize) -> TokenId {
    (number as TokenId).wrapping_mul(0x9e37_79b1)
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

impl Shape {
    pub(crate) const ALL: [Self; 3] = [Self::Namespaces, Self::Siblings, Self::Path];

    fn name(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Siblings => "siblings",
            Self::Path => "path",
        }
    }
}

impl CacheCost {
    pub(crate) fn to_json(self) -> Value {
        json!({
            "num_tokens": self.num_tokens,
            "insert_ns_per_token": self.insert_ns,
            "match_ns_per_token": self.match_ns,
            "evict_ns_per_token": self.evict_ns,
        })
    }

    pub(crate) fn write_table(costs: &[Self], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "The prefix cache, nanoseconds a token")?;
        writeln!(
            f,
            "{:>10} {:>8} {:>8} {:>8}",
            "tokens", "insert", "match", "evict"
        )?;
        for cost in costs {
            writeln!(
                f,
                "{:>10} {:>8.2} {:>8.3} {:>8.2}",
                cost.num_tokens, cost.insert_ns, cost.match_ns, cost.evict_ns
            )?;
        }
        Ok(())
    }
}

impl OperationCosts {
    fn operations(&self) -> [(&'static str, &Summary); 5] {
        [
            ("publish_us", &self.publish_us),
            ("match_us", &self.match_us),
            ("evict_125_us", &self.evict_us),
            ("watch_ns_per_page", &self.watch_ns),
            ("poll_step_us", &self.poll_us),
        ]
    }

    pub(crate) fn to_json(&self) -> Value {
        let mut row = json!({
            "shape": self.shape.name(),
            "page_size": self.page_size,
            "num_pages": self.num_pages,
        });
        for (name, cost) in self.operations() {
            row[name] = json!({ "p50": cost.median, "p99.9": cost.p999, "max": cost.max });
        }
        row
    }

    pub(crate) fn write_table(costs: &[Self], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "The prefix cache when it is full")?;
        writeln!(
            f,
            "{:>10} {:>9} {:>8} {:>17} {:>10} {:>10} {:>10}",
            "shape", "page size", "pages", "operation", "p50", "p99.9", "max"
        )?;
        for cost in costs {
            for (name, times) in cost.operations() {
                writeln!(
                    f,
                    "{:>10} {:>9} {:>8} {:>17} {:>10.2} {:>10.2} {:>10.2}",
                    cost.shape.name(),
                    cost.page_size,
                    cost.num_pages,
                    name,
                    times.median,
                    times.p999,
                    times.max
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The measurements check that the timed operations have happened.
    #[test]
    fn every_shape_has_its_operations() {
        for shape in Shape::ALL {
            for page_size in [1, 16] {
                let costs = operation_costs(shape, 300, page_size, 5);
                let row = costs.to_json();
                assert_eq!(row["shape"], shape.name());
                for (name, _) in costs.operations() {
                    let [median, most] = ["p50", "max"].map(|key| row[name][key].as_f64());
                    assert!(median > Some(0.0) && most >= median, "{name}: {row}");
                }
            }
        }
    }
}
