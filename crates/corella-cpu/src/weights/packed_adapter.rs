//! Adapters packed for the forward pass: low-rank updates of packed matrices (LoRA, Hu et al. 2021).
//!
//! The update of a matrix is B·A, with A `[rank, in]` and B `[out, rank]`, scaled. A row's inner values A·x are
//! computed first. B·(A·x) is added to the outputs of the matrix itself, panel by panel, before the outputs are
//! processed further.

use std::ops::Range;
use std::sync::Arc;

use corella_model::{
    Adapter, AdapterLayer, DType, DecoderSpec, FeedForward, LayerTensor, LowRankUpdate,
};
use half::bf16;

use crate::kernels::{Form, Kernels, LowRankDown, LowRankUp, PANEL_LANES};

use super::packed_layer::{PackedFeedForward, PackedLayer, paired};

/// An adapter of a whole model.
pub struct PackedAdapter {
    layers: Vec<[Option<PackedUpdate>; 4]>,
}

/// The packed matrices of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdaptedMatrix {
    Qkv,
    Output,
    GateUp,
    Down,
}

/// The update of one packed matrix, which may consist of several matrices: its parts.
pub struct PackedUpdate {
    k: usize,
    dtype: DType,
    /// The number of inner values of all parts.
    num_inner: usize,
    /// The A of all parts, `[num_inner][k]`.
    down: Vec<u8>,
    /// For each panel, its runs of lanes that belong to one part.
    panels: Vec<Range<u32>>,
    runs: Vec<Run>,
    /// The B of all runs, `[rank][lanes]` each, times the adapter's scale.
    up: Vec<u8>,
}

/// Neighbouring lanes of a panel that read the same inner values.
struct Run {
    lanes: Range<u8>,
    inner: Range<u32>,
    /// The offset of the run's weights in `PackedUpdate::up`, in bytes.
    at: usize,
}

/// The adapters of a step's rows.
#[derive(Default)]
pub struct RowAdapters {
    adapters: Vec<Arc<PackedAdapter>>,
    /// For each row up to the last one with an adapter, the adapter's index, or `NO_ADAPTER`.
    of_row: Vec<u32>,
}

const NO_ADAPTER: u32 = u32::MAX;

impl RowAdapters {
    pub fn clear(&mut self) {
        self.adapters.clear();
        self.of_row.clear();
    }

    /// Whether no row has an adapter.
    pub fn is_empty(&self) -> bool {
        self.adapters.is_empty()
    }

    /// Gives rows an adapter.
    pub fn add(&mut self, rows: Range<usize>, adapter: &Arc<PackedAdapter>) {
        let is_it = |other: &Arc<PackedAdapter>| Arc::ptr_eq(other, adapter);
        let index = self.adapters.iter().position(is_it).unwrap_or_else(|| {
            self.adapters.push(Arc::clone(adapter));
            self.adapters.len() - 1
        });
        self.of_row.resize(rows.start, NO_ADAPTER);
        self.of_row.resize(rows.end, index as u32);
    }

    pub fn update(&self, row: usize, layer: usize, matrix: AdaptedMatrix) -> Option<&PackedUpdate> {
        let adapter = self.adapters.get(*self.of_row.get(row)? as usize)?;
        adapter.layers[layer][matrix as usize].as_ref()
    }
}

/// The model's data for packing an adapter.
pub struct AdapterPacking {
    spec: DecoderSpec,
    /// For each layer, whether the input of its down projection is multiplied by a Hadamard matrix.
    hadamard_down: Vec<bool>,
    /// The format of the adapters' weights. bf16 is as exact as any model's weights except f32.
    dtype: DType,
    kernels: &'static Kernels,
}

impl AdapterPacking {
    pub fn new(spec: &DecoderSpec, layers: &[PackedLayer], kernels: &'static Kernels) -> Self {
        let hadamard = layers.iter().map(|layer| match &layer.feed_forward {
            PackedFeedForward::Mlp(mlp) => mlp.down.hadamard,
            PackedFeedForward::Experts(_) => false,
        });
        let is_f32 =
            |layer: &PackedLayer| layer.form() == Form::Columns && layer.qkv.dtype == DType::F32;
        Self {
            spec: spec.clone(),
            hadamard_down: hadamard.collect(),
            dtype: match layers.iter().all(is_f32) {
                true => DType::F32,
                false => DType::Bf16,
            },
            kernels,
        }
    }

    pub fn pack(&self, adapter: &Adapter) -> PackedAdapter {
        let layers = adapter.layers.iter().enumerate();
        PackedAdapter {
            layers: layers
                .map(|(index, layer)| self.layer(index, layer))
                .collect(),
        }
    }

    fn layer(&self, index: usize, layer: &AdapterLayer) -> [Option<PackedUpdate>; 4] {
        use LayerTensor as T;
        let spec = &self.spec.layers[index];
        let hidden = self.spec.hidden_size;
        let (query, key) = (spec.attention.query_len(), spec.attention.kv_len());
        let lanes = |tensor: LayerTensor, len: usize| (0..len).map(move |row| Some((tensor, row)));
        let qkv = lanes(T::Q, query)
            .chain(lanes(T::K, key))
            .chain(lanes(T::V, key));
        let update = |lanes: &[_], k, hadamard| self.update(layer, lanes, k, hadamard);
        let [gate_up, down] = match &spec.feed_forward {
            FeedForward::Mlp(mlp) => {
                let inner = mlp.intermediate_size;
                let ups = match mlp.is_gated {
                    true => paired(inner, [T::GATE, T::UP]),
                    false => lanes(T::UP, inner).collect(),
                };
                let downs: Vec<_> = lanes(T::DOWN, hidden).collect();
                [
                    update(&ups, hidden, false),
                    update(&downs, inner, self.hadamard_down[index]),
                ]
            }
            FeedForward::Experts(_) => [None, None],
        };
        let outputs: Vec<_> = lanes(T::O, hidden).collect();
        [
            update(&qkv.collect::<Vec<_>>(), hidden, false),
            update(&outputs, query, false),
            gate_up,
            down,
        ]
    }

    /// Packs an adapter's updates of one packed matrix. `lanes` gives the matrix and the row of each output channel.
    /// Returns `None` if the adapter updates none of these matrices.
    fn update(
        &self,
        layer: &AdapterLayer,
        lanes: &[Option<(LayerTensor, usize)>],
        k: usize,
        hadamard: bool,
    ) -> Option<PackedUpdate> {
        let mut packed = PackedUpdate {
            k,
            dtype: self.dtype,
            num_inner: 0,
            down: Vec::new(),
            panels: Vec::new(),
            runs: Vec::new(),
            up: Vec::new(),
        };
        let mut parts: Vec<(LayerTensor, &LowRankUpdate, Range<u32>)> = Vec::new();
        let (mut row, mut scratch) = (vec![0.0; k], Vec::new());
        for &(tensor, _) in lanes.iter().flatten() {
            let is_packed = parts.iter().any(|(other, ..)| *other == tensor);
            let Some(update) = layer.get(&tensor).filter(|_| !is_packed) else {
                continue;
            };
            let rank = update.down.shape[0];
            for index in 0..rank {
                update.down.read_row(index, &mut scratch, &mut row);
                if hadamard {
                    // SAFETY: the pointer and the length are those of `row`, a multiple of the transform's order.
                    unsafe { (self.kernels.hadamard)(row.as_mut_ptr(), k) };
                }
                row.iter()
                    .for_each(|value| self.push(&mut packed.down, *value));
            }
            let first = packed.num_inner;
            packed.num_inner += rank;
            parts.push((tensor, update, first as u32..packed.num_inner as u32));
        }
        if parts.is_empty() {
            return None;
        }
        for panel in lanes.chunks(PANEL_LANES) {
            let first_run = packed.runs.len() as u32;
            let of_tensor = |lane: &Option<(LayerTensor, usize)>| lane.map(|(tensor, _)| tensor);
            let mut lane = 0;
            for run in panel.chunk_by(|a, b| of_tensor(a) == of_tensor(b)) {
                let lanes = lane..lane + run.len();
                lane = lanes.end;
                let part = parts
                    .iter()
                    .find(|(tensor, ..)| of_tensor(&run[0]) == Some(*tensor));
                let Some((_, update, inner)) = part else {
                    continue;
                };
                packed.runs.push(Run {
                    lanes: lanes.start as u8..lanes.end as u8,
                    inner: inner.clone(),
                    at: packed.up.len(),
                });
                let rank = inner.len();
                let mut rows = vec![0.0; run.len() * rank];
                for ((_, row), values) in run.iter().flatten().zip(rows.chunks_exact_mut(rank)) {
                    update.up.read_row(*row, &mut scratch, values);
                }
                for index in 0..rank {
                    let column = rows[index..].iter().step_by(rank);
                    column.for_each(|value| self.push(&mut packed.up, value * update.scale));
                }
            }
            packed.panels.push(first_run..packed.runs.len() as u32);
        }
        Some(packed)
    }

    fn push(&self, bytes: &mut Vec<u8>, value: f32) {
        match self.dtype {
            DType::F32 => bytes.extend_from_slice(&value.to_le_bytes()),
            _ => bytes.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
        }
    }
}

impl PackedUpdate {
    /// The length of the input rows.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Computes the inner values of a row with `k` elements.
    pub fn inner(&self, kernels: &Kernels, x: &[f32], out: &mut [f32]) {
        assert!(x.len() == self.k && out.len() >= self.num_inner);
        // SAFETY: the matrix has `num_inner` rows of `k` elements.
        unsafe {
            (kernels.low_rank_down)(LowRankDown {
                x: x.as_ptr(),
                k: self.k,
                matrix: self.down.as_ptr(),
                dtype: self.dtype,
                rank: self.num_inner,
                out: out.as_mut_ptr(),
            });
        }
    }

    /// Adds the update to a row's outputs in one panel, from the row's inner values.
    pub fn add(
        &self,
        kernels: &Kernels,
        panel: usize,
        inner: &[f32],
        out: &mut [f32; PANEL_LANES],
    ) {
        let runs = self.panels[panel].start as usize..self.panels[panel].end as usize;
        for run in &self.runs[runs] {
            let x = &inner[run.inner.start as usize..run.inner.end as usize];
            let out = &mut out[usize::from(run.lanes.start)..usize::from(run.lanes.end)];
            // SAFETY: the run has a row for each inner value, and a weight in each for every lane.
            unsafe {
                (kernels.low_rank_up)(LowRankUp {
                    x: x.as_ptr(),
                    rank: x.len(),
                    matrix: self.up.as_ptr().add(run.at),
                    dtype: self.dtype,
                    num_lanes: out.len(),
                    out: out.as_mut_ptr(),
                });
            }
        }
    }
}
