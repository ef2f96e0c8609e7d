//! The KV memory of all pipeline stages as one: layers by their number in the model.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use corella_core::{PageId, StepId};
use corella_model::{AttentionSpec, KvGeometry, KvPages, LayerProgress};

use crate::kv_memory::KvMemory;

pub struct PipelinePages {
    geometry: KvGeometry,
    /// In the order of their layers.
    stages: Vec<Arc<KvMemory>>,
}

impl PipelinePages {
    /// Stages have more pages than others may see.
    pub fn new(attention: &AttentionSpec, num_pages: u32, stages: Vec<Arc<KvMemory>>) -> Self {
        let kv = &stages[0];
        assert!(stages.iter().all(|kv| kv.num_pages() >= num_pages as usize));
        let geometry = KvGeometry {
            num_layers: stages.iter().map(|kv| kv.num_layers() as u32).sum(),
            num_kv_heads: attention.num_kv_heads as u32,
            head_dim: attention.head_dim as u32,
            page_size: kv.page_size() as u32,
            num_pages,
            format: kv.format,
            order: kv.order,
        };
        Self { geometry, stages }
    }

    /// The stage of a layer, and its number there.
    fn stage(&self, layer: u32) -> (&KvMemory, usize) {
        let mut layer = layer as usize;
        for kv in &self.stages {
            if layer < kv.num_layers() {
                return (kv, layer);
            }
            layer -= kv.num_layers();
        }
        panic!("layer {layer} behind the last one");
    }
}

// SAFETY: each page of a layer has memory of its own, which workers use for batches that name the
// page, and for attention to them.
unsafe impl KvPages for PipelinePages {
    fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2] {
        assert!(page.0 < self.geometry.num_pages, "page {page}");
        let (kv, layer) = self.stage(layer);
        kv.native_parts(layer, page.0 as usize)
    }

    fn note_written(&self, page: PageId) {
        for kv in &self.stages {
            kv.note_used(page.0 as usize);
        }
    }

    fn num_layers_done(&self, step: StepId) -> u32 {
        let mut num_done = 0;
        for kv in &self.stages {
            let of_stage = kv.counter.num_done(step).unwrap_or(kv.num_layers());
            num_done += of_stage as u32;
            if of_stage < kv.num_layers() {
                break;
            }
        }
        num_done
    }

    fn wait_layer(&self, step: StepId, layer: u32, timeout: Duration) -> LayerProgress {
        let (kv, layer) = self.stage(layer);
        kv.counter.wait(step, layer, timeout)
    }
}
