//! Asks memory for keys and values before a worker's tasks read them.
//!
//! A core has room for some 16 lines that it asked for, so kernels ask for them between their other
//! instructions, which then take about as long as memory does.

use corella_model::KvFormat;

use crate::attention::AttentionLayer;
use crate::attention_plan::AttentionTask;
use crate::kernels::{KEY_TILE, LineQueue};
use crate::kv_memory::{HeadPage, KvForm, Side};
use crate::step_plan::StepPlan;

/// Positions whose lines are asked for in turn.
const TURN: usize = LineQueue::NUM_STREAMS / 2 * KEY_TILE;
/// How far this may be ahead of what is read.
const MAX_AHEAD: usize = 192;

pub struct KvFetch<'a> {
    layer: &'a AttentionLayer<'a>,
    plan: &'a StepPlan,
    tasks: &'a [AttentionTask],
    /// The queue is of this task's `TURN` positions from `position` on.
    task: usize,
    position: usize,
    queue: LineQueue,
}

impl<'a> KvFetch<'a> {
    pub fn new(
        layer: &'a AttentionLayer<'a>,
        plan: &'a StepPlan,
        tasks: &'a [AttentionTask],
    ) -> Self {
        let mut fetch = Self {
            layer,
            plan,
            // What pages cut in pieces is copied with no hurry.
            tasks: match layer.kv.form {
                KvForm::Tiles => tasks,
                KvForm::Plain => &[],
            },
            task: 0,
            position: 0,
            queue: LineQueue::new(1),
        };
        fetch.fill();
        fetch
    }

    /// Asks for what a task reads from a position on, unless that has been done.
    pub fn reach(&mut self, task: usize, position: usize) {
        if self.task < task {
            (self.task, self.position) = (task, 0);
            self.fill();
        }
        while self.task == task && self.position <= position && !self.queue.is_empty() {
            self.queue.ask_all();
            self.go_on();
        }
    }

    /// What is still to be asked for while a task works on what it reads from a position on.
    pub fn lines(&mut self, task: usize, position: usize) -> &mut LineQueue {
        let limit = match self.task.saturating_sub(task) {
            0 => position + MAX_AHEAD,
            1 => MAX_AHEAD / 2,
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

    /// Of the position, or of the next task's first.
    fn fill(&mut self) {
        // What kernels do for a line is the same work for fewer bytes in 8 bits.
        self.queue = LineQueue::new(2 / self.layer.kv.format.size());
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
            let num_lines = self.layer.spec.head_dim * KEY_TILE * kv.format.size() / 64;
            for position in tiles.step_by(KEY_TILE) {
                let at = HeadPage {
                    layer: self.layer.layer,
                    page: pages[position / kv.page_size()].0 as usize,
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
