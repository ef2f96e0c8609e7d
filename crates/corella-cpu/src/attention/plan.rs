//! The division of a step's attention into tasks, and of the tasks among the workers.

use std::ops::Range;

use corella_model::AttentionSpec;

use crate::kernels::{Kernels, QUERY_TILE_ROWS};
use crate::kv::KvMemory;

use super::span::StepSpan;

/// The largest number of rows of a task, in any kernel.
pub const MAX_TASK_ROWS: usize = 512;

/// The limits of the size of an attention task, and the cost model of tasks.
#[derive(Clone, Copy, Debug)]
pub struct TaskShape {
    /// The largest number of rows of a task.
    max_rows: usize,
    /// The number of rows below which tasks are not split further, even with idle workers.
    min_rows: usize,
    /// The cost of reading one position, in units of the arithmetic of one row on that position.
    read_cost: usize,
}

impl TaskShape {
    pub fn new(kernels: &Kernels, kv: &KvMemory) -> Self {
        match kv.tile_attention(kernels) {
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

    /// Chooses the number of rows per task so that every worker gets several tasks.
    fn rows(&self, spans: &[StepSpan], spec: &AttentionSpec, num_threads: usize) -> usize {
        const TASKS_PER_WORKER: usize = 4;
        let group = spec.num_heads / spec.num_kv_heads;
        let num_tasks = |rows: usize| -> usize {
            let of_span = |span: &StepSpan| (span.num_rows * group).div_ceil(rows);
            spec.num_kv_heads * spans.iter().map(of_span).sum::<usize>()
        };
        let mut rows = self.max_rows;
        while rows / 2 >= self.min_rows && num_tasks(rows) < TASKS_PER_WORKER * num_threads {
            rows /= 2;
        }
        rows
    }
}

/// Query rows that attend together: some positions of a span, times some of the query heads that share a KV head.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionTask {
    pub span: usize,
    /// Positions relative to the span's first row.
    pub positions: Range<usize>,
    pub kv_head: usize,
    /// Query heads, counted from the first query head of `kv_head`.
    pub heads: Range<usize>,
}

impl AttentionTask {
    /// The end of the positions that the rows of the task see.
    pub fn end_seen(&self, span: &StepSpan, spec: &AttentionSpec) -> usize {
        let last = span.start + self.positions.end - 1;
        spec.end_seen(last, span.start + span.num_rows)
    }
}

/// All attention tasks of a step, and the range of each worker's share.
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
        spans: &[StepSpan],
        spec: &AttentionSpec,
        shape: TaskShape,
        num_threads: usize,
    ) {
        let rows = shape.rows(spans, spec, num_threads);
        let group = spec.num_heads / spec.num_kv_heads;
        let heads_at_once = group.min(rows);
        let positions_at_once = (rows / group).max(1);
        for (index, span) in spans.iter().enumerate() {
            for kv_head in 0..spec.num_kv_heads {
                for start in (0..span.num_rows).step_by(positions_at_once) {
                    for head in (0..group).step_by(heads_at_once) {
                        self.tasks.push(AttentionTask {
                            span: index,
                            positions: start..span.num_rows.min(start + positions_at_once),
                            kv_head,
                            heads: head..group.min(head + heads_at_once),
                        });
                    }
                }
            }
        }
        self.share_out(spans, spec, shape, num_threads);
    }

    /// Cuts the tasks into runs of about equal cost, one per worker.
    fn share_out(
        &mut self,
        spans: &[StepSpan],
        spec: &AttentionSpec,
        shape: TaskShape,
        num_threads: usize,
    ) {
        let cost = |task: &AttentionTask| {
            let Range { start, end } = task.positions;
            let span = &spans[task.span];
            let (first, end_position) = (span.start + start, span.start + end);
            let num_read = task.end_seen(span, spec) - spec.first_seen(first);
            // Twice the mean number of positions that a row of the task sees.
            let most = spec.window.unwrap_or(usize::MAX);
            let num_seen = match spec.is_causal {
                true => first.min(most) + end_position.min(most),
                false => 2 * span.num_rows.min(most.saturating_mul(2)),
            };
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

#[cfg(test)]
mod tests {
    use corella_model::RotarySpec;

    use super::super::span::Spans;
    use super::*;

    #[test]
    fn with_a_window_late_rows_cost_no_more_than_early_ones() {
        let mut spans = Spans::default();
        for start in [10_000, 100, 100] {
            spans.add(1, start, []);
        }
        let shape = TaskShape {
            max_rows: 4,
            min_rows: 4,
            read_cost: 2,
        };
        let mut spec = AttentionSpec::plain(2, 1, 32, RotarySpec::plain(1e4, 32));
        for (window, num_tasks) in [(None, 1), (Some(64), 2)] {
            spec.window = window;
            let mut plan = AttentionPlan::default();
            plan.build(&spans, &spec, shape, 2);
            assert_eq!(plan.tasks_of(0).len(), num_tasks, "{window:?}");
            assert_eq!(plan.tasks_of(1).len(), 3 - num_tasks, "{window:?}");
        }
    }
}
