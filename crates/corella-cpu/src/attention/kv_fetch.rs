//! Software prefetching of the keys and values that a worker's attention tasks read next.
//!
//! A core can wait for only about 16 cache lines at a time. So kernels issue prefetches between their other
//! instructions, spread over about the memory's response time.

use corella_model::{AttentionSpec, KvFormat, KvLayer};

use crate::kernels::{KEY_TILE, LineQueue};
use crate::kv::{HeadPage, KvRows, Side};

use super::plan::AttentionTask;
use super::span::Spans;

/// The number of positions whose cache lines are queued together.
const TURN: usize = LineQueue::NUM_STREAMS / 2 * KEY_TILE;
/// The largest distance in positions between reads and prefetches.
const MAX_AHEAD: usize = 192;

/// One worker's prefetch queue, which runs ahead of the worker's attention tasks.
pub struct KvFetch<'a> {
    kv: &'a KvRows,
    kv_layer: KvLayer,
    spec: &'a AttentionSpec,
    spans: &'a Spans,
    tasks: &'a [AttentionTask],
    /// The index of the task whose positions `position..position + TURN` are in the queue.
    task: usize,
    position: usize,
    queue: LineQueue,
}

impl<'a> KvFetch<'a> {
    pub fn new(
        kv: &'a KvRows,
        kv_layer: KvLayer,
        spec: &'a AttentionSpec,
        spans: &'a Spans,
        tasks: &'a [AttentionTask],
    ) -> Self {
        let mut fetch = Self {
            kv,
            kv_layer,
            spec,
            spans,
            tasks,
            task: 0,
            position: 0,
            queue: LineQueue::new(1),
        };
        fetch.position = fetch.first_position();
        fetch.fill();
        fetch
    }

    /// The first position, at the start of a tile, that the current task reads.
    fn first_position(&self) -> usize {
        self.tasks.get(self.task).map_or(0, |task| {
            let first = self.spans[task.span].start + task.positions.start;
            self.spec.first_seen(first) / KEY_TILE * KEY_TILE
        })
    }

    /// Prefetches the task's keys and values up to `position` that are not prefetched yet.
    pub fn reach(&mut self, task: usize, position: usize) {
        if self.task < task {
            self.task = task;
            self.position = self.first_position();
            self.fill();
        }
        while self.task == task && self.position <= position && !self.queue.is_empty() {
            self.queue.prefetch_all();
            self.go_on();
        }
    }

    /// Returns the cache lines that remain to be prefetched. The kernels that compute from `position` of the task on
    /// issue these prefetches.
    pub fn lines(&mut self, task: usize, position: usize) -> &mut LineQueue {
        let limit = match self.task.saturating_sub(task) {
            0 => position + MAX_AHEAD,
            1 => self.first_position() + MAX_AHEAD / 2,
            _ => 0,
        };
        if self.queue.is_empty() && self.position + TURN < limit {
            self.go_on();
        }
        &mut self.queue
    }

    fn go_on(&mut self) {
        self.position += TURN;
        self.fill();
    }

    /// Fills the queue from `position` of the task on, or from the start of the next task.
    fn fill(&mut self) {
        // A cache line of int8 elements gives a kernel twice the work, so only every second call prefetches.
        self.queue = LineQueue::new(2 / self.kv.format.size());
        while let Some(task) = self.tasks.get(self.task) {
            let span = &self.spans[task.span];
            let end = task.end_seen(span, self.spec);
            if self.position >= end {
                self.task += 1;
                self.position = self.first_position();
                continue;
            }
            let kv = self.kv;
            let table = self.spans.table(span, self.kv_layer.group);
            let tiles = self.position..end.min(self.position + TURN);
            let num_lines = self.spec.head_dim * KEY_TILE * kv.format.size() / 64;
            for position in tiles.step_by(KEY_TILE) {
                let at = HeadPage {
                    layer: kv.layer(self.kv_layer),
                    page: table.page(position / kv.page_size()),
                    head: task.kv_head,
                };
                let offset = position % kv.page_size();
                if kv.format == KvFormat::Int8 {
                    kv.fetch_scales(at, offset);
                }
                let key_stride = kv.key_stride().max(64);
                self.queue
                    .add(kv.tile(Side::Keys, at, offset), key_stride, num_lines);
                self.queue
                    .add(kv.tile(Side::Values, at, offset), 64, num_lines);
            }
            return;
        }
    }
}
