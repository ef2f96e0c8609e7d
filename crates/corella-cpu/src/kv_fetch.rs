//! Asks memory for keys and values before a worker's tasks read them.
//!
//! A core has room for some 16 lines that it asked for, so they are asked for a slice at a time
//! between pieces of work that take about as long as memory does. Slices take a line of several
//! pages in turn, because the hardware runs ahead of each page that it sees touched.

use crate::attention::AttentionLayer;
use crate::attention_plan::AttentionTask;
use crate::kernels::{KEY_TILE, LineStream};
use crate::kv_memory::{HeadPage, KvForm};
use crate::step_plan::StepPlan;

/// Positions whose lines are asked for in turn.
const TURN: usize = 32;
const MAX_STREAMS: usize = 2 * TURN / KEY_TILE;
/// Lines of each stream that a slice has.
const SLICE_LINES: usize = 8;
/// How far a slice may be ahead of what is read.
const MAX_AHEAD: usize = 192;

pub struct KvFetch<'a> {
    layer: &'a AttentionLayer<'a>,
    plan: &'a StepPlan,
    tasks: &'a [AttentionTask],
    fetch: fn(&[LineStream], usize),
    /// The next slice is of this task's `TURN` positions from `position` on.
    task: usize,
    position: usize,
    line: usize,
    streams: [LineStream; MAX_STREAMS],
    num_streams: usize,
}

impl<'a> KvFetch<'a> {
    pub fn new(
        layer: &'a AttentionLayer<'a>,
        plan: &'a StepPlan,
        tasks: &'a [AttentionTask],
        fetch: fn(&[LineStream], usize),
    ) -> Self {
        const NOTHING: LineStream = LineStream {
            first: std::ptr::null(),
            stride: 0,
        };
        Self {
            layer,
            plan,
            // What pages cut in pieces is copied with no hurry.
            tasks: match layer.kv.form {
                KvForm::Tiles => tasks,
                KvForm::Plain => &[],
            },
            fetch,
            task: 0,
            position: 0,
            line: 0,
            streams: [NOTHING; MAX_STREAMS],
            num_streams: 0,
        }
    }

    /// Asks for what a task reads from a position on, unless that has been done.
    pub fn reach(&mut self, task: usize, position: usize) {
        if self.task < task {
            (self.task, self.position, self.line) = (task, 0, 0);
        }
        while self.task == task && self.position <= position && self.ask() {}
    }

    /// Asks for some more while a task works on what it reads from a position on.
    pub fn run_ahead(&mut self, task: usize, position: usize, num_slices: usize) {
        for _ in 0..num_slices {
            let limit = match self.task.saturating_sub(task) {
                0 => position + MAX_AHEAD,
                1 => MAX_AHEAD / 2,
                _ => 0,
            };
            if self.position >= limit || !self.ask() {
                return;
            }
        }
    }

    /// Returns whether there was anything left.
    fn ask(&mut self) -> bool {
        if self.line == 0 && !self.find_streams() {
            return false;
        }
        let kv = self.layer.kv;
        let num_lines = self.layer.spec.head_dim * KEY_TILE * kv.format.size() / 64;
        let mut slice = self.streams;
        for stream in &mut slice {
            stream.first = stream.first.wrapping_add(self.line * stream.stride);
        }
        let len = SLICE_LINES.min(num_lines - self.line);
        (self.fetch)(&slice[..self.num_streams], len);
        self.line += len;
        if self.line == num_lines {
            self.line = 0;
            self.position += TURN;
        }
        true
    }

    fn find_streams(&mut self) -> bool {
        while let Some(task) = self.tasks.get(self.task) {
            let span = &self.plan.spans[task.span];
            let end = span.start + task.positions.end;
            if self.position >= end {
                self.task += 1;
                self.position = 0;
                continue;
            }
            let kv = self.layer.kv;
            let pages = self.plan.pages_of(span);
            let tiles = self.position..end.min(self.position + TURN);
            self.num_streams = 0;
            for position in tiles.step_by(KEY_TILE) {
                let at = HeadPage {
                    layer: self.layer.layer,
                    page: pages[position / kv.page_size()].0 as usize,
                    head: task.kv_head,
                };
                let offset = position % kv.page_size();
                let streams = [
                    (kv.key_tile(at, offset), kv.key_stride().max(64)),
                    (kv.value_tile(at, offset), 64),
                ];
                for (first, stride) in streams {
                    self.streams[self.num_streams] = LineStream { first, stride };
                    self.num_streams += 1;
                }
            }
            return true;
        }
        false
    }
}
