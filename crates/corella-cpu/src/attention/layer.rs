//! The inputs and outputs of one layer's attention.

use corella_model::{AttentionSpec, KvLayer};

use crate::dense::{Buffer, PackedRows, Tiles};
use crate::kernels::Kernels;
use crate::kv::KvRows;

use super::plan::{AttentionPlan, AttentionTask};
use super::queries::Queries;
use super::span::{Spans, StepSpan};

/// The inputs and outputs that all attention tasks of one layer share.
pub struct AttentionLayer<'a> {
    pub kernels: &'a Kernels,
    pub spec: &'a AttentionSpec,
    /// The sink of each query head; empty without sinks.
    pub sinks: &'a [f32],
    pub kv: &'a KvRows,
    /// The place of the layer's keys and values.
    pub kv_layer: KvLayer,
    pub spans: &'a Spans,
    pub plan: &'a AttentionPlan,
    pub queries: &'a Queries,
    /// The gates of the outputs of query heads, `[rows][heads][head_dim]`.
    pub gates: Option<&'a Buffer>,
    pub out: &'a PackedRows,
    pub tiles: Tiles,
}

impl AttentionLayer<'_> {
    /// The number of query heads that share one KV head.
    pub(super) fn group_len(&self) -> usize {
        self.spec.num_heads / self.spec.num_kv_heads
    }

    /// The sink of the layer's query head `head`.
    pub(super) fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.get(head).copied()
    }

    /// Multiplies one head of a row by its gates.
    pub(super) fn gate(&self, gates: &Buffer, (row, head): (usize, usize), values: &mut [f32]) {
        let dim = values.len();
        // SAFETY: gates are not written between the barriers around attention.
        let gates = unsafe { &gates.row(row)[head * dim..][..dim] };
        // SAFETY: both have `dim` elements.
        unsafe { (self.kernels.gate)(values.as_mut_ptr(), gates.as_ptr(), dim) };
    }

    /// Yields, for each row of the task, the row of the step and the query head.
    pub(super) fn rows<'a>(
        &self,
        task: &'a AttentionTask,
        span: &'a StepSpan,
    ) -> impl Iterator<Item = (usize, usize)> + 'a {
        let group = self.group_len();
        task.positions.clone().flat_map(move |position| {
            let row = span.first_row + position;
            task.heads
                .clone()
                .map(move |head| (row, task.kv_head * group + head))
        })
    }
}
