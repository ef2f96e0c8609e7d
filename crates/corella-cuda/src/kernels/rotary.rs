//! Norms of queries and keys, RoPE, and the pages that keys and values are written to.

use corella_model::{AttentionSpec, DeviceError, KvGeometry, NormKind, QkNorm, RotarySpec};

use crate::device::{DevicePointer, Element, Grid, Kernel, SharedDevice, Stream};

use super::{args_bytes, element_macro, kv_element_macro, load_kernel};

#[cfg(all(test, feature = "emulated-device"))]
mod tests;

/// Threads of a block.
const NUM_THREADS: u32 = 128;

/// The kernel of one kind of attention.
#[derive(Debug)]
pub struct RotaryKernel {
    kernel: Kernel,
    heads_per_block: usize,
    spec: AttentionSpec,
    geometry: KvGeometry,
}

/// The inputs and outputs for a layer's queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct RotaryStep {
    pub num_rows: usize,
    /// `[row][num_heads + 2 * num_kv_heads][head_dim]`: queries, keys, values.
    pub qkv: DevicePointer,
    /// `[row][num_heads][head_dim]`.
    pub queries: DevicePointer,
    /// The address of the layer's keys and values in page 0.
    pub kv: DevicePointer,
    /// The step's rows: token, position, slot, span. A row of position -1 writes no key and no value.
    pub rows: DevicePointer,
    /// The page tables of the layer's KV group, `[slot][table_len]`.
    pub tables: DevicePointer,
    pub table_len: usize,
    /// The output of `rotary_angles`; not read without RoPE.
    pub angles: DevicePointer,
    /// The weights of the norms in f32; not read without norms.
    pub query_norm: DevicePointer,
    pub key_norm: DevicePointer,
}

#[repr(C)]
struct RotaryArgs {
    qkv: DevicePointer,
    queries: DevicePointer,
    kv: DevicePointer,
    rows: DevicePointer,
    tables: DevicePointer,
    angles: DevicePointer,
    query_norm: DevicePointer,
    key_norm: DevicePointer,
    page_bytes: u64,
    head_bytes: u32,
    page_size: u32,
    table_len: u32,
    num_heads: u32,
    num_kv_heads: u32,
    num_rotated_pairs: u32,
    norm_kind: u32,
    is_centred: u32,
    eps: f32,
    padding: u32,
}

impl RotaryKernel {
    pub fn load(
        device: &SharedDevice,
        spec: &AttentionSpec,
        geometry: &KvGeometry,
        element: Element,
    ) -> Result<Self, DeviceError> {
        if let Some(QkNorm::Heads(norm) | QkNorm::Whole(norm)) = spec.qk_norm
            && norm.kind == (NormKind::Layer { bias: true })
        {
            return Err(DeviceError(String::from(
                "the norm of queries and keys has a bias, which the CUDA executor does not compute yet",
            )));
        }
        // A lane takes up to 4 pairs of elements at a time, and a head has as many lanes as its pairs need.
        let pairs = spec.head_dim / 2;
        let pairs_at_once = [4, 2, 1]
            .into_iter()
            .find(|len| pairs.is_multiple_of(*len))
            .unwrap_or(1);
        let lanes = (pairs / pairs_at_once).next_power_of_two().min(32);
        let text = include_str!("rotary.cu");
        let defines = vec![
            ("ELEMENT", element_macro(element)),
            ("KV_ELEMENT", kv_element_macro(geometry.format)),
            ("HEAD_DIM", spec.head_dim.to_string()),
            ("PAIRS_AT_ONCE", pairs_at_once.to_string()),
            ("HEAD_LANES", lanes.to_string()),
        ];
        Ok(Self {
            kernel: load_kernel(device, "rotary.cu", text, "rotary", defines)?,
            heads_per_block: NUM_THREADS as usize / lanes,
            spec: spec.clone(),
            geometry: geometry.clone(),
        })
    }

    /// Rotates the queries and keys of a layer and writes its pages.
    ///
    /// # Safety
    /// All of `step` is memory of this device with the sizes of the shapes; see also `Device::launch`.
    pub unsafe fn launch(
        &self,
        device: &SharedDevice,
        step: &RotaryStep,
    ) -> Result<(), DeviceError> {
        let num_heads = self.spec.num_heads + 2 * self.spec.num_kv_heads;
        if step.num_rows == 0 {
            return Ok(());
        }
        let blocks = num_heads.div_ceil(self.heads_per_block);
        let grid = Grid::new([step.num_rows, blocks, 1], NUM_THREADS, 0);
        let args = self.args(step);
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(Stream::Compute, self.kernel, grid, args_bytes(&args)) }
    }

    fn args(&self, step: &RotaryStep) -> RotaryArgs {
        let (norm_kind, norm) = match self.spec.qk_norm {
            None => (0, None),
            Some(QkNorm::Heads(norm)) => (1, Some(norm)),
            Some(QkNorm::Whole(norm)) => (2, Some(norm)),
        };
        let rotary = self.spec.rotary.as_ref();
        RotaryArgs {
            qkv: step.qkv,
            queries: step.queries,
            kv: step.kv,
            rows: step.rows,
            tables: step.tables,
            angles: step.angles,
            query_norm: step.query_norm,
            key_norm: step.key_norm,
            page_bytes: self.geometry.page_bytes() as u64,
            head_bytes: self.geometry.head_bytes() as u32,
            page_size: self.geometry.page_size,
            table_len: step.table_len as u32,
            num_heads: self.spec.num_heads as u32,
            num_kv_heads: self.spec.num_kv_heads as u32,
            num_rotated_pairs: rotary.map_or(0, |rotary| rotary.num_dims as u32 / 2),
            norm_kind,
            is_centred: u32::from(norm.is_some_and(|norm| norm.kind != NormKind::Rms)),
            eps: norm.map_or(0.0, |norm| norm.eps),
            padding: 0,
        }
    }
}

/// The cosines and sines of all positions of contexts of up to `max_context` tokens, computed in f64:
/// `[position][pair][cosine, sine]` of the rotated pairs. For 131072 positions and heads of 128 elements these are 64
/// MiB and 8 million angles, which all cores share.
pub fn rotary_angles(rotary: &RotarySpec, max_context: usize) -> Vec<f32> {
    let turned = rotary.frequencies(max_context);
    let stride = 2 * turned.frequencies.len();
    let mut angles = vec![0.0; max_context * stride];
    if stride == 0 {
        return angles;
    }
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let positions_at_once = max_context.div_ceil(num_threads).max(1);
    std::thread::scope(|scope| {
        for (index, part) in angles.chunks_mut(positions_at_once * stride).enumerate() {
            let turned = &turned;
            scope.spawn(move || {
                for (i, row) in part.chunks_exact_mut(stride).enumerate() {
                    let position = (index * positions_at_once + i) as f64;
                    for (pair, frequency) in row.chunks_exact_mut(2).zip(&turned.frequencies) {
                        let (sine, cosine) = (position * frequency).sin_cos();
                        pair[0] = (cosine * turned.magnitude) as f32;
                        pair[1] = (sine * turned.magnitude) as f32;
                    }
                }
            });
        }
    });
    angles
}
