//! Layers of bf16 weights for many rows on Hopper GPUs: `linear_hopper.cu`, at the operator's request. It has not run
//! on a GPU yet.

use corella_model::DeviceError;

use super::{LinearArgs, LinearWeights};
use crate::device::{
    DevicePointer, DeviceProperties, Element, Grid, Kernel, SharedDevice, Stream, Tensor,
    TensorDim, TensorMap,
};
use crate::kernels::args_bytes;
use crate::kernels::packed_weight::WeightLayout;

/// The kernels of a layer.
#[derive(Clone, Copy, Debug)]
pub struct HopperKernels {
    small: HopperKernel,
    large: HopperKernel,
}

#[derive(Clone, Copy, Debug)]
struct HopperKernel {
    kernel: Kernel,
    tile: HopperTile,
    weights: TensorMap,
}

/// The shape of a tile, and the number of concurrent tiles.
#[derive(Clone, Copy, Debug)]
struct HopperTile {
    channels: usize,
    rows: usize,
    num_stages: usize,
    /// Blocks that share a multiprocessor.
    blocks: usize,
    /// Whether a block computes tile after tile; otherwise a cluster may share a tile.
    is_persistent: bool,
    /// Registers of a thread that multiplies, and of one that copies. The registers of all blocks fit into 65,536.
    consumer_registers: usize,
    producer_registers: usize,
}

const LARGE: HopperTile = HopperTile {
    channels: 128,
    rows: 128,
    num_stages: 6,
    blocks: 1,
    is_persistent: true,
    consumer_registers: 232,
    producer_registers: 40,
};

const SMALL: HopperTile = HopperTile {
    channels: 128,
    rows: 64,
    num_stages: 4,
    blocks: 2,
    is_persistent: false,
    consumer_registers: 104,
    producer_registers: 32,
};

/// Inputs of a stage: 128 bytes, which tensor maps swizzle.
const STAGE_INPUTS: usize = 64;
/// Rows of a band. Blocks go through a band channel by channel.
const BAND_ROWS: usize = 2048;
/// Channels of a warpgroup.
const WARPGROUP_CHANNELS: usize = 64;
const WARPGROUP_THREADS: usize = 128;
/// The memory in which a warpgroup's results change places: 32 rows of 64 channels in f32, each row 16 bytes longer.
const RESULT_BYTES: usize = 32 * (WARPGROUP_CHANNELS + 4) * size_of::<f32>();
/// The alignment of stages in bytes. The compiler's alignment of shared memory is smaller.
const ALIGNMENT: usize = 1024;
/// The largest number of blocks in a cluster that every GPU with clusters supports.
const MAX_CLUSTER: usize = 8;
/// The largest number of splits whose sums fit into the shared memory of a block of a cluster.
const MAX_KEPT_SPLITS: usize = 2;

#[repr(C, align(64))]
struct HopperArgs {
    weights: TensorMap,
    inputs: TensorMap,
    linear: LinearArgs,
    padding: [u32; 6],
}

/// Whether the kernels support a layer on the device. Rows of tensor maps are a multiple of 16 bytes apart.
pub fn takes(properties: &DeviceProperties, weights: &LinearWeights, element: Element) -> bool {
    properties.uses_wgmma && can_take(weights, element)
}

pub fn can_take(weights: &LinearWeights, element: Element) -> bool {
    let is_bf16 = element == Element::Bf16 && weights.layout == WeightLayout::Floats;
    is_bf16 && weights.k.is_multiple_of(8)
}

impl HopperKernels {
    /// `load` loads the kernel of `linear_hopper.cu` with some macros in addition to the layer's.
    pub fn load(
        device: &SharedDevice,
        weights: &LinearWeights,
        is_gated: bool,
        load: impl Fn(&[(&'static str, String)]) -> Result<Kernel, DeviceError>,
    ) -> Result<Self, DeviceError> {
        let kernel = |tile: HopperTile| {
            Ok::<_, DeviceError>(HopperKernel {
                kernel: load(&tile.macros())?,
                tile,
                weights: device.tensor_map(&tile.weights(weights, is_gated))?,
            })
        };
        Ok(Self {
            small: kernel(SMALL)?,
            large: kernel(LARGE)?,
        })
    }

    /// Computes a layer.
    ///
    /// # Safety
    /// As for `Linear::launch`.
    pub unsafe fn launch(
        &self,
        device: &SharedDevice,
        mut linear: LinearArgs,
        num_multiprocessors: usize,
    ) -> Result<(), DeviceError> {
        let (rows, n) = (linear.rows as usize, linear.n as usize);
        let chosen = match LARGE.fills_device(rows, n, num_multiprocessors) {
            true => &self.large,
            false => &self.small,
        };
        let num_splits = linear.num_splits as usize;
        let num_parts = chosen
            .tile
            .num_parts(rows, n, num_splits, num_multiprocessors);
        linear.num_parts = num_parts as u32;
        let args = HopperArgs {
            weights: chosen.weights,
            inputs: device.tensor_map(&chosen.tile.inputs(
                linear.input,
                rows,
                linear.k as usize,
            ))?,
            linear,
            padding: [0; 6],
        };
        let grid = chosen.tile.grid(rows, n, num_parts, num_multiprocessors);
        let (stream, args) = (Stream::Compute, args_bytes(&args));
        // SAFETY: these are the kernel's parameters, and the tensor maps describe what the caller vouches for.
        unsafe { device.launch_clusters(stream, chosen.kernel, grid, num_parts as u32, args) }
    }
}

impl HopperTile {
    fn macros(self) -> Vec<(&'static str, String)> {
        let macros = [
            ("CHANNEL_TILE", self.channels),
            ("ROW_TILE", self.rows),
            ("NUM_STAGES", self.num_stages),
            ("BLOCKS", self.blocks),
            ("IS_PERSISTENT", usize::from(self.is_persistent)),
            ("SHARED_BY", 1),
            ("CONSUMER_REGISTERS", self.consumer_registers),
            ("PRODUCER_REGISTERS", self.producer_registers),
            ("BAND_ROWS", BAND_ROWS),
        ];
        macros
            .map(|(name, value)| (name, value.to_string()))
            .to_vec()
    }

    fn count(self, num_rows: usize, n: usize) -> usize {
        num_rows.div_ceil(self.rows) * n.div_ceil(self.channels)
    }

    /// Whether these tiles suit `num_rows` rows: most multiprocessors have a tile, and the rows would not fit into one
    /// small tile.
    fn fills_device(self, num_rows: usize, n: usize, num_multiprocessors: usize) -> bool {
        num_rows > SMALL.rows && 4 * self.count(num_rows, n) >= 3 * num_multiprocessors
    }

    /// The number of blocks that share the splits of a tile: the largest power of two with which a block keeps few
    /// enough splits, and all tiles together have at most twice as many blocks as the device has room for.
    fn num_parts(
        self,
        num_rows: usize,
        n: usize,
        num_splits: usize,
        num_multiprocessors: usize,
    ) -> usize {
        if self.is_persistent {
            return 1;
        }
        let num_places = 2 * self.blocks * num_multiprocessors;
        let num_tiles = self.count(num_rows, n);
        let fits = |&parts: &usize| {
            parts <= num_splits
                && num_splits <= MAX_KEPT_SPLITS * parts
                && parts * num_tiles <= num_places
        };
        let powers = (1..).map(|log| 1 << log);
        powers
            .take_while(|&parts| parts <= MAX_CLUSTER)
            .filter(fits)
            .max()
            .unwrap_or(1)
    }

    fn grid(self, num_rows: usize, n: usize, num_parts: usize, num_multiprocessors: usize) -> Grid {
        let num_warpgroups = self.channels / WARPGROUP_CHANNELS;
        let num_tiles = self.count(num_rows, n);
        let num_clusters = match self.is_persistent {
            true => num_tiles.min(self.blocks * num_multiprocessors),
            false => num_tiles,
        };
        let result_bytes = match self.is_persistent {
            true => num_warpgroups * RESULT_BYTES,
            false => 0,
        };
        const BARRIER_BYTES: usize = 16;
        let stage_bytes = (self.channels + self.rows) * STAGE_INPUTS * 2 + BARRIER_BYTES;
        Grid::new(
            [num_clusters * num_parts, 1, 1],
            (WARPGROUP_THREADS * (num_warpgroups + 1)) as u32,
            ALIGNMENT + self.num_stages * stage_bytes + result_bytes,
        )
    }

    /// The weights in the layout of tiles: in a gated layer, 8 gates, then the 8 values that they gate.
    fn weights(self, weights: &LinearWeights, is_gated: bool) -> Tensor {
        let row_bytes = weights.k * size_of::<half::bf16>();
        let dim = |len, stride_bytes, box_len| TensorDim {
            len,
            stride_bytes,
            box_len,
        };
        let inputs = dim(weights.k, size_of::<half::bf16>(), STAGE_INPUTS);
        let dims = match is_gated {
            false => vec![inputs, dim(weights.n, row_bytes, self.channels)],
            true => vec![
                inputs,
                dim(super::GATE_RUN, row_bytes, super::GATE_RUN),
                dim(2, weights.n / 2 * row_bytes, 2),
                dim(
                    weights.n / (2 * super::GATE_RUN),
                    super::GATE_RUN * row_bytes,
                    self.channels / (2 * super::GATE_RUN),
                ),
            ],
        };
        Tensor {
            address: weights.weight,
            dims,
        }
    }

    fn inputs(self, input: DevicePointer, num_rows: usize, k: usize) -> Tensor {
        let inputs = TensorDim {
            len: k,
            stride_bytes: size_of::<half::bf16>(),
            box_len: STAGE_INPUTS,
        };
        let rows = TensorDim {
            len: num_rows,
            stride_bytes: k * size_of::<half::bf16>(),
            box_len: self.rows,
        };
        Tensor {
            address: input,
            dims: vec![inputs, rows],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of an H100.
    const MULTIPROCESSORS: usize = 132;

    fn dims(tensor: &Tensor) -> Vec<(usize, usize, usize)> {
        let dims = tensor.dims.iter();
        dims.map(|dim| (dim.len, dim.stride_bytes, dim.box_len))
            .collect()
    }

    fn layer(n: usize, k: usize) -> LinearWeights {
        LinearWeights {
            n,
            k,
            layout: WeightLayout::Floats,
            weight: DevicePointer(4096),
            group_scales: DevicePointer::NULL,
            group_minimums: DevicePointer::NULL,
            channel_scales: DevicePointer::NULL,
            bias: DevicePointer::NULL,
        }
    }

    #[test]
    fn prompts_take_large_tiles_one_block_on_each_multiprocessor() {
        // Qwen3 0.6B, qkv: 16 tiles of rows and 32 of channels.
        assert!(LARGE.fills_device(2048, 4096, MULTIPROCESSORS));
        assert_eq!(LARGE.num_parts(2048, 4096, 4, MULTIPROCESSORS), 1);
        let grid = LARGE.grid(2048, 4096, 1, MULTIPROCESSORS);
        // 1,024 + 6 * (256 * 128 + 16) + 2 * 32 * 68 * 4, of at most 232,448.
        let expected = Grid {
            blocks: [132, 1, 1],
            threads: 384,
            shared_bytes: 215_136,
        };
        assert_eq!(grid, expected);
        // With 99 tiles, three quarters of the 132 multiprocessors have a tile; with 98, fewer.
        assert!(LARGE.fills_device(65, 99 * 128, MULTIPROCESSORS));
        assert!(!LARGE.fills_device(65, 98 * 128, MULTIPROCESSORS));
        // The head of Llama 3 8B, whose rows would leave half of the tiles empty.
        assert!(!LARGE.fills_device(64, 128_256, MULTIPROCESSORS));
        assert_eq!(
            LARGE.grid(65, 98 * 128, 1, MULTIPROCESSORS).blocks,
            [98, 1, 1]
        );
    }

    #[test]
    fn few_tiles_are_shared_by_clusters() {
        let parts = |rows, n, splits| SMALL.num_parts(rows, n, splits, MULTIPROCESSORS);
        // Llama 3 8B, o and down: 32 tiles, 8 splits, 528 places.
        assert_eq!(parts(64, 4096, 8), 8);
        // The matrix of queries, keys and values has 48 tiles, and so 384 blocks with 8 for each tile.
        assert_eq!(parts(64, 6144, 8), 8);
        // Gate and up: 224 tiles have places for 2 blocks each, and 4 splits need no more.
        assert_eq!(parts(64, 28_672, 4), 2);
        // 1,002 tiles.
        assert_eq!(parts(64, 128_256, 4), 1);
        // A block keeps 2 splits: 16 need 8 blocks or one.
        assert_eq!(parts(64, 1024, 16), 8);
        assert_eq!(parts(64, 67 * 128, 16), 1);
        // No more blocks than splits.
        assert_eq!(parts(33, 64, 2), 2);
        assert_eq!(parts(33, 64, 1), 1);
        // Two tiles of rows and 32 of channels.
        let grid = SMALL.grid(65, 4096, 8, MULTIPROCESSORS);
        // 1,024 + 4 * (192 * 128 + 16): two such blocks have 198,784 bytes of 228 KiB.
        let expected = Grid {
            blocks: [512, 1, 1],
            threads: 384,
            shared_bytes: 99_392,
        };
        assert_eq!(grid, expected);
    }

    #[test]
    fn registers_are_those_of_a_multiprocessor() {
        for tile in [SMALL, LARGE] {
            let registers = tile.channels / 64 * tile.consumer_registers + tile.producer_registers;
            assert!(tile.blocks * registers * 128 <= 65_536, "{tile:?}");
            assert!(tile.consumer_registers % 8 == 0 && tile.producer_registers % 8 == 0);
        }
    }

    #[test]
    fn tensor_maps_have_rows_of_weights_and_of_inputs() {
        let weights = LARGE.weights(&layer(6144, 4096), false);
        assert_eq!(weights.address, DevicePointer(4096));
        assert_eq!(dims(&weights), [(4096, 2, 64), (6144, 8192, 128)]);
        let inputs = LARGE.inputs(DevicePointer(512), 300, 4096);
        assert_eq!(inputs.address, DevicePointer(512));
        assert_eq!(dims(&inputs), [(4096, 2, 64), (300, 8192, 128)]);
        assert_eq!(
            dims(&SMALL.inputs(DevicePointer(512), 33, 72)),
            [(72, 2, 64), (33, 144, 64)]
        );
    }

    /// Gates are rows 0 to 47, values 48 to 95. Group 5 has gates from 40 on and values from 88 on.
    #[test]
    fn tensor_maps_of_gated_layers_alternate_gates_and_values() {
        let weights = SMALL.weights(&layer(96, 40), true);
        let expected = [(40, 2, 64), (8, 80, 8), (2, 48 * 80, 2), (6, 640, 8)];
        assert_eq!(dims(&weights), expected);
        let strides: Vec<usize> = weights.dims.iter().map(|dim| dim.stride_bytes).collect();
        let row = |in_run, half, group| {
            (in_run * strides[1] + half * strides[2] + group * strides[3]) / 80
        };
        assert_eq!((row(0, 0, 5), row(0, 1, 5), row(7, 1, 5)), (40, 88, 95));
        // A tile has 64 gates and their values.
        let elements: usize = weights.dims.iter().map(|dim| dim.box_len).product();
        assert_eq!(elements, 128 * 64);
    }

    #[test]
    fn layers_are_taken_by_their_shape_and_type() {
        assert!(can_take(&layer(37, 1032), Element::Bf16));
        assert!(!can_take(&layer(40, 1036), Element::Bf16));
        assert!(!can_take(&layer(40, 1032), Element::F32));
        let integers = LinearWeights {
            layout: WeightLayout::Int8Channels,
            ..layer(40, 1032)
        };
        assert!(!can_take(&integers, Element::Bf16));
    }
}
