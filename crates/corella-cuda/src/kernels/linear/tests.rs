//! Compares every kernel with sums in f64, and with itself for other numbers of rows.

use corella_model::GroupedRow;

use super::*;
use crate::device::DeviceBuffer;
use crate::kernels::packed_weight::PackedWeight;
use crate::kernels::test_memory::{
    Random, device, download, download_as, is_near, rounded, upload, upload_as,
};

mod hopper;

const INT8: WeightLayout = WeightLayout::Int8Channels;

fn int8_groups(group_len: usize) -> WeightLayout {
    WeightLayout::Int8Groups { group_len }
}

fn int4(group_len: usize, has_minimum: bool) -> WeightLayout {
    WeightLayout::Int4Groups {
        group_len,
        has_minimum,
    }
}

/// A layer on the device, and its weights on the host.
struct Layer {
    device: SharedDevice,
    linear: Linear,
    element: Element,
    values: Vec<f64>,
    bias: Option<Vec<f32>>,
    _buffers: Vec<DeviceBuffer>,
}

impl Layer {
    fn new(element: Element, layout: WeightLayout, n: usize, k: usize, has_bias: bool) -> Self {
        let device = device();
        let mut random = Random::new((n * 1000 + k) as u64);
        let bias = has_bias.then(|| random.numbers(n));
        let (mut values, mut buffers) = (Vec::new(), Vec::new());
        let mut packed = None;
        if layout == WeightLayout::Floats {
            let floats = rounded(element, random.numbers(n * k));
            buffers.push(upload_as(&device, element, &floats));
            values.extend(floats.into_iter().map(f64::from));
        } else {
            let mut packer = PackedWeight::new(layout, k);
            for _ in 0..n {
                let row = random_row(&mut random, layout, k);
                let group_len = layout.group_len().unwrap_or(k);
                values.extend(row.quants.iter().enumerate().map(|(i, q)| {
                    let group = i / group_len;
                    let minimum = row.minimums.get(group).copied().unwrap_or(0.0);
                    f64::from(*q) * f64::from(row.scales[group]) + f64::from(minimum)
                }));
                packer.push(&row, group_len);
            }
            buffers.push(upload(&device, &packer.integers));
            packed = Some(packer);
        }
        let packed = packed.unwrap_or_else(|| PackedWeight::new(INT8, 0));
        buffers.push(upload(&device, &packed.scales));
        buffers.push(upload(&device, &packed.minimums));
        buffers.push(upload(&device, &packed.channel_scales));
        buffers.push(upload(&device, bias.as_deref().unwrap_or(&[])));
        let weights = LinearWeights {
            n,
            k,
            layout,
            weight: buffers[0].pointer(),
            group_scales: buffers[1].pointer(),
            group_minimums: buffers[2].pointer(),
            channel_scales: buffers[3].pointer(),
            bias: buffers[4].pointer(),
        };
        Self {
            linear: Linear::load(&device, weights, element).unwrap(),
            device,
            element,
            values,
            bias,
            _buffers: buffers,
        }
    }

    fn n(&self) -> usize {
        self.linear.weights.n
    }

    fn k(&self) -> usize {
        self.linear.weights.k
    }

    fn input(&self, num_rows: usize) -> Vec<f32> {
        rounded(self.element, Random::new(77).numbers(num_rows * self.k()))
    }

    /// The layer's sums for some rows of the input, in f32.
    fn sums(&self, input: &[f32]) -> Vec<f32> {
        let out = upload(
            &self.device,
            &vec![f32::NAN; input.len() / self.k() * self.n()],
        );
        let output = LinearOutput::StoreFloats {
            out: out.pointer(),
            scale: 1.0,
            soft_cap: None,
        };
        self.launch(input, output);
        download(&self.device, &out, input.len() / self.k() * self.n())
    }

    fn launch(&self, input: &[f32], output: LinearOutput) {
        let num_rows = input.len() / self.k();
        let rows = upload_as(&self.device, self.element, input);
        let scratch_bytes = self.linear.scratch_bytes(num_rows);
        let scratch = DeviceBuffer::new(&self.device, scratch_bytes).unwrap();
        let (input, scratch) = (rows.pointer(), scratch.pointer());
        // SAFETY: the buffers have the layer's shapes.
        let launched = unsafe {
            let linear = &self.linear;
            linear.launch(&self.device, input, num_rows, output, scratch)
        };
        launched.unwrap();
        let end = self.device.record(Stream::Compute).unwrap();
        self.device.synchronize(end).unwrap();
    }

    /// An output, and the magnitude of its terms.
    fn exact(&self, row: &[f32], channel: usize) -> (f64, f64) {
        let weights = &self.values[channel * self.k()..][..self.k()];
        let terms = row.iter().zip(weights).map(|(x, w)| f64::from(*x) * w);
        let bias = self
            .bias
            .as_ref()
            .map_or(0.0, |bias| f64::from(bias[channel]));
        let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, m), term| (s + term, m + term.abs()));
        (sum + bias, magnitude + bias.abs())
    }

    /// Compares sums with exact ones. All terms are exact in f32 or rounded once, so only the sums differ.
    fn assert_near(&self, input: &[f32], sums: &[f32]) {
        for (row, (x, sums)) in input
            .chunks(self.k())
            .zip(sums.chunks(self.n()))
            .enumerate()
        {
            for (channel, actual) in sums.iter().enumerate() {
                let (exact, magnitude) = self.exact(x, channel);
                let error = (f64::from(*actual) - exact).abs();
                assert!(
                    error <= 2e-6 * magnitude + 1e-6,
                    "row {row}, channel {channel}: {actual} instead of {exact}"
                );
            }
        }
    }
}

/// Scales are exact in f16, as in checkpoints.
fn random_row(random: &mut Random, layout: WeightLayout, k: usize) -> GroupedRow {
    let (lowest, num_values) = match layout {
        WeightLayout::Int4Groups {
            has_minimum: true, ..
        } => (0, 16),
        WeightLayout::Int4Groups { .. } => (-8, 16),
        _ => (-128, 256),
    };
    let num_groups = k.div_ceil(layout.group_len().unwrap_or(k));
    let number = |random: &mut Random| (1 + random.below(1000)) as f32 / 4096.0;
    GroupedRow {
        quants: (0..k)
            .map(|_| (random.below(num_values) as i32 + lowest) as i8)
            .collect(),
        scales: (0..num_groups).map(|_| number(random)).collect(),
        minimums: match layout.has_minimum() {
            true => (0..num_groups).map(|_| -8.0 * number(random)).collect(),
            false => Vec::new(),
        },
    }
}

/// The numbers of rows at which another kernel, or another part of a tile, takes over.
const ROW_COUNTS: [usize; 8] = [1, 2, 7, 8, 9, 17, 64, 130];

fn check(element: Element, layout: WeightLayout, n: usize, k: usize) {
    let mut layer = Layer::new(element, layout, n, k, true);
    let input = layer.input(130);
    let whole = layer.sums(&input);
    layer.assert_near(&input, &whole);
    // All kinds of tiles, and splits shared by several blocks.
    for num_multiprocessors in [1, 4, 64] {
        layer.linear.num_multiprocessors = num_multiprocessors;
        for count in ROW_COUNTS {
            let is_divided = element == Element::Bf16 && count > NARROW_ROWS[2];
            if num_multiprocessors != 1 && !is_divided {
                continue;
            }
            // The last rows of the input, so that their places differ from their places among all rows.
            let first = 130 - count;
            let sums = layer.sums(&input[first * k..]);
            assert!(
                sums.iter()
                    .zip(&whole[first * n..])
                    .all(|(a, b)| a.to_bits() == b.to_bits()),
                "{layout:?}, {count} of 130 rows, {num_multiprocessors} multiprocessors"
            );
        }
    }
}

#[test]
fn bf16_rows_have_the_same_bits_among_others() {
    check(Element::Bf16, WeightLayout::Floats, 72, 1096);
}

#[test]
fn bf16_rows_of_odd_lengths_have_the_same_bits_among_others() {
    // The size is no multiple of a chunk or a tile.
    check(Element::Bf16, WeightLayout::Floats, 37, 60);
    check(Element::Bf16, WeightLayout::Floats, 5, 515);
}

#[test]
fn rows_of_several_bands_of_tiles_are_all_computed() {
    // 17 tiles of 128 rows are bands of 9 and 8 tiles, and 33 tiles of 64 rows are 3 bands of 11.
    for (n, num_rows) in [(136, 2100), (40, 2100)] {
        let mut layer = Layer::new(Element::Bf16, WeightLayout::Floats, n, 40, false);
        layer.linear.num_multiprocessors = 18;
        let input = layer.input(num_rows);
        layer.assert_near(&input, &layer.sums(&input));
    }
}

#[test]
fn bytes_have_the_same_bits_among_others() {
    check(Element::Bf16, INT8, 72, 552);
    check(Element::Bf16, int8_groups(32), 40, 160);
}

#[test]
fn bytes_in_long_groups_have_the_same_bits_among_others() {
    check(Element::Bf16, int8_groups(128), 24, 1024);
}

#[test]
fn nibbles_have_the_same_bits_among_others() {
    check(Element::Bf16, int4(128, false), 72, 640);
    check(Element::Bf16, int4(64, false), 20, 192);
}

#[test]
fn nibbles_with_minimums_have_the_same_bits_among_others() {
    check(Element::Bf16, int4(32, true), 40, 544);
    check(Element::Bf16, int4(128, true), 16, 256);
}

#[test]
fn f32_rows_have_the_same_bits_among_others() {
    check(Element::F32, WeightLayout::Floats, 37, 600);
    check(Element::F32, WeightLayout::Floats, 5, 61);
    check(Element::F32, INT8, 9, 160);
    check(Element::F32, int8_groups(64), 9, 512);
    check(Element::F32, int4(32, false), 9, 160);
    check(Element::F32, int4(128, true), 9, 300);
}

#[test]
fn outputs_are_stored_shaped_or_added() {
    const SCALE: f32 = 0.5;
    const CAP: f32 = 2.0;
    for (element, num_rows, n) in [
        (Element::Bf16, 3, 24),
        (Element::Bf16, 70, 24),
        (Element::Bf16, 70, 21),
        (Element::F32, 9, 21),
    ] {
        let layer = Layer::new(element, WeightLayout::Floats, n, 64, false);
        let input = layer.input(num_rows);
        let (device, len) = (&layer.device, num_rows * n);
        let before = Random::new(8).numbers(len);
        let stored = upload_as(device, element, &vec![0.0; len]);
        let shaped = upload(device, &vec![0.0f32; len]);
        let added = upload(device, &before);
        layer.launch(&input, LinearOutput::Store(stored.pointer()));
        let output = LinearOutput::StoreFloats {
            out: shaped.pointer(),
            scale: SCALE,
            soft_cap: Some(CAP),
        };
        layer.launch(&input, output);
        let output = LinearOutput::Add {
            out: added.pointer(),
            scale: SCALE,
        };
        layer.launch(&input, output);
        let stored = download_as(device, element, &stored, len);
        let shaped: Vec<f32> = download(device, &shaped, len);
        let added: Vec<f32> = download(device, &added, len);
        for i in 0..len {
            let (exact, _) = layer.exact(&input[i / n * 64..][..64], i % n);
            let (scale, cap) = (f64::from(SCALE), f64::from(CAP));
            let all = [
                (element, stored[i], exact),
                (Element::F32, shaped[i], cap * (exact * scale / cap).tanh()),
                (Element::F32, added[i], f64::from(before[i]) + exact * scale),
            ];
            for (element, actual, exact) in all {
                // Sums of terms that cancel each other.
                let slack = 2e-5;
                let close =
                    is_near(element, actual, exact) || (f64::from(actual) - exact).abs() < slack;
                assert!(close, "{actual} instead of {exact}");
            }
        }
    }
}

#[test]
fn inputs_are_divided_alike_on_all_devices() {
    // Llama 3 8B: o, gate and up, down, head; Qwen3 0.6B: qkv, down.
    assert_eq!(num_splits(4096, 4096), 8);
    assert_eq!(num_splits(28672, 4096), 4);
    assert_eq!(num_splits(4096, 14336), 8);
    assert_eq!(num_splits(128_256, 4096), 4);
    assert_eq!(num_splits(4096, 1024), 4);
    assert_eq!(num_splits(1024, 3072), 8);
    assert_eq!(num_splits(1024, 8192), 16);
    // A split has at least two units, unless only one exists.
    assert_eq!(num_splits(1024, 600), 2);
    assert_eq!(num_splits(64, 60), 1);
}

#[test]
fn tiles_fit_into_the_shared_memory_of_a_block() {
    let layouts = [
        WeightLayout::Floats,
        INT8,
        int8_groups(32),
        int4(32, true),
        int4(128, false),
    ];
    // NVIDIA's documented values for capabilities 8.9, 8.0 and 9.0.
    for (max_shared_bytes, num_large) in [(99 << 10, 2), (163 << 10, 5), (227 << 10, 5)] {
        let tiles = layouts.map(|layout| (large_tile(layout, max_shared_bytes), layout));
        let small = layouts.map(|layout| (small_tile(layout), layout));
        for (tile, layout) in tiles.into_iter().chain(small) {
            assert!(tile.shared_bytes(layout) <= max_shared_bytes, "{layout:?}");
        }
        let is_large = |(tile, _): &&(WideTile, WeightLayout)| tile.channels == 128;
        assert_eq!(tiles.iter().filter(is_large).count(), num_large);
    }
}

#[test]
fn gates_have_the_same_bits_among_others() {
    for (element, layout, n, k) in [
        (Element::Bf16, WeightLayout::Floats, 80, 520),
        (Element::Bf16, int4(64, true), 48, 288),
        (Element::F32, WeightLayout::Floats, 48, 300),
    ] {
        let mut layer = Layer::new(element, layout, n, k, true);
        let input: Vec<f32> = layer.input(130).iter().map(|x| x / 16.0).collect();
        let input = rounded(element, input);
        let weights = layer.linear.weights;
        layer.linear =
            Linear::load_gated(&layer.device, weights, Activation::Silu, element).unwrap();
        let gated = |layer: &Layer, input: &[f32]| {
            let len = input.len() / k * n / 2;
            let out = upload_as(&layer.device, element, &vec![0.0; len]);
            layer.launch(input, LinearOutput::Store(out.pointer()));
            download_as(&layer.device, element, &out, len)
        };
        let whole = gated(&layer, &input);
        for (row, outs) in whole.chunks(n / 2).enumerate() {
            let x = &input[row * k..][..k];
            for (gate, actual) in outs.iter().enumerate() {
                let (g, magnitude) = layer.exact(x, gate);
                let (value, _) = layer.exact(x, n / 2 + gate);
                let exact = g / (1.0 + (-g).exp()) * value;
                let slack = 4e-6 * magnitude * (1.0 + value.abs());
                let error = (f64::from(*actual) - exact).abs();
                assert!(
                    is_near(element, *actual, exact) || error < slack,
                    "row {row}, gate {gate}: {actual} instead of {exact}"
                );
            }
        }
        for num_multiprocessors in [1, 64] {
            layer.linear.num_multiprocessors = num_multiprocessors;
            for count in [1, 9, 17, 64, 130] {
                let first = 130 - count;
                let outs = gated(&layer, &input[first * k..]);
                let expected = &whole[first * n / 2..];
                assert!(
                    outs.iter()
                        .zip(expected)
                        .all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{layout:?}, {count} of 130 rows"
                );
            }
        }
    }
}
