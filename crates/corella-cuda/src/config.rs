//! The configuration of the executor.

use corella_core::SchedulerConfig;
use corella_model::{KvFormat, KvGroups};

use crate::device::Element;

#[derive(Clone, Debug)]
pub struct CudaConfig {
    /// The type of weights and activations.
    pub element: Element,
    pub kv_format: KvFormat,
    /// The groups of layers with page tables of their own. `None` stands for one group, which keeps the pages of the
    /// whole context.
    pub kv_groups: Option<KvGroups>,
    pub num_pages: u32,
    pub page_size: u32,
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub max_model_len: u32,
    /// The largest number of alternatives whose log-probabilities a request may ask for.
    pub max_logprobs: u32,
    /// Whether the bits of a row depend only on the row's sequence. Otherwise the vendor's library computes products of
    /// many rows, and chooses its kernel by the number of rows.
    pub is_batch_invariant: bool,
    /// Whether decode steps are captured as graphs and replayed.
    pub uses_graphs: bool,
}

impl CudaConfig {
    /// The sizes for a scheduler's batches, and defaults for the rest.
    pub fn for_scheduler(limits: &SchedulerConfig, element: Element, kv_format: KvFormat) -> Self {
        Self {
            element,
            kv_format,
            kv_groups: None,
            num_pages: limits.num_pages,
            page_size: limits.page_size,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_model_len: limits.max_model_len,
            max_logprobs: 20,
            is_batch_invariant: true,
            uses_graphs: true,
        }
    }
}
