//! Which query rows of a step attend together, and which worker takes them.

use std::ops::Range;

use corella_model::AttentionSpec;

use crate::step_plan::SpanPlan;
use crate::thread_pool::Worker;

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
        tile_rows: usize,
        num_threads: usize,
    ) {
        let group = spec.num_heads / spec.num_kv_heads;
        let heads_at_once = group.min(tile_rows);
        let positions_at_once = (tile_rows / group).max(1);
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
        self.share_out(spans, num_threads);
    }

    /// Cuts the tasks into runs of about equal cost.
    fn share_out(&mut self, spans: &[SpanPlan], num_threads: usize) {
        let cost = |task: &AttentionTask| {
            let length = spans[task.span].start + task.positions.end;
            // Reading a position costs about as much as two rows' arithmetic on it.
            (length * (task.positions.len() * task.heads.len() + 2)) as u64
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

    pub fn tasks_of(&self, worker: &Worker<'_>) -> &[AttentionTask] {
        &self.tasks[self.bounds[worker.index()]..self.bounds[worker.index() + 1]]
    }
}
