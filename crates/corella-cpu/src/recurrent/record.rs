//! The layout of a sequence's recurrent state.

use corella_model::{DecoderSpec, GatedDeltaSpec, RecurrentSpec};

use crate::kernels::DELTA_CHUNK;

/// The layout of a sequence's states, in elements of f32.
pub struct RecordLayout {
    /// `None` for layers without a state.
    layers: Vec<Option<DeltaPlaces>>,
    len: usize,
}

/// Where a layer's state is in a record.
#[derive(Clone, Copy)]
pub struct DeltaPlaces {
    /// `[value head][key_dim][value_dim]`: the matrices at the start of the chunk.
    state: usize,
    state_len: usize,
    /// `[value head][token][value_dim]`: what the chunk's tokens add.
    updates: usize,
    value_dim: usize,
    /// `[value head][token]`: logarithms of the decays since the chunk's start.
    decays: usize,
    /// `[token][key_len]`.
    keys: usize,
    key_len: usize,
    /// `[token][channels]`: the inputs of the convolution.
    inputs: usize,
    num_channels: usize,
    /// The number of tokens of which there are updates, decays and keys: a multiple of a chunk. A token's
    /// place is its position modulo this.
    num_tokens: usize,
    num_inputs: usize,
}

/// The memory of the states of one sequence.
pub fn state_bytes(spec: &DecoderSpec, max_drafts: usize) -> usize {
    let layout = RecordLayout::new(spec, max_drafts);
    layout.map_or(0, |layout| layout.len * size_of::<f32>())
}

impl RecordLayout {
    /// `None` if no layer has a state. `max_drafts` is the largest number of drafts of a span.
    pub fn new(spec: &DecoderSpec, max_drafts: usize) -> Option<Self> {
        let mut len = 0;
        let layers = spec.layers.iter().map(|layer| {
            let RecurrentSpec::GatedDelta(spec) = layer.recurrent.as_ref()?;
            Some(DeltaPlaces::new(spec, max_drafts, &mut len))
        });
        let layers = layers.collect();
        (len > 0).then_some(Self { layers, len })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn of_layer(&self, layer: usize) -> &DeltaPlaces {
        let places = self.layers[layer].as_ref();
        places.expect("a layer without a state was asked for it")
    }
}

impl DeltaPlaces {
    fn new(spec: &GatedDeltaSpec, max_drafts: usize, end: &mut usize) -> Self {
        let mut take = |len: usize| {
            let first = *end;
            // Parts begin with a cache line of their own.
            *end += len.next_multiple_of(16);
            first
        };
        let heads = spec.num_value_heads;
        let num_tokens = (DELTA_CHUNK + max_drafts).next_multiple_of(DELTA_CHUNK);
        // What the convolution reads is still there when all drafts are rejected.
        let num_inputs = (spec.kernel_len - 1 + max_drafts).max(1);
        let state_len = spec.key_dim * spec.value_dim;
        Self {
            state: take(heads * state_len),
            state_len,
            updates: take(heads * num_tokens * spec.value_dim),
            value_dim: spec.value_dim,
            decays: take(heads * num_tokens),
            keys: take(num_tokens * spec.key_len()),
            key_len: spec.key_len(),
            inputs: take(num_inputs * spec.num_channels()),
            num_channels: spec.num_channels(),
            num_tokens,
            num_inputs,
        }
    }

    pub fn num_inputs(&self) -> usize {
        self.num_inputs
    }

    pub fn state(&self, head: usize) -> usize {
        self.state + head * self.state_len
    }

    /// The update of a token; those of its chunk follow each other.
    pub fn update(&self, head: usize, position: usize) -> usize {
        let token = head * self.num_tokens + position % self.num_tokens;
        self.updates + token * self.value_dim
    }

    pub fn decay(&self, head: usize, position: usize) -> usize {
        self.decays + head * self.num_tokens + position % self.num_tokens
    }

    pub fn keys(&self, position: usize) -> usize {
        self.keys + position % self.num_tokens * self.key_len
    }

    pub fn inputs(&self, position: usize) -> usize {
        self.inputs + position % self.num_inputs * self.num_channels
    }
}
