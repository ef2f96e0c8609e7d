//! The memory of rows between kernels.

use corella_model::{DecoderSpec, DeviceError, LayerSpec};

use crate::device::{DeviceBuffer, Element, PinnedBuffer, SharedDevice};

/// The largest number of rows whose hidden states are fetched at once.
pub const STATES_AT_ONCE: usize = 256;

/// The memory of rows between kernels, `[rows][...]`.
pub struct Activations {
    pub residual: DeviceBuffer,
    pub normed: DeviceBuffer,
    pub qkv: DeviceBuffer,
    pub queries: DeviceBuffer,
    pub attended: DeviceBuffer,
    /// Gates and the gated values, if the activation function has a kernel of its own.
    pub gate_up: DeviceBuffer,
    pub gated: DeviceBuffer,
    /// The output of a part of a layer that is normed before it is added.
    pub branch: DeviceBuffer,
    pub head_input: DeviceBuffer,
    pub logits: DeviceBuffer,
    /// The step's id, for the kernel that reports the step's progress.
    pub step: DeviceBuffer,
    pub states: DeviceBuffer,
    pub states_on_host: PinnedBuffer<f32>,
    pub state_rows: DeviceBuffer,
}

impl Activations {
    /// Allocates memory for steps of `max_rows` rows, with gates and values side by side for `gate_rows` rows, and for
    /// the logits of `logit_rows` rows.
    pub fn new(
        device: &SharedDevice,
        spec: &DecoderSpec,
        element: Element,
        max_rows: usize,
        gate_rows: usize,
        logit_rows: usize,
    ) -> Result<Self, DeviceError> {
        let new = |num_rows: usize, len: usize, size: usize| {
            let buffer = DeviceBuffer::new(device, num_rows * len * size);
            buffer.map_err(|error| DeviceError(format!("no memory for the activations: {error}")))
        };
        let max = |of: &dyn Fn(&LayerSpec) -> usize| spec.layers.iter().map(of).max().unwrap_or(0);
        let hidden = spec.hidden_size;
        let query_len = max(&|layer| layer.attention.query_len());
        let qkv_len = max(&|layer| layer.attention.query_len() + 2 * layer.attention.kv_len());
        let inner = max(&|layer| layer.feed_forward.mlp().intermediate_size);
        let has_branch = |layer: &LayerSpec| {
            layer.attention_norms.after.is_some() || layer.feed_forward_norms.after.is_some()
        };
        let branch_rows = if spec.layers.iter().any(has_branch) {
            max_rows
        } else {
            0
        };
        let (float, element) = (size_of::<f32>(), element.num_bytes());
        Ok(Self {
            residual: new(max_rows, hidden, float)?,
            normed: new(max_rows, hidden, element)?,
            qkv: new(max_rows, qkv_len, element)?,
            queries: new(max_rows, query_len, element)?,
            attended: new(max_rows, query_len, element)?,
            gate_up: new(gate_rows, 2 * inner, element)?,
            gated: new(max_rows, inner, element)?,
            branch: new(branch_rows, hidden, float)?,
            head_input: new(logit_rows, hidden, element)?,
            logits: new(logit_rows, spec.vocab_size, float)?,
            step: new(1, 1, size_of::<u64>())?,
            states: new(STATES_AT_ONCE, hidden, float)?,
            states_on_host: PinnedBuffer::new(device, STATES_AT_ONCE * hidden)?,
            state_rows: new(STATES_AT_ONCE, 1, size_of::<u32>())?,
        })
    }
}
