//! The layout of a sequence's recurrent state.

use std::ops::Range;

use corella_model::{DecoderSpec, GatedDeltaSpec, RecurrentSpec};

use crate::kernels::DELTA_CHUNK;

/// The layout of a sequence's states, in elements of f32.
pub struct RecordLayout {
    /// `None` for layers without a state.
    layers: Vec<Option<LayerOffsets>>,
    len: usize,
}

/// The offsets of a layer's state in a record.
#[derive(Clone, Copy)]
enum LayerOffsets {
    Delta(DeltaOffsets),
    Convolution(InputRing),
}

/// The inputs of a convolution that later tokens read, `[token][channels]`. A token's place is its position
/// modulo the number of tokens.
#[derive(Clone, Copy)]
pub struct InputRing {
    first: usize,
    num_channels: usize,
    num_tokens: usize,
    /// The number of earlier tokens whose inputs a token reads.
    num_before: usize,
}

/// The offsets of a gated delta network's state in a record.
#[derive(Clone, Copy)]
pub struct DeltaOffsets {
    num_heads: usize,
    /// `[value head][key_dim][value_dim]`: the matrices at the start of the chunk.
    state: usize,
    state_len: usize,
    /// `[value head][token][value_dim]`: the additions of the chunk's tokens.
    updates: usize,
    value_dim: usize,
    /// `[value head][token]`: logarithms of the decays since the chunk's start.
    decays: usize,
    /// `[token][key_len]`.
    keys: usize,
    key_len: usize,
    inputs: InputRing,
    /// The number of tokens with updates, decays and keys: a multiple of a chunk. A token's place is its position
    /// modulo this number.
    num_tokens: usize,
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
            Some(match layer.recurrent.as_ref()? {
                RecurrentSpec::GatedDelta(spec) => {
                    LayerOffsets::Delta(DeltaOffsets::new(spec, max_drafts, &mut len))
                }
                RecurrentSpec::ShortConvolution(spec) => {
                    let sizes = [spec.num_channels, spec.kernel_len];
                    LayerOffsets::Convolution(InputRing::new(sizes, max_drafts, &mut len))
                }
            })
        });
        let layers = layers.collect();
        (len > 0).then_some(Self { layers, len })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn delta(&self, layer: usize) -> &DeltaOffsets {
        match &self.layers[layer] {
            Some(LayerOffsets::Delta(offsets)) => offsets,
            _ => panic!("layer {layer} is no gated delta network, and was asked for its state"),
        }
    }

    /// The layers with a state.
    pub fn recurrent_layers(&self) -> impl Iterator<Item = usize> {
        let layers = self.layers.iter().enumerate();
        layers.filter_map(|(index, offsets)| offsets.is_some().then_some(index))
    }

    /// Visits the parts of a record that a layer needs to continue after `num_tokens` tokens. The order and the sizes
    /// of the parts do not depend on the number of drafts.
    pub fn visit_needed(
        &self,
        layer: usize,
        num_tokens: usize,
        mut visit: impl FnMut(Range<usize>),
    ) {
        if let Some(LayerOffsets::Delta(offsets)) = &self.layers[layer] {
            offsets.visit_needed(num_tokens, &mut visit);
        }
        self.inputs(layer).visit_needed(num_tokens, &mut visit);
    }

    /// The inputs that a layer's convolution keeps.
    pub fn inputs(&self, layer: usize) -> &InputRing {
        match &self.layers[layer] {
            Some(LayerOffsets::Delta(offsets)) => &offsets.inputs,
            Some(LayerOffsets::Convolution(inputs)) => inputs,
            None => panic!("layer {layer} has no state, and was asked for it"),
        }
    }
}

/// Reserves `len` elements of a record, from a new cache line on, and returns the offset of the first.
fn take(end: &mut usize, len: usize) -> usize {
    let first = *end;
    *end += len.next_multiple_of(16);
    first
}

impl InputRing {
    fn new([num_channels, kernel_len]: [usize; 2], max_drafts: usize, end: &mut usize) -> Self {
        // The inputs of the convolution stay even when all drafts are rejected.
        let num_tokens = (kernel_len - 1 + max_drafts).max(1);
        Self {
            first: take(end, num_tokens * num_channels),
            num_channels,
            num_tokens,
            num_before: kernel_len - 1,
        }
    }

    /// Visits the inputs that the token after `num_tokens` tokens reads.
    fn visit_needed(&self, num_tokens: usize, visit: &mut impl FnMut(Range<usize>)) {
        for position in num_tokens.saturating_sub(self.num_before)..num_tokens {
            let first = self.at(position);
            visit(first..first + self.num_channels);
        }
    }

    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    pub fn at(&self, position: usize) -> usize {
        self.first + position % self.num_tokens * self.num_channels
    }
}

impl DeltaOffsets {
    fn new(spec: &GatedDeltaSpec, max_drafts: usize, end: &mut usize) -> Self {
        let mut take = |len: usize| take(end, len);
        let heads = spec.num_value_heads;
        let num_tokens = (DELTA_CHUNK + max_drafts).next_multiple_of(DELTA_CHUNK);
        let state_len = spec.key_dim * spec.value_dim;
        Self {
            num_heads: heads,
            state: take(heads * state_len),
            state_len,
            updates: take(heads * num_tokens * spec.value_dim),
            value_dim: spec.value_dim,
            decays: take(heads * num_tokens),
            keys: take(num_tokens * spec.key_len()),
            key_len: spec.key_len(),
            num_tokens,
            inputs: InputRing::new([spec.num_channels(), spec.kernel_len], max_drafts, end),
        }
    }

    /// Visits the matrices, which are zero in the first chunk and not read there, and the rows of the open chunk.
    fn visit_needed(&self, num_tokens: usize, visit: &mut impl FnMut(Range<usize>)) {
        let chunk = num_tokens / DELTA_CHUNK * DELTA_CHUNK;
        let num_open = num_tokens - chunk;
        let mut visit = |first: usize, len: usize| visit(first..first + len);
        if chunk > 0 {
            visit(self.state, self.num_heads * self.state_len);
        }
        for head in 0..self.num_heads {
            // A chunk is contiguous.
            visit(self.update(head, chunk), num_open * self.value_dim);
            visit(self.decay(head, chunk), num_open);
        }
        visit(self.keys(chunk), num_open * self.key_len);
    }

    pub fn state(&self, head: usize) -> usize {
        self.state + head * self.state_len
    }

    /// The update of a token; the updates of its chunk follow each other.
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
}
