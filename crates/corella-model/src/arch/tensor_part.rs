//! The rows of a stored tensor that make up one of the model's tensors: all rows or some, in the same or another order.

use std::ops::Range;

use crate::arch::{Layout, Stored};
use crate::{LayerSpec, LayerTensor, Mlp, RecurrentSpec, RowOrder, TensorSpec};

/// The stored rows that make up a tensor.
pub struct Part {
    /// The number of experts, if one tensor has the matrices of all experts.
    pub num_experts: Option<usize>,
    /// The first stored row.
    pub first: usize,
    /// The number of stored rows from `first` on that contain the tensor's rows.
    pub num_taken: usize,
    /// The number of rows of the stored tensor, or of its part for one expert.
    pub num_rows: usize,
    pub order: RowOrder,
    /// The order of the columns.
    pub columns: RowOrder,
}

impl Part {
    /// All rows of a tensor.
    pub fn by_itself(num_rows: usize) -> Self {
        Self {
            num_experts: None,
            first: 0,
            num_taken: num_rows,
            num_rows,
            order: RowOrder::AsStored,
            columns: RowOrder::AsStored,
        }
    }

    pub fn new(
        tensor: LayerTensor,
        layer: &LayerSpec,
        layout: &Layout,
        stored: &Stored,
        specs: &[TensorSpec],
    ) -> Self {
        let num_rows_of = |wanted: LayerTensor| {
            let found = specs.iter().find(|spec| spec.tensor == wanted);
            found.map_or(0, |spec| spec.shape[0])
        };
        let owner = tensor.owner().unwrap_or(tensor);
        let own = num_rows_of(tensor);
        let mut part = Self {
            order: row_order(tensor, layer, layout),
            columns: match tensor {
                LayerTensor::DeltaO => value_head_order(tensor, layer, layout),
                _ => RowOrder::AsStored,
            },
            ..Self::by_itself(own)
        };
        if !stored.parts.is_empty() {
            // A stored tensor of all experts lists the parts of expert 0 only.
            let owner = match owner {
                LayerTensor::Gate(Mlp::Expert(_)) => LayerTensor::Gate(Mlp::Expert(0)),
                LayerTensor::Up(Mlp::Expert(_)) => LayerTensor::Up(Mlp::Expert(0)),
                other => other,
            };
            let before = stored.parts.iter().take_while(|&&other| other != owner);
            let before: usize = before.map(|&other| num_rows_of(other)).sum();
            part.num_rows = stored.parts.iter().map(|&other| num_rows_of(other)).sum();
            if stored.takes_turns {
                let num_heads = owner.num_stored_heads(layer);
                let num_rotated = match part.order {
                    RowOrder::Heads { num_dims, .. } => Some(num_dims),
                    _ => None,
                };
                part.order = RowOrder::Blocks {
                    first: before / num_heads,
                    len: own / num_heads,
                    stride: part.num_rows / num_heads,
                    num_rotated,
                };
                part.num_taken = part.num_rows;
            } else {
                part.first = before;
            }
        }
        if let Some(first) = stored.alternate {
            part.order = RowOrder::EverySecond { first };
            part.num_taken = part.order.num_stored(own);
            part.num_rows = part.num_taken;
        }
        if let Some(expert) = stored.expert {
            part.num_experts = Some(num_rows_of(LayerTensor::Router));
            part.first += expert * part.num_rows;
        }
        part
    }

    /// The shape of the stored tensor that has a part of this shape.
    pub fn whole(&self, shape: &[usize]) -> Vec<usize> {
        let mut whole: Vec<usize> = self.num_experts.into_iter().collect();
        whole.push(self.num_rows);
        whole.extend(&shape[1..]);
        whole
    }

    pub fn rows(&self) -> Range<usize> {
        self.first..self.first + self.num_taken
    }
}

/// The stored order of a tensor's rows. The rows of query and key matrices may be stored in another order than
/// executors expect for RoPE.
pub fn row_order(tensor: LayerTensor, layer: &LayerSpec, layout: &Layout) -> RowOrder {
    use LayerTensor::{DeltaO, K, KNorm, Q, QNorm};
    if layer.recurrent.is_some() {
        return match tensor {
            DeltaO => RowOrder::AsStored,
            other => value_head_order(other, layer, layout),
        };
    }
    let attention = &layer.attention;
    let is_rotated = matches!(tensor.owner().unwrap_or(tensor), Q | K | QNorm | KNorm);
    // Converters also reorder the rows of layers without RoPE.
    let rotary = attention.rotary.as_ref();
    let num_dims = rotary.map_or(attention.head_dim, |rotary| rotary.num_dims);
    if is_rotated && (layout.rotates_neighbours || num_dims < attention.head_dim) {
        RowOrder::Heads {
            head_dim: attention.head_dim,
            num_dims,
            are_neighbours: layout.rotates_neighbours,
        }
    } else {
        RowOrder::AsStored
    }
}

/// The stored order of value heads of gated delta networks, in rows or columns of a tensor.
fn value_head_order(tensor: LayerTensor, layer: &LayerSpec, layout: &Layout) -> RowOrder {
    use LayerTensor::*;
    let Some(RecurrentSpec::GatedDelta(spec)) = &layer.recurrent else {
        return RowOrder::AsStored;
    };
    if !layout.tiles_value_heads || spec.heads_of_group() == 1 {
        return RowOrder::AsStored;
    }
    let (first, len) = match tensor {
        DeltaV | DeltaGate | DeltaO => (0, spec.value_dim),
        DeltaConvolution => (2 * spec.key_len(), spec.value_dim),
        DeltaStrength | DeltaDecay | DeltaDecayBias | DeltaRate => (0, 1),
        _ => return RowOrder::AsStored,
    };
    RowOrder::Tiled {
        first,
        len,
        num_groups: spec.num_key_heads,
        heads_of_group: spec.heads_of_group(),
    }
}
