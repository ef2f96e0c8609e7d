//! Attention of a step's query rows over the KV pages.
//!
//! A plan cuts the rows into tasks, and a worker computes tasks one after the other: in f32, or,
//! where keys and values are exact in bf16, with instructions that multiply matrix tiles.

mod kv_fetch;
mod layer;
mod plan;
mod queries;
mod row_attention;
mod span;
mod tile_attention;
mod tile_block;
mod tile_scratch;

pub use self::layer::AttentionLayer;
pub use self::plan::{AttentionPlan, TaskShape};
pub use self::queries::Queries;
pub use self::span::{Spans, StepSpan};

use std::io;

use crate::kernels::Kernels;
use crate::kv::KvMemory;
use crate::system::Worker;

use self::plan::AttentionTask;
use self::row_attention::RowScratch;
use self::tile_scratch::TileScratch;

/// The memory in which one worker computes an attention task.
pub enum AttentionScratch {
    Rows(Box<RowScratch>),
    Tiles(Box<TileScratch>),
}

impl AttentionScratch {
    pub fn new(kernels: &Kernels, kv: &KvMemory) -> io::Result<Self> {
        let head_dim = kv.longest_head();
        Ok(match kv.tile_attention(kernels) {
            None => Self::Rows(Box::new(RowScratch::new(head_dim))),
            Some(_) => Self::Tiles(Box::new(TileScratch::new(head_dim, kv.format)?)),
        })
    }
}

impl AttentionLayer<'_> {
    pub fn run(&self, worker: &Worker<'_>, scratch: &mut AttentionScratch) {
        let tasks_of = |owner| self.plan.tasks_of(owner);
        if !self.spans.have_prefill() {
            // Decode is bound by memory: each worker keeps its own list of tasks, so that it can
            // prefetch the pages of the next task while it computes the current one.
            return self.run_tasks(tasks_of(worker.index()), scratch);
        }
        worker.take_shares(
            |owner| tasks_of(owner).len(),
            |owner, units| self.run_tasks(&tasks_of(owner)[units], scratch),
        );
    }

    fn run_tasks(&self, tasks: &[AttentionTask], scratch: &mut AttentionScratch) {
        match (scratch, self.queries) {
            (AttentionScratch::Rows(scratch), Queries::Rows(queries)) => {
                self.run_rows(tasks, queries, scratch);
            }
            (AttentionScratch::Tiles(scratch), Queries::Tiles(queries)) => {
                self.run_tiles(tasks, queries, scratch);
            }
            _ => unreachable!("queries and scratch are for different attention kernels"),
        }
    }
}
