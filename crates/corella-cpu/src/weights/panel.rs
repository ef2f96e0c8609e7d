//! Weight matrices packed into panels for the GEMM kernels.
//!
//! A panel holds the weights of 32 output channels, k-major. A lane is one of these output channels.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use corella_model::{DType, GroupedRow};
use half::{bf16, f16};

use crate::kernels::grouped::GroupedShape;
use crate::kernels::{
    Form, Kernels, PANEL_LANES, TILE_K, int8_position, panel_position, tile_position,
};
use crate::system::{Region, ThreadPool};

use super::grouped_matrix::{self, GroupedPacking};
use super::image_reader::ImageReader;
use super::lane::{Lane, decode, decode_lane, element, round_to_bytes};

/// A weight matrix `[out, in]` as panels of 32 output channels, each contiguous and k-major.
pub struct PackedMatrix {
    pub dtype: DType,
    pub form: Form,
    /// The number of input channels (GEMM's k dimension).
    pub k: usize,
    pub num_panels: usize,
    panels: Arc<Region>,
    /// One value per output channel, in the order of the panels' lanes.
    pub bias: Option<Vec<f32>>,
    /// One f32 per output channel (`Form::Int8` only), the factor of the channel's integers, or of
    /// the scales of their groups.
    scales: Arc<Region>,
    /// The shape of the groups, if weights are quantised in groups (`Form::Int8` only).
    pub groups: Option<GroupedShape>,
    /// See [`Packing::hadamard`].
    pub hadamard: bool,
    pub origin: Origin,
}

/// The source of a matrix's panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The checkpoint's elements, merely reordered. Reading an image of them would be no faster.
    Copied,
    /// The checkpoint's elements, quantised or converted.
    Computed,
    /// An image of panels from an earlier start.
    Image,
}

/// The packing of a matrix `[out, in]` into panels; `FormatPlan` decides it.
#[derive(Clone, Copy)]
pub struct Packing {
    /// The number of input channels.
    pub k: usize,
    pub dtype: DType,
    pub form: Form,
    /// The quantisation of weights in groups (`Form::Int8` only).
    pub groups: Option<GroupedPacking>,
    /// Whether each row of the matrix is multiplied by a Hadamard matrix before it is quantised.
    /// The activations must then be multiplied by it too.
    pub hadamard: bool,
}

impl Packing {
    /// The size of a matrix with `num_lanes` output channels, in bytes.
    pub fn num_bytes(&self, num_lanes: usize) -> usize {
        let groups = self.groups.map(|groups| groups.shape);
        num_lanes.div_ceil(PANEL_LANES) * panel_bytes(self.k, self.dtype, self.form, groups)
    }

    /// Whether the panels hold the checkpoint's own elements, unconverted.
    pub fn copies(&self, lanes: &[Option<Lane<'_>>]) -> bool {
        let mut weights = lanes.iter().flatten().map(|lane| lane.weight);
        self.form != Form::Int8
            && weights.all(|weight| weight.dtype == self.dtype && !weight.is_quantised())
    }
}

impl PackedMatrix {
    /// Packs a matrix: `lanes[i]` is the source of output channel i, and channels without a source give 0. In
    /// `Form::Int8`, weights are quantised per output channel with the scale `max |w| / 127`, unless they are stored as
    /// 8-bit integers with per-channel scales, or packed in groups.
    pub fn pack(
        lanes: &[Option<Lane<'_>>],
        packing: Packing,
        kernels: &Kernels,
        pool: &mut ThreadPool,
    ) -> io::Result<Self> {
        let mut packed = Self::unfilled(lanes, packing)?;
        if !packing.copies(lanes) {
            packed.origin = Origin::Computed;
        }
        pool.run(&|worker| {
            for panel in worker.share(packed.num_panels) {
                // SAFETY: each worker fills its own panels.
                let (bytes, scales) = unsafe { packed.panel_mut(panel) };
                let lanes = panel_lanes(lanes, panel);
                fill_panel(lanes, packing, kernels, bytes, scales);
            }
        })
        .map_err(io::Error::other)?;
        Ok(packed)
    }

    /// Reads the result of `pack` from an image. Returns `None` if the image does not hold this matrix: one panel is
    /// packed and compared, which detects other weights, another layout and another rounding.
    pub fn read(
        lanes: &[Option<Lane<'_>>],
        packing: Packing,
        image: &mut ImageReader,
        kernels: &Kernels,
        pool: &mut ThreadPool,
    ) -> io::Result<Option<Self>> {
        let mut packed = Self::unfilled(lanes, packing)?;
        packed.origin = Origin::Image;
        let image = image.take(packed.num_image_bytes());
        let scales_len = packed.scales_len();
        let panel_scales = packed.num_scales() * size_of::<f32>();
        let parts = [
            (&packed.scales, 0, panel_scales),
            (&packed.panels, scales_len, packed.panel_bytes()),
        ];
        let has_failed = AtomicBool::new(false);
        pool.run(&|worker| {
            let panels = worker.share(packed.num_panels);
            for (region, at, stride) in parts {
                let (start, len) = (panels.start * stride, panels.len() * stride);
                // SAFETY: the range is inside the region, and belongs to this worker's panels.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(region.as_ptr().add(start), len) };
                if image.read(at + start, bytes).is_err() {
                    has_failed.store(true, Ordering::Relaxed);
                }
            }
        })
        .map_err(io::Error::other)?;
        let is_same = !has_failed.into_inner() && packed.has_panel(lanes, packing, kernels)?;
        Ok(is_same.then_some(packed))
    }

    /// Packs the panel in the middle and compares it with the one from the image.
    fn has_panel(
        &self,
        lanes: &[Option<Lane<'_>>],
        packing: Packing,
        kernels: &Kernels,
    ) -> io::Result<bool> {
        if self.num_panels == 0 {
            return Ok(true);
        }
        let panel = self.num_panels / 2;
        let lanes = panel_lanes(lanes, panel);
        let expected = Self::unfilled(lanes, packing)?;
        // SAFETY: the workers are done, and the new panel has no other user.
        unsafe {
            let (bytes, scales) = self.panel_mut(panel);
            let (expected, expected_scales) = expected.panel_mut(0);
            fill_panel(lanes, packing, kernels, expected, expected_scales);
            let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
            Ok(bytes == expected && scales.iter().zip(&*expected_scales).all(is_same))
        }
    }

    /// Allocates a matrix whose panels and scales are all zeros.
    fn unfilled(lanes: &[Option<Lane<'_>>], packing: Packing) -> io::Result<Self> {
        let num_panels = lanes.len().div_ceil(PANEL_LANES);
        let has_bias = lanes.iter().flatten().any(|lane| lane.bias.is_some());
        let bias = has_bias.then(|| {
            let mut bias = vec![0.0; num_panels * PANEL_LANES];
            for (value, lane) in bias.iter_mut().zip(lanes) {
                if let Some(Lane {
                    bias: Some(tensor),
                    row,
                    ..
                }) = lane
                {
                    *value = element(tensor, *row);
                }
            }
            bias
        });
        let mut packed = Self {
            dtype: packing.dtype,
            form: packing.form,
            k: packing.k,
            num_panels,
            panels: Arc::new(Region::new(0)?),
            bias,
            scales: Arc::new(Region::new(0)?),
            groups: packing.groups.map(|groups| groups.shape),
            hadamard: packing.hadamard,
            origin: Origin::Copied,
        };
        packed.panels = Arc::new(Region::new(packed.num_bytes())?);
        packed.scales = Arc::new(Region::new(packed.scales_len())?);
        Ok(packed)
    }

    /// The bytes of a panel and the scales of its lanes; empty in forms without scales.
    ///
    /// # Safety
    /// No other thread uses the panel while the slices are in use.
    #[expect(clippy::mut_from_ref, reason = "workers fill different panels")]
    unsafe fn panel_mut(&self, panel: usize) -> (&mut [u8], &mut [f32]) {
        assert!(panel < self.num_panels);
        let (panel_bytes, num_scales) = (self.panel_bytes(), self.num_scales());
        // SAFETY: panels lie one after the other, and so do their scales; the caller promises exclusive access.
        unsafe {
            let bytes = self.panels.as_ptr().add(panel * panel_bytes);
            let scales = self.scales.as_ptr().cast::<f32>().add(panel * num_scales);
            (
                std::slice::from_raw_parts_mut(bytes, panel_bytes),
                std::slice::from_raw_parts_mut(scales, num_scales),
            )
        }
    }

    /// The number of scales per panel.
    fn num_scales(&self) -> usize {
        match self.form {
            Form::Columns | Form::MatrixTiles => 0,
            Form::Int8 => PANEL_LANES,
        }
    }

    /// The size of all panels' scales, in bytes.
    fn scales_len(&self) -> usize {
        self.num_panels * self.num_scales() * size_of::<f32>()
    }

    /// The scales and the panels with their sizes in bytes, in the order of an image.
    pub fn image_parts(&self) -> [(Arc<Region>, usize); 2] {
        [
            (Arc::clone(&self.scales), self.scales_len()),
            (Arc::clone(&self.panels), self.num_bytes()),
        ]
    }

    fn num_image_bytes(&self) -> usize {
        self.scales_len() + self.num_bytes()
    }

    pub fn num_bytes(&self) -> usize {
        self.num_panels * self.panel_bytes()
    }

    /// Decodes the weights of one output channel: a row of the matrix, times the Hadamard matrix if `hadamard` is set.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.num_panels * PANEL_LANES && out.len() == self.k);
        let panel = self.panel(row / PANEL_LANES);
        if self.form == Form::Int8 {
            // SAFETY: each lane has a scale.
            let scale = unsafe { *self.scales_ptr(row / PANEL_LANES).add(row % PANEL_LANES) };
            if let Some(shape) = self.groups {
                // SAFETY: a panel has this many bytes.
                let panel = unsafe { std::slice::from_raw_parts(panel, shape.panel_bytes()) };
                return grouped_matrix::read_lane(panel, shape, row % PANEL_LANES, scale, out);
            }
            for (i, value) in out.iter_mut().enumerate() {
                let at = int8_position(i, row % PANEL_LANES);
                // SAFETY: the element is inside the panel.
                *value = f32::from(unsafe { *panel.cast::<i8>().add(at) }) * scale;
            }
            return;
        }
        for (i, value) in out.iter_mut().enumerate() {
            let at = position(self.dtype, self.form, i, row % PANEL_LANES);
            // SAFETY: the element is inside the panel.
            unsafe {
                let element = panel.add(at * self.dtype.size());
                *value = match self.dtype {
                    DType::F32 => *element.cast::<f32>(),
                    DType::Bf16 => bf16::from_bits(*element.cast()).to_f32(),
                    DType::F16 => f16::from_bits(*element.cast()).to_f32(),
                };
            }
        }
    }

    pub fn is_grouped(&self) -> bool {
        self.groups.is_some()
    }

    pub fn panel_bytes(&self) -> usize {
        panel_bytes(self.k, self.dtype, self.form, self.groups)
    }

    pub fn scales_ptr(&self, panel: usize) -> *const f32 {
        assert!(panel < self.num_panels && self.form == Form::Int8);
        // SAFETY: the assertion above keeps the access in bounds.
        unsafe { self.scales.as_ptr().cast::<f32>().add(panel * PANEL_LANES) }
    }

    pub fn panel(&self, panel: usize) -> *const u8 {
        assert!(panel < self.num_panels);
        // SAFETY: the assertion above keeps the access in bounds.
        unsafe { self.panels.as_ptr().add(panel * self.panel_bytes()) }
    }
}

fn panel_lanes<'a, 'b>(lanes: &'b [Option<Lane<'a>>], panel: usize) -> &'b [Option<Lane<'a>>] {
    let lanes = &lanes[panel * PANEL_LANES..];
    &lanes[..lanes.len().min(PANEL_LANES)]
}

/// Fills a panel that is all zeros and aligned to a cache line.
fn fill_panel(
    lanes: &[Option<Lane<'_>>],
    packing: Packing,
    kernels: &Kernels,
    bytes: &mut [u8],
    scales: &mut [f32],
) {
    match (packing.form, packing.groups) {
        (Form::Columns | Form::MatrixTiles, _) => pack_panel(lanes, packing, kernels, bytes),
        (Form::Int8, Some(groups)) => {
            groups.pack_panel(lanes, packing.k, packing.hadamard, kernels, scales, bytes)
        }
        (Form::Int8, None) => quantise_panel(lanes, packing, kernels, scales, bytes),
    }
}

fn panel_bytes(k: usize, dtype: DType, form: Form, groups: Option<GroupedShape>) -> usize {
    if let Some(shape) = groups {
        return shape.panel_bytes();
    }
    let element = match form {
        Form::Columns | Form::MatrixTiles => dtype.size(),
        Form::Int8 => 1,
    };
    k.next_multiple_of(form.block_k()) * PANEL_LANES * element
}

/// The index of the element for input channel `k` of a lane in its panel.
fn position(dtype: DType, form: Form, k: usize, lane: usize) -> usize {
    match form {
        Form::Columns => k * PANEL_LANES + panel_position(dtype, lane),
        Form::MatrixTiles => tile_position(k, lane),
        Form::Int8 => int8_position(k, lane),
    }
}

fn pack_panel(lanes: &[Option<Lane<'_>>], packing: Packing, kernels: &Kernels, out: &mut [u8]) {
    let Packing { k, dtype, form, .. } = packing;
    // Source and panel both stay in the first-level cache.
    const BLOCK: usize = 64;
    let size = dtype.size();
    // Holds rows of tensors in blocks, packed integers or transposed order. Other rows are read in place.
    let mut scratch = [const { Vec::new() }; PANEL_LANES];
    let lanes = lanes.iter().zip(&mut scratch).map(|(lane, scratch)| {
        let source = (*lane)?;
        let row = source.weight.row(source.row, scratch);
        assert_eq!(row.len(), k * source.weight.dtype.size());
        Some((source.weight.dtype, row))
    });
    let lanes: Vec<_> = lanes.collect();
    let stored = |source: &Option<(DType, &[u8])>| match source {
        Some((from, row)) if *from == dtype => Some(row.as_ptr()),
        _ => None,
    };
    if let (Form::MatrixTiles, Some(tiles)) = (form, &kernels.tile_gemm)
        && k.is_multiple_of(TILE_K)
        && let Some(rows) = lanes.iter().map(stored).collect::<Option<Vec<_>>>()
        && let ([low, high], []) = rows.as_chunks::<16>()
    {
        assert_eq!(out.len(), PANEL_LANES * k * size);
        for (half, rows) in [low, high].into_iter().enumerate() {
            // SAFETY: each row has k elements, and the panel has room for all of them.
            unsafe { (tiles.pack)(*rows, k / TILE_K, out.as_mut_ptr().add(half * 1024)) };
        }
        return;
    }
    for start in (0..k).step_by(BLOCK) {
        let block = start..k.min(start + BLOCK);
        for (lane, source) in lanes.iter().enumerate() {
            let Some((from, row)) = *source else { continue };
            let row = &row[block.start * from.size()..block.end * from.size()];
            let block = block.clone();
            // This runs for every weight. Without conversion, lengths are constants.
            if from != dtype {
                for (k, element) in block.zip(row.chunks_exact(from.size())) {
                    let at = position(dtype, form, k, lane) * size;
                    encode(decode(element, from), dtype, &mut out[at..at + size]);
                }
            } else if form == Form::MatrixTiles {
                copy_elements::<4>(row, block.step_by(2), out, |k| 2 * tile_position(k, lane));
            } else if size == 2 {
                copy_elements::<2>(row, block, out, |k| 2 * position(dtype, form, k, lane));
            } else {
                copy_elements::<4>(row, block, out, |k| 4 * position(dtype, form, k, lane));
            }
        }
    }
}

fn quantise_panel(
    lanes: &[Option<Lane<'_>>],
    packing: Packing,
    kernels: &Kernels,
    scales: &mut [f32],
    out: &mut [u8],
) {
    let k = packing.k;
    let (mut row, mut quantised) = (vec![0.0; k], vec![0_i8; k]);
    // Holds rows of tensors in blocks, packed integers or transposed order. Other rows are read in place.
    let mut scratch = Vec::new();
    let mut groups = GroupedRow::default();
    for (lane, source) in lanes.iter().enumerate() {
        let Some(source) = source else { continue };
        if source.weight.has_int8_rows() && !packing.hadamard {
            source.weight.read_groups(source.row, &mut groups);
            scales[lane] = groups.scales[0];
            write_integers(&groups.quants, lane, out);
            continue;
        }
        decode_lane(source, packing.hadamard, kernels, &mut scratch, &mut row);
        // SAFETY: row and output have k elements each.
        scales[lane] = unsafe { round_to_bytes(&row, kernels, quantised.as_mut_ptr()) };
        write_integers(&quantised, lane, out);
    }
}

/// Writes one lane's integers to their places in a panel.
fn write_integers(row: &[i8], lane: usize, out: &mut [u8]) {
    let (quads, rest) = row.as_chunks::<4>();
    for (quad, values) in quads.iter().enumerate() {
        let at = int8_position(quad * 4, lane);
        out[at..at + 4].copy_from_slice(&values.map(|value| value as u8));
    }
    for (i, value) in rest.iter().enumerate() {
        out[int8_position(quads.len() * 4 + i, lane)] = *value as u8;
    }
}

/// For each k, copies the next `N` bytes of a row to the place that `at` gives. At the end of the row there may be
/// fewer bytes.
fn copy_elements<const N: usize>(
    row: &[u8],
    ks: impl Iterator<Item = usize>,
    out: &mut [u8],
    at: impl Fn(usize) -> usize,
) {
    for (k, bytes) in ks.zip(row.chunks(N)) {
        let at = at(k);
        match bytes.try_into() {
            Ok::<[u8; N], _>(bytes) => out[at..at + N].copy_from_slice(&bytes),
            Err(_) => out[at..at + bytes.len()].copy_from_slice(bytes),
        }
    }
}

/// Stores a value as `dtype`, rounded to nearest even.
fn encode(value: f32, dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(&value.to_ne_bytes()),
        DType::Bf16 => out.copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
        DType::F16 => out.copy_from_slice(&f16::from_f32(value).to_ne_bytes()),
    }
}
