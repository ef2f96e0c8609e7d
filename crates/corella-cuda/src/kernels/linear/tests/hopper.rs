//! Compares Hopper's kernels with the narrow kernels, whose products have the same inputs.

use super::super::hopper::can_take;
use super::*;

/// Gives a layer kernels with Hopper's input order: all kernels if `is_whole`, which needs a Hopper GPU, or else only
/// the narrow ones.
fn exchanging(layer: &mut Layer, gate: Option<Activation>, is_whole: bool) {
    let (device, weights, element) = (&layer.device, layer.linear.weights, layer.element);
    assert!(can_take(&weights, element));
    layer.linear = Linear::load_kernels(device, weights, element, gate, is_whole).unwrap();
    if !is_whole {
        let loader = KernelLoader::new(device, &weights, element, gate);
        let Kernels::Tiled { narrow, .. } = &mut layer.linear.kernels else {
            panic!("bf16 is computed in tiles");
        };
        *narrow = loader.narrow(true).unwrap();
    }
}

fn is_hopper() -> bool {
    let is_hopper = device().properties().architecture == "sm_90a";
    if !is_hopper {
        println!("Hopper's kernels need a Hopper GPU");
    }
    is_hopper
}

fn assert_same_bits(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    let different = actual
        .iter()
        .zip(expected)
        .position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(different, None, "{what}");
}

/// Inputs 0 and 15 cancel each other within the first 16, and input 16 comes after them: 1 is left. If a product had
/// input 16 beside input 0, and input 15 came later, the large terms would absorb the small one.
#[test]
fn products_take_inputs_in_groups_of_16_in_their_order() {
    const K: usize = 64;
    for exchanges in [true, false] {
        let mut layer = Layer::new(Element::Bf16, WeightLayout::Floats, 16, K, false);
        let ones = upload_as(&layer.device, Element::Bf16, &[1.0; 16 * K]);
        layer.linear.weights.weight = ones.pointer();
        if exchanges {
            exchanging(&mut layer, None, false);
        }
        for block in [0, 32] {
            let mut input = vec![0.0; 3 * K];
            for row in input.chunks_mut(K) {
                row[block] = (1_u32 << 30) as f32;
                row[block + 15] = -row[block];
                row[block + 16] = 1.0;
            }
            let expected = if exchanges { 1.0 } else { 0.0 };
            assert_eq!(layer.sums(&input), vec![expected; 3 * 16], "{exchanges}");
        }
    }
}

#[test]
fn rows_that_exchange_have_the_same_bits_among_others() {
    for (n, k) in [(72, 1096), (37, 520), (24, 512), (5, 8)] {
        let mut layer = Layer::new(Element::Bf16, WeightLayout::Floats, n, k, true);
        exchanging(&mut layer, None, false);
        let input = layer.input(32);
        let whole = layer.sums(&input);
        layer.assert_near(&input, &whole);
        for count in [1, 2, 7, 8, 9, 16, 17] {
            let first = 32 - count;
            let sums = layer.sums(&input[first * k..]);
            assert_same_bits(&sums, &whole[first * n..], &format!("{count} of 32 rows"));
        }
    }
}

/// Numbers of rows at which tiles begin or end, in the kernels for few rows and for many.
const HOPPER_ROWS: [usize; 6] = [1, 33, 64, 65, 129, 300];

/// Numbers of multiprocessors with which every kernel is chosen: with 1, tiles are large from 65 rows on; with others
/// they are small, and clusters of up to 8 blocks share their splits.
const MULTIPROCESSORS: [usize; 4] = [1, 4, 32, 1000];

#[test]
fn hopper_equals_narrow_kernels_and_sums() {
    if !is_hopper() {
        return;
    }
    let shapes = [
        (72, 1096),
        (37, 64),
        (1001, 520),
        (128, 8),
        (256, 4096),
        (1000, 1032),
        (384, 8192),
    ];
    for (n, k) in shapes {
        let mut layer = Layer::new(Element::Bf16, WeightLayout::Floats, n, k, true);
        exchanging(&mut layer, None, true);
        let input = layer.input(300);
        let narrow: Vec<f32> = input
            .chunks(32 * k)
            .flat_map(|rows| layer.sums(rows))
            .collect();
        if n * k < 100_000 {
            layer.assert_near(&input, &narrow);
        }
        for num_multiprocessors in MULTIPROCESSORS {
            layer.linear.num_multiprocessors = num_multiprocessors;
            for count in HOPPER_ROWS {
                let first = 300 - count;
                let sums = layer.sums(&input[first * k..]);
                let what =
                    format!("{n} x {k}, {count} rows, {num_multiprocessors} multiprocessors");
                assert_same_bits(&sums, &narrow[first * n..], &what);
            }
        }
    }
}

#[test]
fn hopper_stores_shapes_and_adds_what_narrow_kernels_do() {
    if !is_hopper() {
        return;
    }
    let poison = f32::NAN;
    for (n, k) in [(136, 1032), (37, 520)] {
        let mut layer = Layer::new(Element::Bf16, WeightLayout::Floats, n, k, true);
        exchanging(&mut layer, None, true);
        let input = layer.input(300);
        let outputs = |layer: &Layer, rows: &[f32], first: usize| {
            let (device, len) = (&layer.device, rows.len() / k * n);
            let before = &Random::new(8).numbers(300 * n)[first * n..][..len];
            let stored = upload_as(device, Element::Bf16, &vec![poison; len]);
            let shaped = upload(device, &vec![poison; len]);
            let added = upload(device, before);
            layer.launch(rows, LinearOutput::Store(stored.pointer()));
            let output = LinearOutput::StoreFloats {
                out: shaped.pointer(),
                scale: 0.5,
                soft_cap: Some(2.0),
            };
            layer.launch(rows, output);
            let output = LinearOutput::Add {
                out: added.pointer(),
                scale: 1.5,
            };
            layer.launch(rows, output);
            [
                download_as(device, Element::Bf16, &stored, len),
                download(device, &shaped, len),
                download(device, &added, len),
            ]
        };
        let mut narrow = [const { Vec::new() }; 3];
        for (index, rows) in input.chunks(32 * k).enumerate() {
            let parts = outputs(&layer, rows, 32 * index);
            for (all, part) in narrow.iter_mut().zip(parts) {
                all.extend(part);
            }
        }
        for num_multiprocessors in MULTIPROCESSORS {
            layer.linear.num_multiprocessors = num_multiprocessors;
            for count in HOPPER_ROWS {
                let first = 300 - count;
                let all = outputs(&layer, &input[first * k..], first);
                for (kind, (actual, expected)) in all.iter().zip(&narrow).enumerate() {
                    let what = format!("output {kind}, {n} x {k}, {count} rows");
                    assert_same_bits(actual, &expected[first * n..], &what);
                }
            }
        }
    }
}

#[test]
fn hopper_gates_as_narrow_kernels_do() {
    if !is_hopper() {
        return;
    }
    for (n, k) in [(80, 520), (272, 1096), (1008, 64)] {
        let mut layer = Layer::new(Element::Bf16, WeightLayout::Floats, n, k, true);
        exchanging(&mut layer, Some(Activation::Silu), true);
        let input: Vec<f32> = layer.input(300).iter().map(|x| x / 16.0).collect();
        let input = rounded(Element::Bf16, input);
        let gated = |layer: &Layer, rows: &[f32]| {
            let len = rows.len() / k * n / 2;
            let out = upload_as(&layer.device, Element::Bf16, &vec![f32::NAN; len]);
            layer.launch(rows, LinearOutput::Store(out.pointer()));
            download_as(&layer.device, Element::Bf16, &out, len)
        };
        let narrow: Vec<f32> = input
            .chunks(32 * k)
            .flat_map(|rows| gated(&layer, rows))
            .collect();
        for (row, outs) in narrow.chunks(n / 2).enumerate() {
            for (gate, actual) in outs.iter().enumerate() {
                let x = &input[row * k..][..k];
                let (g, magnitude) = layer.exact(x, gate);
                let (value, _) = layer.exact(x, n / 2 + gate);
                let exact = g / (1.0 + (-g).exp()) * value;
                let error = (f64::from(*actual) - exact).abs();
                let slack = 4e-6 * magnitude * (1.0 + value.abs());
                assert!(
                    is_near(Element::Bf16, *actual, exact) || error < slack,
                    "row {row}, gate {gate}: {actual} instead of {exact}"
                );
            }
        }
        for num_multiprocessors in MULTIPROCESSORS {
            layer.linear.num_multiprocessors = num_multiprocessors;
            for count in HOPPER_ROWS {
                let first = 300 - count;
                let outs = gated(&layer, &input[first * k..]);
                let what =
                    format!("{n} x {k}, {count} rows, {num_multiprocessors} multiprocessors");
                assert_same_bits(&outs, &narrow[first * n / 2..], &what);
            }
        }
    }
}
