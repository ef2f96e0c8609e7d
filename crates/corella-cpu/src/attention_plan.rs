//! Which query rows of a step attend together, and which worker takes them.

use std::ops::Range;

use corella_model::{AttentionSpec, KvFormat};

use crate::kernels::{Kernels, QUERY_TILE_ROWS};
use crate::step_plan::SpanPlan;
use crate::tile_attention::MAX_TASK_ROWS;

/// What attention takes at once.
#[derive(Clone, Copy, Debug)]
pub struct TaskShape {
    /// A task has no more rows than this,
    max_rows: usize,
    /// and no fewer than this only to keep workers busy.
    min_rows: usize,
    /// Reading a position costs about as much as so many rows' arithmetic on it.
    read_cost: usize,
}

impl TaskShape {
    pub fn new(kernels: &Kernels, head_dim: usize, kv_format: KvFormat) -> Self {
        match kernels.attention_through_tiles(head_dim, kv_format) {
            None => Self {
                max_rows: kernels.tile_rows,
                min_rows: kernels.tile_rows,
                read_cost: 2,
            },
            Some(_) => Self {
                max_rows: MAX_TASK_ROWS,
                min_rows: QUERY_TILE_ROWS,
                read_cost: 50,
            },
        }
    }

    /// Rows of a task, so that there are some for every worker.
    fn rows(&self, spans: &[SpanPlan], spec: &AttentionSpec, num_threads: usize) -> usize {
        const TASKS_PER_WORKER: usize = 4;
        let group = spec.num_heads / spec.num_kv_heads;
        let num_tasks = |rows: usize| -> usize {
            let of_span = |span: &SpanPlan| (span.num_rows * group).div_ceil(rows);
            spec.num_kv_heads * spans.iter().map(of_span).sum::<usize>()
        };
        let mut rows = self.max_rows;
        while rows / 2 >= self.min_rows && num_tasks(rows) < TASKS_PER_WORKER * num_threads {
            rows /= 2;
        }
        rows
    }
}

/// Query rows that attend together: some positions of a span, times some of the query heads
/// that share a KV head.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionTask {
    pub span: usize,
    /// Of the span's positions.
    pub positions: Range<usize>,
    pub kv_head: usize,
    /// Of the KV head's query heads.
    pub heads: Range<usize>,
}

/// All tasks of a step, and where each worker's share begins and ends.
#[derive(Debug, Default)]
pub struct AttentionPlan {
    tasks: Vec<AttentionTask>,
    bounds: Vec<usize>,
}

impl AttentionPlan {
    pub fn clear(&mut self) {
        self.tasks.clear();
        self.bounds.clear();
    }

    pub fn build(
        &mut self,
        spans: &[SpanPlan],
        spec: &AttentionSpec,
        shape: TaskShape,
        num_threads: usize,
    ) {
        let rows = shape.rows(spans, spec, num_threads);
        let group = spec.num_heads / spec.num_kv_heads;
        let heads_at_once = group.min(rows);
        let positions_at_once = (rows / group).max(1);
        for (span, plan) in spans.iter().enumerate() {
            for kv_head in 0..spec.num_kv_heads {
                for start in (0..plan.num_rows).step_by(positions_at_once) {
                    for head in (0..group).step_by(heads_at_once) {
                        self.tasks.push(AttentionTask {
                            span,
                            positions: start..plan.num_rows.min(start + positions_at_once),
                            kv_head,
                            heads: head..group.min(head + heads_at_once),
                        });
                    }
                }
            }
        }
        self.share_out(spans, shape, num_threads);
    }

    /// Cuts the tasks into runs of about equal cost.
    fn share_out(&mut self, spans: &[SpanPlan], shape: TaskShape, num_threads: usize) {
        let cost = |task: &AttentionTask| {
            let Range { start, end } = task.positions;
            let num_read = spans[task.span].start + end;
            // Of each row on average, times 2.
            let num_seen = 2 * spans[task.span].start + start + end;
            let num_rows = (end - start) * task.heads.len();
            (num_seen * num_rows + 2 * num_read * shape.read_cost) as u64
        };
        let total: u64 = self.tasks.iter().map(cost).sum();
        let mut sum = 0;
        self.bounds.push(0);
        for (index, task) in self.tasks.iter().enumerate() {
            sum += cost(task);
            while (self.bounds.len() as u64) < num_threads as u64
                && sum * num_threads as u64 >= total * self.bounds.len() as u64
            {
                self.bounds.push(index + 1);
            }
        }
        self.bounds.resize(num_threads, self.tasks.len());
        self.bounds.push(self.tasks.len());
    }

    pub fn tasks_of(&self, worker: usize) -> &[AttentionTask] {
        &self.tasks[self.bounds[worker]..self.bounds[worker + 1]]
    }
}
