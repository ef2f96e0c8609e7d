//! Paged attention: a kernel for decoding, one for prompts, and one for f32.
//!
//! Queries and outputs are `[row][head][head_dim]`; keys and values are read from pages. Lists of items in the device's
//! memory assign work to thread blocks (`AttentionPlan`), so that a captured launch serves any step.

use std::f64::consts::LOG2_E;

use corella_model::{AttentionSpec, DType, DeviceError, KvFormat, KvGeometry};

use crate::attention::{AttentionShape, PlanLimits};
use crate::device::{DeviceBuffer, DevicePointer, Element, Grid, Kernel, SharedDevice, Stream};

use super::{args_bytes, element_macro, kv_element_macro, load_kernel};

#[cfg(all(test, feature = "emulated-device"))]
mod tests;

/// Threads of a block, in all kernels.
const NUM_THREADS: u32 = 128;

/// The largest static shared memory, in bytes, of the kernels whose dynamic shared memory may reach the limit.
const STATIC_BYTES: usize = 2816;

/// Rows of partial results in a device's memory, 32 MiB with 128 dimensions. To decode one sequence of 8192 positions
/// with 8 KV heads of 4 query heads each takes 512 rows, and a tile of its prompt takes 16384. With enough tiles to
/// keep the device busy, no rows are needed.
const NUM_PARTIAL_ROWS: usize = 1 << 16;

/// The kernels of one kind of attention.
#[derive(Debug)]
pub struct AttentionKernels {
    shape: AttentionShape,
    head_dim: usize,
    geometry: KvGeometry,
    soft_cap: f32,
    score_scale: f32,
    exponent_scale: f32,
    small: TileKernel,
    large: Option<TileKernel>,
    num_multiprocessors: usize,
}

#[derive(Debug)]
struct TileKernel {
    kernel: Kernel,
    shared_bytes: usize,
    /// Concurrent blocks of a multiprocessor.
    blocks_at_once: usize,
}

/// Memory for the parts of a result that items exchange. All kinds of attention share it, one after the other.
#[derive(Debug)]
pub struct AttentionScratch {
    partials: DeviceBuffer,
    stats: DeviceBuffer,
    counters: DeviceBuffer,
}

/// A list of items in the device's memory.
#[derive(Clone, Copy, Debug)]
pub struct ItemList {
    pub items: DevicePointer,
    /// The capacity in items, at least 1.
    pub max_items: usize,
    /// The address of the number of items, a `u32`.
    pub count: DevicePointer,
    /// The number of items, if known when the launch is recorded: each KV head of each item then has a thread block of
    /// its own. Otherwise as many thread blocks as the device can run at a time share the items.
    pub num_items: Option<usize>,
}

/// The inputs and outputs of a layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionStep<'a> {
    pub queries: DevicePointer,
    pub out: DevicePointer,
    /// The address of the layer's keys and values in page 0.
    pub kv: DevicePointer,
    /// The page tables of the layer's KV group, `[slot][table_len]`.
    pub tables: DevicePointer,
    pub table_len: usize,
    pub small: ItemList,
    pub large: ItemList,
    pub scratch: &'a AttentionScratch,
}

#[repr(C)]
struct AttentionArgs {
    queries: DevicePointer,
    out: DevicePointer,
    kv: DevicePointer,
    tables: DevicePointer,
    items: DevicePointer,
    num_items: DevicePointer,
    partials: DevicePointer,
    partial_stats: DevicePointer,
    counters: DevicePointer,
    page_bytes: u64,
    head_bytes: u32,
    page_size: u32,
    table_len: u32,
    max_items: u32,
    num_heads: u32,
    num_kv_heads: u32,
    window: u32,
    soft_cap: f32,
    score_scale: f32,
    exponent_scale: f32,
}

/// The roles of the warps of a block (`attention.cu`).
#[derive(Clone, Copy, Debug)]
struct Tiling {
    row_warps: usize,
    column_warps: usize,
    row_tiles: usize,
}

impl AttentionKernels {
    /// Compiles the kernels for queries and outputs of an element type, and for the format of the pages.
    pub fn load(
        device: &SharedDevice,
        spec: &AttentionSpec,
        geometry: &KvGeometry,
        element: Element,
    ) -> Result<Self, DeviceError> {
        let load = |tiling| TileKernel::load(device, spec, geometry, element, tiling);
        let (small_tiling, large_tiling) = match element {
            Element::F32 => (None, None),
            Element::Bf16 => (Some(Tiling::SMALL), Some(Tiling::large(spec.head_dim))),
        };
        let Some(small) = load(small_tiling)? else {
            return Err(DeviceError(format!(
                "heads of {} elements need more shared memory than {} has; keys and values of fewer bytes, \
                 such as with --kv-cache-dtype int8, need less",
                spec.head_dim,
                device.properties().name
            )));
        };
        // A device with too little shared memory for large tiles computes prompts in small ones.
        let large = match large_tiling {
            Some(_) => load(large_tiling)?,
            None => None,
        };
        let soft_cap = spec.soft_cap.unwrap_or(0.0);
        let scale = f64::from(spec.scale);
        let (score_scale, exponent_scale) = match spec.soft_cap {
            Some(cap) => (scale / f64::from(cap), LOG2_E),
            None => (1.0, scale * LOG2_E),
        };
        Ok(Self {
            shape: AttentionShape {
                num_heads: spec.num_heads,
                num_kv_heads: spec.num_kv_heads,
                window: spec.window,
                large_tile_rows: large.as_ref().and(large_tiling).map(|tiling| tiling.rows()),
            },
            head_dim: spec.head_dim,
            geometry: geometry.clone(),
            soft_cap,
            score_scale: score_scale as f32,
            exponent_scale: exponent_scale as f32,
            small,
            large,
            num_multiprocessors: device.properties().num_multiprocessors,
        })
    }

    /// The shape for plans.
    pub fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    pub fn limits(&self) -> PlanLimits {
        PlanLimits {
            num_blocks: self.num_multiprocessors * self.small.blocks_at_once,
            num_partial_rows: NUM_PARTIAL_ROWS,
        }
    }

    /// Computes the attention of a layer.
    ///
    /// # Safety
    /// All of `step` is memory of this device with the sizes of its items; see also `Device::launch`.
    pub unsafe fn launch(
        &self,
        device: &SharedDevice,
        step: &AttentionStep<'_>,
    ) -> Result<(), DeviceError> {
        let lists = [
            (Some(&self.small), step.small),
            (self.large.as_ref(), step.large),
        ];
        for (tile, list) in lists {
            let Some(tile) = tile else { continue };
            let num_blocks = match list.num_items {
                Some(num_items) => num_items * self.shape.num_kv_heads,
                None => self.num_multiprocessors * tile.blocks_at_once,
            };
            if num_blocks == 0 {
                continue;
            }
            let grid = Grid::new([num_blocks, 1, 1], NUM_THREADS, tile.shared_bytes);
            let args = self.args(step, list);
            // SAFETY: these are the kernel's parameters; the caller promises the rest.
            unsafe { device.launch(Stream::Compute, tile.kernel, grid, args_bytes(&args))? };
        }
        Ok(())
    }

    fn args(&self, step: &AttentionStep<'_>, list: ItemList) -> AttentionArgs {
        AttentionArgs {
            queries: step.queries,
            out: step.out,
            kv: step.kv,
            tables: step.tables,
            items: list.items,
            num_items: list.count,
            partials: step.scratch.partials.pointer(),
            partial_stats: step.scratch.stats.pointer(),
            counters: step.scratch.counters.pointer(),
            page_bytes: self.geometry.page_bytes() as u64,
            head_bytes: self.geometry.head_bytes() as u32,
            page_size: self.geometry.page_size,
            table_len: step.table_len as u32,
            max_items: list.max_items as u32,
            num_heads: self.shape.num_heads as u32,
            num_kv_heads: self.shape.num_kv_heads as u32,
            window: self.shape.window.map_or(u32::MAX, |window| window as u32),
            soft_cap: self.soft_cap,
            score_scale: self.score_scale,
            exponent_scale: self.exponent_scale,
        }
    }
}

impl AttentionScratch {
    /// Memory for steps of up to `max_rows` rows, for each of these kinds of attention.
    pub fn new(
        device: &SharedDevice,
        kinds: &[&AttentionKernels],
        max_rows: usize,
    ) -> Result<Self, DeviceError> {
        let max = |of: &dyn Fn(&AttentionKernels) -> usize| kinds.iter().map(|kind| of(kind)).max();
        let dims = max(&|kind| padded(kind.head_dim)).unwrap_or(0);
        let num_counters =
            max(&|kind| kind.shape.max_tasks(max_rows) * kind.shape.num_kv_heads).unwrap_or(0);
        Ok(Self {
            partials: DeviceBuffer::new(device, NUM_PARTIAL_ROWS * dims * size_of::<f32>())?,
            stats: DeviceBuffer::new(device, NUM_PARTIAL_ROWS * 2 * size_of::<f32>())?,
            counters: DeviceBuffer::new(device, num_counters * size_of::<u32>())?,
        })
    }
}

impl TileKernel {
    /// Compiles the kernel with a tiling, or the kernel for f32 without a tiling. `None` if a block would exceed the
    /// device's shared memory.
    fn load(
        device: &SharedDevice,
        spec: &AttentionSpec,
        geometry: &KvGeometry,
        element: Element,
        tiling: Option<Tiling>,
    ) -> Result<Option<Self>, DeviceError> {
        let mut defines = vec![
            ("ELEMENT", element_macro(element)),
            ("KV_ELEMENT", kv_element_macro(geometry.format)),
            ("HEAD_DIM", spec.head_dim.to_string()),
        ];
        let (name, text, shared_bytes) = match tiling {
            None => (
                "attention_f32.cu",
                include_str!("attention_f32.cu"),
                exact_shared_bytes(spec.head_dim),
            ),
            Some(tiling) => {
                defines.extend([
                    ("KV_IS_ALIGNED", u32::from(is_aligned(geometry)).to_string()),
                    ("ROW_WARPS", tiling.row_warps.to_string()),
                    ("COLUMN_WARPS", tiling.column_warps.to_string()),
                    ("ROW_TILES", tiling.row_tiles.to_string()),
                ]);
                let shared_bytes = tiling.shared_bytes(spec.head_dim, geometry.format);
                ("attention.cu", include_str!("attention.cu"), shared_bytes)
            }
        };
        let max_shared_bytes = device.properties().max_shared_bytes;
        if shared_bytes + STATIC_BYTES > max_shared_bytes {
            return Ok(None);
        }
        Ok(Some(Self {
            kernel: load_kernel(device, name, text, "attention", defines)?,
            shared_bytes,
            blocks_at_once: blocks_at_once(max_shared_bytes, shared_bytes),
        }))
    }
}

impl Tiling {
    const SMALL: Self = Self {
        row_warps: 1,
        column_warps: 4,
        row_tiles: 1,
    };

    /// Two row tiles take twice the registers, and the sums for more than 128 dimensions leave too few registers for
    /// that.
    fn large(head_dim: usize) -> Self {
        Self {
            row_warps: 4,
            column_warps: 1,
            row_tiles: if head_dim <= 128 { 2 } else { 1 },
        }
    }

    fn rows(&self) -> usize {
        16 * self.row_tiles * self.row_warps
    }

    /// Dynamic shared memory: queries, two stages of keys and values, and room for converting these if necessary.
    fn shared_bytes(&self, head_dim: usize, format: KvFormat) -> usize {
        const NUM_KEYS: usize = 64;
        const NUM_STAGES: usize = 2;
        let stride = (padded(head_dim) + 8) * size_of::<u16>();
        let (staged, converted) = match format {
            KvFormat::Float(DType::Bf16) => (stride, 0),
            format => ((head_dim * format.size()).next_multiple_of(16), stride),
        };
        self.rows() * stride + 2 * NUM_KEYS * (NUM_STAGES * staged + converted)
    }
}

/// The number of concurrent blocks of a multiprocessor with this much dynamic shared memory. A multiprocessor has 1 KiB
/// more than a block may have, and reserves 1 KiB for each block. Registers suffice for three blocks.
fn blocks_at_once(max_shared_bytes: usize, shared_bytes: usize) -> usize {
    const RESERVED_BYTES: usize = 1024;
    ((max_shared_bytes + RESERVED_BYTES) / (shared_bytes + STATIC_BYTES + RESERVED_BYTES))
        .clamp(1, 3)
}

/// Dynamic shared memory of `attention_f32.cu`: 32 keys and values.
fn exact_shared_bytes(head_dim: usize) -> usize {
    const NUM_KEYS: usize = 32;
    NUM_KEYS * (2 * head_dim + 1) * size_of::<f32>()
}

/// Elements of a head in partial results and in products.
fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(16)
}

/// Whether every key and value begins at a multiple of 16 bytes, and has such a length.
fn is_aligned(geometry: &KvGeometry) -> bool {
    let row_bytes = geometry.head_dim as usize * geometry.format.size();
    row_bytes.is_multiple_of(16) && geometry.head_bytes().is_multiple_of(16)
}
