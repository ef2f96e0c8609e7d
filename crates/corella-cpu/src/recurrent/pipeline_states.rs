//! The snapshots of all pipeline stages as one. Recurrent layers are numbered from the first stage to the last.

use std::sync::Arc;

use corella_core::SnapshotId;
use corella_model::{StateError, StateRecords};

use super::snapshot_memory::SnapshotMemory;

pub struct PipelineStates {
    stages: Vec<Arc<SnapshotMemory>>,
    /// The stage of each recurrent layer, and the layer's index there.
    layers: Vec<(usize, usize)>,
}

impl PipelineStates {
    /// `None` without recurrent layers.
    pub fn new(stages: impl IntoIterator<Item = Arc<SnapshotMemory>>) -> Option<Self> {
        let stages: Vec<_> = stages.into_iter().collect();
        let of_stage = |(stage, memory): (usize, &Arc<SnapshotMemory>)| {
            let layers: Vec<_> = memory.layers().map(|layer| (stage, layer)).collect();
            layers
        };
        let layers: Vec<_> = stages.iter().enumerate().flat_map(of_stage).collect();
        (!layers.is_empty()).then_some(Self { stages, layers })
    }

    fn place(&self, layer: u32) -> (&SnapshotMemory, usize) {
        let (stage, layer) = self.layers[layer as usize];
        (&self.stages[stage], layer)
    }
}

impl StateRecords for PipelineStates {
    fn num_layers(&self) -> u32 {
        self.layers.len() as u32
    }

    fn num_bytes(&self, layer: u32, num_tokens: u32) -> usize {
        let (memory, layer) = self.place(layer);
        memory.num_bytes(layer, num_tokens as usize)
    }

    fn read(
        &self,
        layer: u32,
        snapshot: SnapshotId,
        num_tokens: u32,
        out: &mut [u8],
    ) -> Result<(), StateError> {
        let (memory, layer) = self.place(layer);
        memory.read(layer, snapshot, num_tokens as usize, out)
    }

    fn write(
        &self,
        layer: u32,
        snapshot: SnapshotId,
        num_tokens: u32,
        bytes: &[u8],
    ) -> Result<(), StateError> {
        let (memory, layer) = self.place(layer);
        memory.write(layer, snapshot, num_tokens as usize, bytes)
    }
}
