//! Linear layers: `out[row][channel] = input[row] · weight[channel] + bias[channel]`.
//!
//! The bits of an output do not depend on the number of rows in any kernel (`linear_args.cuh`). The number of rows
//! selects the kernel: up to 32, weights stream through registers; beyond that, tiles go through shared memory.

use corella_model::{Activation, DeviceError};

use crate::device::{DevicePointer, Element, Grid, Kernel, SharedDevice, Stream};

use super::activation::activation_macro;
use super::packed_weight::{UNIT, WeightLayout};
use super::{args_bytes, element_macro, load_kernel};

mod hopper;
#[cfg(all(test, feature = "emulated-device"))]
mod tests;

use hopper::HopperKernels;

/// The weights of a linear layer on the device. `packed_weight.rs` has the layouts.
#[derive(Clone, Copy, Debug)]
pub struct LinearWeights {
    /// Output and input channels.
    pub n: usize,
    pub k: usize,
    pub layout: WeightLayout,
    /// Aligned to 16 bytes, like all memory that is read and written here.
    pub weight: DevicePointer,
    /// `[n][groups]` in f16.
    pub group_scales: DevicePointer,
    pub group_minimums: DevicePointer,
    /// `[n]` in f32, for integers.
    pub channel_scales: DevicePointer,
    /// `[n]` in f32; `DevicePointer::NULL` without a bias.
    pub bias: DevicePointer,
}

/// The use of the outputs, `[row][n]`.
#[derive(Clone, Copy, Debug)]
pub enum LinearOutput {
    /// They are stored in the type of activations; the only use for a gated layer.
    Store(DevicePointer),
    /// They are stored in f32, multiplied by `scale`; with a cap, they then become `cap * tanh(value / cap)`.
    StoreFloats {
        out: DevicePointer,
        scale: f32,
        soft_cap: Option<f32>,
    },
    /// They are multiplied by `scale` and added to f32.
    Add { out: DevicePointer, scale: f32 },
}

/// A linear layer, with the kernels for its shape.
#[derive(Clone, Debug)]
pub struct Linear {
    weights: LinearWeights,
    is_gated: bool,
    num_splits: usize,
    num_multiprocessors: usize,
    kernels: Kernels,
    finish: Kernel,
}

#[derive(Clone, Debug)]
enum Kernels {
    /// For f32.
    Exact(Kernel),
    /// For bf16.
    Tiled {
        /// For each of `NARROW_ROWS`.
        narrow: [Kernel; NARROW_ROWS.len()],
        many: ManyRows,
    },
}

/// The kernels for more rows than the last of `NARROW_ROWS`.
#[derive(Clone, Debug)]
enum ManyRows {
    Wide {
        small: WideKernel,
        large: WideKernel,
    },
    Hopper(Box<HopperKernels>),
}

#[derive(Clone, Copy, Debug)]
struct WideKernel {
    kernel: Kernel,
    tile: WideTile,
}

/// The shape of a tile of `linear_wide.cu`.
#[derive(Clone, Copy, Debug)]
struct WideTile {
    channels: usize,
    rows: usize,
    num_stages: usize,
}

/// The number of successive gates in a tile. Their values follow them, so that a block has both (`channel_row` of
/// `linear_args.cuh`).
const GATE_RUN: usize = 8;

/// The largest number of rows in a block, for each variant of `linear_narrow.cu`.
const NARROW_ROWS: [usize; 3] = [8, 16, 32];
const NARROW_CHANNELS: usize = 16;
/// Words from one column of sums to the next.
const NARROW_STRIDE: usize = NARROW_CHANNELS + 4;

/// The largest number of tiles of rows in a band. An H100 has room for 264 large blocks: about 16 tiles of rows by 16
/// tiles of channels. Concurrent blocks read the fewest bytes if these two numbers are equal.
const BAND_TILES: usize = 16;

const EXACT_CHANNELS: usize = 4;
const EXACT_ROWS: usize = 8;

#[repr(C)]
struct LinearArgs {
    input: DevicePointer,
    weight: DevicePointer,
    group_scales: DevicePointer,
    group_minimums: DevicePointer,
    channel_scales: DevicePointer,
    bias: DevicePointer,
    out: DevicePointer,
    partials: DevicePointer,
    rows: u32,
    n: u32,
    k: u32,
    num_splits: u32,
    epilogue: u32,
    scale: f32,
    soft_cap: f32,
    num_parts: u32,
    zero: u32,
    padding: u32,
}

impl Linear {
    /// Compiles the kernels for a layout of weights and an element type of inputs, or finds them.
    pub fn load(
        device: &SharedDevice,
        weights: LinearWeights,
        element: Element,
    ) -> Result<Self, DeviceError> {
        let uses_wgmma = hopper::takes(device.properties(), &weights, element);
        Self::load_kernels(device, weights, element, None, uses_wgmma)
    }

    /// Like `load`, for a gated layer: the activated first half of the outputs is multiplied by the second half, and
    /// outputs are `[row][n / 2]`. Gates are not rounded before they are activated, so the bits differ from those of
    /// `ActivationKernel`.
    pub fn load_gated(
        device: &SharedDevice,
        weights: LinearWeights,
        activation: Activation,
        element: Element,
    ) -> Result<Self, DeviceError> {
        let reach = weights.n as u64 * weights.k as u64 / 2 * element.num_bytes() as u64;
        if !weights.n.is_multiple_of(2 * GATE_RUN) || reach >= u64::from(u32::MAX) {
            return Err(DeviceError(format!(
                "gates and values have {} output channels of {} inputs together; the kernel needs a multiple of {}, \
                 and less than 4 GiB between a gate and its value",
                weights.n,
                weights.k,
                2 * GATE_RUN
            )));
        }
        let uses_wgmma = hopper::takes(device.properties(), &weights, element);
        Self::load_kernels(device, weights, element, Some(activation), uses_wgmma)
    }

    /// Whether `load_gated` supports this number of channels.
    pub fn can_gate(num_gates: usize) -> bool {
        num_gates.is_multiple_of(GATE_RUN)
    }

    fn load_kernels(
        device: &SharedDevice,
        weights: LinearWeights,
        element: Element,
        gate: Option<Activation>,
        uses_wgmma: bool,
    ) -> Result<Self, DeviceError> {
        let loader = KernelLoader::new(device, &weights, element, gate);
        let kernels = match element {
            Element::F32 => Kernels::Exact(loader.exact()?),
            Element::Bf16 => Kernels::Tiled {
                narrow: loader.narrow(uses_wgmma)?,
                many: match uses_wgmma {
                    true => ManyRows::Hopper(Box::new(loader.hopper(&weights, gate.is_some())?)),
                    false => loader.wide(weights.layout)?,
                },
            },
        };
        Ok(Self {
            weights,
            is_gated: gate.is_some(),
            num_splits: num_splits(weights.n, weights.k),
            num_multiprocessors: device.properties().num_multiprocessors,
            kernels,
            finish: loader.finish()?,
        })
    }

    pub fn weights(&self) -> &LinearWeights {
        &self.weights
    }

    /// The scratch memory of a launch for any number of rows up to `max_rows`.
    pub fn scratch_bytes(&self, max_rows: usize) -> usize {
        let Kernels::Tiled {
            many: ManyRows::Wide { small, .. },
            ..
        } = &self.kernels
        else {
            return 0;
        };
        // Only launches with few tiles divide them. Among row counts with the same number of tiles, the largest needs
        // the most memory.
        let last_rows =
            (1..=max_rows.div_ceil(small.tile.rows)).map(|tiles| tiles * small.tile.rows);
        let divided = last_rows
            .map(|rows| rows.min(max_rows))
            .filter(|&rows| rows > NARROW_ROWS[2])
            .take_while(|&rows| self.num_parts(rows) > 1);
        let most_rows = divided.max().unwrap_or(0);
        self.num_splits * most_rows * self.weights.n * size_of::<f32>()
    }

    /// Computes the layer for `num_rows` rows of `input`, `[row][k]`.
    ///
    /// # Safety
    /// Input, output, weights and `scratch`, of `scratch_bytes`, are memory of this device with the sizes of the
    /// shapes; see also `Device::launch`.
    pub unsafe fn launch(
        &self,
        device: &SharedDevice,
        input: DevicePointer,
        num_rows: usize,
        output: LinearOutput,
        scratch: DevicePointer,
    ) -> Result<(), DeviceError> {
        if num_rows == 0 {
            return Ok(());
        }
        let mut args = self.args(input, num_rows, self.num_splits, output, scratch);
        if let Kernels::Tiled {
            many: ManyRows::Hopper(hopper),
            ..
        } = &self.kernels
            && num_rows > NARROW_ROWS[2]
        {
            // SAFETY: the caller's promise.
            return unsafe { hopper.launch(device, args, self.num_multiprocessors) };
        }
        let (kernel, grid, num_parts) = self.plan(num_rows);
        args.num_parts = num_parts as u32;
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(Stream::Compute, kernel, grid, args_bytes(&args))? };
        match num_parts {
            1 => Ok(()),
            // SAFETY: the previous launch has written all partial sums.
            _ => unsafe { self.launch_finish(device, &args) },
        }
    }

    unsafe fn launch_finish(
        &self,
        device: &SharedDevice,
        args: &LinearArgs,
    ) -> Result<(), DeviceError> {
        const NUM_THREADS: usize = 128;
        const CHUNK: usize = super::norm::CHUNK;
        let blocks = self.weights.n.div_ceil(CHUNK * NUM_THREADS);
        let grid = Grid::new([args.rows as usize, blocks, 1], NUM_THREADS as u32, 0);
        // SAFETY: these are the kernel's parameters; the caller promises the rest.
        unsafe { device.launch(Stream::Compute, self.finish, grid, args_bytes(args)) }
    }

    /// The kernel for a number of rows, its launch, and the number of blocks that share the splits of a tile. If there
    /// are several such blocks, they leave partial sums in `scratch`.
    fn plan(&self, num_rows: usize) -> (Kernel, Grid, usize) {
        let (n, splits) = (self.weights.n, self.num_splits);
        let threads = 32 * splits as u32;
        match &self.kernels {
            Kernels::Exact(kernel) => {
                let blocks = [n.div_ceil(EXACT_CHANNELS), num_rows.div_ceil(EXACT_ROWS), 1];
                let words = splits * EXACT_ROWS * EXACT_CHANNELS;
                let grid = Grid::new(blocks, threads, words * size_of::<f32>());
                (*kernel, grid, 1)
            }
            Kernels::Tiled { narrow, many } => {
                if let Some(kind) = NARROW_ROWS.iter().position(|&rows| num_rows <= rows) {
                    let blocks = [n.div_ceil(NARROW_CHANNELS), 1, 1];
                    let words = splits * NARROW_ROWS[kind] * NARROW_STRIDE;
                    let shared_bytes = words * size_of::<f32>();
                    return (narrow[kind], Grid::new(blocks, threads, shared_bytes), 1);
                }
                let ManyRows::Wide { small, large } = many else {
                    unreachable!("Hopper's kernels have plans of their own");
                };
                // A large tile multiplies faster than small tiles even if its block is alone on a multiprocessor. Rows
                // that fit into a small tile would leave half of a large tile empty.
                let num_large = large.tile.count(num_rows, n);
                let fills_device =
                    num_rows > small.tile.rows && 4 * num_large >= 3 * self.num_multiprocessors;
                let wide = if fills_device { large } else { small };
                let num_parts = match fills_device {
                    true => 1,
                    false => self.num_parts(num_rows),
                };
                let row_tiles = num_rows.div_ceil(wide.tile.rows);
                let num_bands = match num_parts {
                    1 => row_tiles.div_ceil(BAND_TILES),
                    _ => 1,
                };
                let blocks = [
                    row_tiles.div_ceil(num_bands),
                    n.div_ceil(wide.tile.channels),
                    num_bands * num_parts,
                ];
                let shared_bytes = wide.tile.shared_bytes(self.weights.layout);
                let grid = Grid::new(blocks, WideTile::NUM_THREADS, shared_bytes);
                (wide.kernel, grid, num_parts)
            }
        }
    }

    /// The number of blocks that share the splits of a small tile. It grows until the multiprocessors are full: some
    /// blocks wait at their barriers while others multiply.
    fn num_parts(&self, num_rows: usize) -> usize {
        let layout = self.weights.layout;
        let num_tiles = small_tile(layout).count(num_rows, self.weights.n);
        let blocks_at_once = if layout == WeightLayout::Floats { 4 } else { 2 };
        let num_places = blocks_at_once * self.num_multiprocessors;
        let mut parts = 1;
        while 2 * parts <= self.num_splits && 2 * parts * num_tiles <= num_places {
            parts *= 2;
        }
        parts
    }

    fn args(
        &self,
        input: DevicePointer,
        num_rows: usize,
        num_splits: usize,
        output: LinearOutput,
        partials: DevicePointer,
    ) -> LinearArgs {
        let weights = &self.weights;
        assert!(
            !self.is_gated || matches!(output, LinearOutput::Store(_)),
            "a gated layer stores its outputs"
        );
        let (out, epilogue, scale, soft_cap) = match output {
            LinearOutput::Store(out) => (out, 0, 1.0, None),
            LinearOutput::StoreFloats {
                out,
                scale,
                soft_cap,
            } => (out, 1, scale, soft_cap),
            LinearOutput::Add { out, scale } => (out, 2, scale, None),
        };
        LinearArgs {
            input,
            weight: weights.weight,
            group_scales: weights.group_scales,
            group_minimums: weights.group_minimums,
            channel_scales: weights.channel_scales,
            bias: weights.bias,
            out,
            partials,
            rows: num_rows as u32,
            n: weights.n as u32,
            k: weights.k as u32,
            num_splits: num_splits as u32,
            epilogue,
            scale,
            soft_cap: soft_cap.unwrap_or(0.0),
            num_parts: 1,
            zero: 0,
            padding: 0,
        }
    }
}

/// Loads the kernels of a layer.
struct KernelLoader<'a> {
    device: &'a SharedDevice,
    /// The macros that all kernels of the layer have.
    shape: Vec<(&'static str, String)>,
}

impl<'a> KernelLoader<'a> {
    fn new(
        device: &'a SharedDevice,
        weights: &LinearWeights,
        element: Element,
        gate: Option<Activation>,
    ) -> Self {
        let mut shape = shape_macros(weights, element);
        shape.push(("GATED", u32::from(gate.is_some()).to_string()));
        shape.extend(gate.map(|gate| ("ACTIVATION", activation_macro(gate))));
        Self { device, shape }
    }

    fn load(
        &self,
        name: &'static str,
        text: &'static str,
        kernel: &str,
        defines: &[(&'static str, String)],
    ) -> Result<Kernel, DeviceError> {
        let defines = [&self.shape, defines].concat();
        load_kernel(self.device, name, text, kernel, defines)
    }

    fn exact(&self) -> Result<Kernel, DeviceError> {
        let text = include_str!("linear_exact.cu");
        self.load("linear_exact.cu", text, "linear_exact", &[])
    }

    fn finish(&self) -> Result<Kernel, DeviceError> {
        let text = include_str!("linear_finish.cu");
        self.load("linear_finish.cu", text, "linear_finish", &[])
    }

    /// With `lanes_exchange`, each `mma` sums the same inputs as a `wgmma`, so that results have the same bits.
    fn narrow(&self, lanes_exchange: bool) -> Result<[Kernel; NARROW_ROWS.len()], DeviceError> {
        let load = |num_rows: usize| {
            let mut defines = vec![("COLUMN_TILES", (num_rows / 8).to_string())];
            if lanes_exchange {
                defines.push(("LANES_EXCHANGE", "1".into()));
            }
            let text = include_str!("linear_narrow.cu");
            self.load("linear_narrow.cu", text, "linear_narrow", &defines)
        };
        let [few, more, most] = NARROW_ROWS;
        Ok([load(few)?, load(more)?, load(most)?])
    }

    fn wide(&self, layout: WeightLayout) -> Result<ManyRows, DeviceError> {
        let load = |tile: WideTile| {
            let defines = [
                ("CHANNEL_TILE", tile.channels.to_string()),
                ("ROW_TILE", tile.rows.to_string()),
                ("NUM_STAGES", tile.num_stages.to_string()),
            ];
            let text = include_str!("linear_wide.cu");
            let kernel = self.load("linear_wide.cu", text, "linear_wide", &defines)?;
            Ok::<_, DeviceError>(WideKernel { kernel, tile })
        };
        let max_shared_bytes = self.device.properties().max_shared_bytes;
        Ok(ManyRows::Wide {
            small: load(small_tile(layout))?,
            large: load(large_tile(layout, max_shared_bytes))?,
        })
    }

    fn hopper(
        &self,
        weights: &LinearWeights,
        is_gated: bool,
    ) -> Result<HopperKernels, DeviceError> {
        HopperKernels::load(self.device, weights, is_gated, |defines| {
            let text = include_str!("linear_hopper.cu");
            self.load("linear_hopper.cu", text, "linear_hopper", defines)
        })
    }
}

impl WideTile {
    const NUM_THREADS: u32 = 128;
    /// The number of bytes that a channel's weights take in a stage, and that a row's inputs take in a block of 32.
    const LOADED_BYTES: usize = 64;

    fn count(self, num_rows: usize, n: usize) -> usize {
        num_rows.div_ceil(self.rows) * n.div_ceil(self.channels)
    }

    /// Dynamic shared memory: the stages, and the sums of earlier splits. At the end, results replace both.
    fn shared_bytes(self, layout: WeightLayout) -> usize {
        let blocks = match layout {
            WeightLayout::Floats => 1,
            WeightLayout::Int8Channels | WeightLayout::Int8Groups { .. } => 2,
            WeightLayout::Int4Groups { .. } => 4,
        };
        let stage_bytes = (self.channels + blocks * self.rows) * Self::LOADED_BYTES;
        self.num_stages * stage_bytes + self.channels * self.rows * size_of::<f32>()
    }
}

/// The tile for launches with few tiles. Memory is then the limit, as for fewer rows. A multiprocessor needs 20 KB of
/// weights under way (`linear_narrow.cu`), and warps that multiply while others wait. Four blocks of floats share a
/// multiprocessor: each block multiplies one stage, and each of its other stages has 4 KiB under way. Stages of
/// integers have more inputs in proportion, so only two blocks share a multiprocessor.
fn small_tile(layout: WeightLayout) -> WideTile {
    WideTile {
        channels: 64,
        rows: 64,
        num_stages: match layout {
            WeightLayout::Floats => 5,
            WeightLayout::Int8Channels | WeightLayout::Int8Groups { .. } => 6,
            WeightLayout::Int4Groups { .. } => 4,
        },
    }
}

/// Integers have tiles of half the size: stages of integers have more inputs, and scales of groups need a second set of
/// sums in registers. GPUs for workstations give a block 99 KiB of shared memory. That is too little for the large
/// tiles of floats and of 4-bit integers, so these layers have only small tiles there.
fn large_tile(layout: WeightLayout, max_shared_bytes: usize) -> WideTile {
    let tile = WideTile {
        channels: 128,
        rows: match layout {
            WeightLayout::Floats => 128,
            _ => 64,
        },
        num_stages: 3,
    };
    match tile.shared_bytes(layout) <= max_shared_bytes {
        true => tile,
        false => small_tile(layout),
    }
}

/// The number of runs of inputs that are summed separately. It determines the bits of results, and so is the same on
/// all devices. With few rows, it gives each multiprocessor of an H100 about 12 warps. It is at most 16, the limit of a
/// block. A run has at least two units, because shorter runs would slow down prompts more than they speed up decoding.
fn num_splits(n: usize, k: usize) -> usize {
    const WANTED_WARPS: usize = 12 * 132;
    const MOST: usize = 16;
    let (num_units, num_tiles) = (k.div_ceil(UNIT), n.div_ceil(NARROW_CHANNELS));
    let most = (num_units / 2).min(MOST);
    let mut splits = 1;
    while 2 * splits <= most && (splits < 4 || splits * num_tiles < WANTED_WARPS) {
        splits *= 2;
    }
    splits
}

fn shape_macros(weights: &LinearWeights, element: Element) -> Vec<(&'static str, String)> {
    let layout = match weights.layout {
        WeightLayout::Floats => "FLOATS",
        WeightLayout::Int8Channels => "INT8_CHANNELS",
        WeightLayout::Int8Groups { .. } => "INT8_GROUPS",
        WeightLayout::Int4Groups { .. } => "INT4_GROUPS",
    };
    let has_whole_chunks = weights.k.is_multiple_of(super::norm::CHUNK);
    let has_whole_units = weights.k.is_multiple_of(UNIT);
    vec![
        ("ELEMENT", element_macro(element)),
        ("WEIGHT", layout.into()),
        ("WHOLE_CHUNKS", u32::from(has_whole_chunks).to_string()),
        ("WHOLE_UNITS", u32::from(has_whole_units).to_string()),
        (
            "GROUP_LEN",
            weights.layout.group_len().unwrap_or(UNIT).to_string(),
        ),
        (
            "HAS_MINIMUM",
            u32::from(weights.layout.has_minimum()).to_string(),
        ),
    ]
}
