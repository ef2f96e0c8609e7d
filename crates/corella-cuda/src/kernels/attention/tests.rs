//! Compares attention with plain loops in f64, and the bits of different divisions of a step.

use corella_model::{
    AttentionSpec, DType, ElementOrder, KvFormat, KvGeometry, KvLayers, RotarySpec,
    quantise_int8_row,
};
use half::{bf16, f16};

use super::{AttentionKernels, AttentionScratch, AttentionStep, ItemList};
use crate::attention::{AttentionItem, AttentionPlan, AttentionSpan, PlanLimits};
use crate::device::{DevicePointer, Element, SharedDevice};
use crate::kernels::test_memory::{Random, device, download, upload};

const BF16: KvFormat = KvFormat::Float(DType::Bf16);
const F32: KvFormat = KvFormat::Float(DType::F32);

/// All of a step's work is undivided, as on a device with few blocks.
const UNDIVIDED: PlanLimits = PlanLimits {
    num_blocks: 1,
    num_partial_rows: 0,
};

/// Every task is divided as far as possible.
const DIVIDED: PlanLimits = PlanLimits {
    num_blocks: 100_000,
    num_partial_rows: 1 << 15,
};

/// Keys and values of a sequence and a query for each of its positions.
struct Sequence {
    /// `[position][kv_head][head_dim]`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[position][head][head_dim]`.
    queries: Vec<f32>,
}

struct Case {
    spec: AttentionSpec,
    element: Element,
    format: KvFormat,
}

/// Positions of a sequence that a step computes.
type Span = (usize, std::ops::Range<usize>);

impl Case {
    fn new(heads: (usize, usize), head_dim: usize, element: Element, format: KvFormat) -> Self {
        let rotary = RotarySpec::plain(1e4, head_dim);
        let mut spec = AttentionSpec::plain(heads.0, heads.1, head_dim, rotary);
        // Queries and keys of uniform numbers have small products. With this scale, weights differ widely.
        spec.scale *= 4.0;
        Self {
            spec,
            element,
            format,
        }
    }

    fn sequence(&self, seed: u64, len: usize) -> Sequence {
        let mut random = Random::new(seed);
        let mut numbers = |len| -> Vec<f32> {
            let numbers = random.numbers(len).into_iter();
            numbers.map(|x| bf16::from_f32(x).to_f32()).collect()
        };
        Sequence {
            keys: numbers(len * self.spec.kv_len()),
            values: numbers(len * self.spec.kv_len()),
            queries: numbers(len * self.spec.query_len()),
        }
    }

    /// A row as stored in the pages, and its decoded values.
    fn stored(&self, row: &[f32]) -> (Vec<u8>, f32, Vec<f32>) {
        match self.format {
            KvFormat::Float(DType::F32) => {
                let bytes = row.iter().flat_map(|x| x.to_le_bytes()).collect();
                (bytes, 0.0, row.to_vec())
            }
            KvFormat::Float(DType::F16) => {
                let row: Vec<f16> = row.iter().map(|x| f16::from_f32(*x)).collect();
                let bytes = row.iter().flat_map(|x| x.to_le_bytes()).collect();
                (bytes, 0.0, row.iter().map(|x| x.to_f32()).collect())
            }
            KvFormat::Float(DType::Bf16) => {
                let row: Vec<bf16> = row.iter().map(|x| bf16::from_f32(*x)).collect();
                let bytes = row.iter().flat_map(|x| x.to_le_bytes()).collect();
                (bytes, 0.0, row.iter().map(|x| x.to_f32()).collect())
            }
            KvFormat::Int8 => {
                let mut bytes = vec![0; row.len()];
                let scale = quantise_int8_row(row, &mut bytes);
                let means = bytes.iter().map(|byte| f32::from(*byte as i8) * scale);
                let means = means.collect();
                (bytes, scale, means)
            }
        }
    }

    /// Computes the spans as one step, and returns the output of each row as f32.
    fn run(
        &self,
        device: &SharedDevice,
        sequences: &[&Sequence],
        spans: &[Span],
        page_size: usize,
        limits: PlanLimits,
    ) -> Vec<Vec<f32>> {
        let spec = &self.spec;
        let (layer, num_layers) = (1, 2);
        let max_len = spans
            .iter()
            .map(|(_, positions)| positions.end)
            .max()
            .unwrap();
        let table_len = max_len.div_ceil(page_size);
        let num_pages = spans.len() * table_len + 3;
        let geometry = KvGeometry {
            num_layers,
            layers: KvLayers::one(num_layers),
            num_kv_heads: spec.num_kv_heads as u32,
            head_dim: spec.head_dim as u32,
            page_size: page_size as u32,
            num_pages: num_pages as u32,
            format: self.format,
            order: ElementOrder::Plain,
        };
        // Unwritten memory is NaN, and stale entries of tables are far out of range.
        let mut kv = vec![0xff_u8; num_pages * geometry.page_bytes()];
        let mut tables = vec![u32::MAX; spans.len() * table_len];
        let mut free: Vec<u32> = (0..num_pages as u32).collect();
        let mut random = Random::new(page_size as u64);
        let mut queries = Vec::new();
        let mut rows = Vec::new();
        for (slot, (sequence, positions)) in spans.iter().enumerate() {
            let sequence = sequences[*sequence];
            let first = spec.first_seen(positions.start);
            for position in first..positions.end {
                let entry = &mut tables[slot * table_len + position / page_size];
                if *entry == u32::MAX {
                    *entry = free.swap_remove(random.below(free.len()));
                }
                let page = *entry as usize * geometry.page_bytes() + layer * geometry.layer_bytes();
                for head in 0..spec.num_kv_heads {
                    let part = page + head * geometry.head_bytes();
                    for (side, rows) in [&sequence.keys, &sequence.values].into_iter().enumerate() {
                        let row = &rows[(position * spec.num_kv_heads + head) * spec.head_dim..];
                        let (bytes, scale, _) = self.stored(&row[..spec.head_dim]);
                        let index = side * page_size + position % page_size;
                        let at = part + index * bytes.len();
                        kv[at..][..bytes.len()].copy_from_slice(&bytes);
                        if self.format == KvFormat::Int8 {
                            let at = part + geometry.element_bytes() + 4 * index;
                            kv[at..][..4].copy_from_slice(&scale.to_le_bytes());
                        }
                    }
                }
            }
            rows.push(AttentionSpan {
                slot: slot as u32,
                first_row: queries.len() / spec.query_len(),
                position: positions.start,
                num_tokens: positions.len(),
            });
            let range = positions.start * spec.query_len()..positions.end * spec.query_len();
            queries.extend_from_slice(&sequence.queries[range]);
        }

        let kernels = AttentionKernels::load(device, spec, &geometry, self.element).unwrap();
        let num_rows = queries.len() / spec.query_len();
        let scratch = AttentionScratch::new(device, &[&kernels], num_rows).unwrap();
        let mut plan = AttentionPlan::default();
        plan.build(&rows, kernels.shape(), &limits);
        let max_items = kernels.shape().max_items(num_rows, &limits);
        assert!(plan.small.len() + plan.large.len() <= max_items);
        let lists = [&plan.small, &plan.large].map(|items| {
            let count = upload(device, &[items.len() as u32]);
            // The list has room for one more item, so that an empty list has some room.
            let mut room = items.clone();
            room.push(AttentionItem::default());
            (upload(device, &room), count, items.len())
        });
        let list = |index: usize| {
            let (items, count, num_items): &(_, _, usize) = &lists[index];
            ItemList {
                items: items.pointer(),
                max_items: *num_items + 1,
                count: count.pointer(),
                // Both kinds of launches: one block for each item, or a fixed number.
                num_items: page_size.is_multiple_of(2).then_some(*num_items),
            }
        };
        let kv = upload(device, &kv);
        let tables = upload(device, &tables);
        let len = queries.len();
        let (queries, out) = match self.element {
            Element::F32 => (
                upload(device, &queries),
                upload(device, &vec![f32::NAN; len]),
            ),
            Element::Bf16 => {
                let queries: Vec<bf16> = queries.iter().map(|x| bf16::from_f32(*x)).collect();
                (
                    upload(device, &queries),
                    upload(device, &vec![bf16::NAN; len]),
                )
            }
        };
        let step = AttentionStep {
            queries: queries.pointer(),
            out: out.pointer(),
            kv: DevicePointer::add(kv.pointer(), layer * geometry.layer_bytes()),
            tables: tables.pointer(),
            table_len,
            small: list(0),
            large: list(1),
            scratch: &scratch,
        };
        // The launch runs twice, because the first run must restore the counters.
        for _ in 0..2 {
            // SAFETY: all of this is the device's memory with the sizes of the step.
            unsafe { kernels.launch(device, &step) }.unwrap();
        }
        let out: Vec<f32> = match self.element {
            Element::F32 => download(device, &out, len),
            Element::Bf16 => {
                let out: Vec<bf16> = download(device, &out, len);
                out.iter().map(|x| x.to_f32()).collect()
            }
        };
        out.chunks(spec.query_len()).map(<[f32]>::to_vec).collect()
    }

    /// The output for one position, in f64.
    fn reference(&self, sequence: &Sequence, position: usize) -> Vec<f64> {
        let spec = &self.spec;
        let head_dim = spec.head_dim;
        let group = spec.num_heads / spec.num_kv_heads;
        let seen = spec.first_seen(position)..position + 1;
        let mut out = Vec::new();
        for head in 0..spec.num_heads {
            let query =
                &sequence.queries[(position * spec.num_heads + head) * head_dim..][..head_dim];
            let row = |rows: &[f32], position: usize| {
                let first = (position * spec.num_kv_heads + head / group) * head_dim;
                self.stored(&rows[first..][..head_dim]).2
            };
            let score = |position| {
                let key = row(&sequence.keys, position);
                let products = query
                    .iter()
                    .zip(&key)
                    .map(|(q, k)| f64::from(*q) * f64::from(*k));
                let score = products.sum::<f64>() * f64::from(spec.scale);
                match spec.soft_cap {
                    Some(cap) => f64::from(cap) * (score / f64::from(cap)).tanh(),
                    None => score,
                }
            };
            let scores: Vec<f64> = seen.clone().map(score).collect();
            let largest = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut values = vec![0.0; head_dim];
            for (weight, position) in weights.iter().zip(seen.clone()) {
                for (out, value) in values.iter_mut().zip(row(&sequence.values, position)) {
                    *out += weight / sum * f64::from(value);
                }
            }
            out.extend(values);
        }
        out
    }

    /// Compares rows with the reference. In bf16, weights and outputs are rounded to 8 bits: the relative error of a
    /// weight is at most 2^-8, and the rounding of an output, whose magnitude is at most 1, adds 2^-9.
    fn check(&self, sequence: &Sequence, positions: std::ops::Range<usize>, rows: &[Vec<f32>]) {
        let tolerance = match self.element {
            Element::F32 => 2e-6,
            Element::Bf16 => 3.0 / 512.0,
        };
        assert_eq!(rows.len(), positions.len());
        for (position, row) in positions.zip(rows) {
            let reference = self.reference(sequence, position);
            for (i, (value, wanted)) in row.iter().zip(&reference).enumerate() {
                let difference = (f64::from(*value) - wanted).abs();
                assert!(
                    difference <= tolerance,
                    "position {position}, element {i}: {value} instead of {wanted}"
                );
            }
        }
    }
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    let of_row = |row: &Vec<f32>| row.iter().map(|x| x.to_bits()).collect();
    rows.iter().map(of_row).collect()
}

#[test]
fn a_prompt_and_its_continuation_are_as_in_plain_loops() {
    let device = device();
    let cases = [
        ((2, 2), 16, Element::F32, F32),
        ((4, 2), 12, Element::F32, F32),
        ((3, 1), 24, Element::F32, KvFormat::Int8),
        ((4, 2), 8, Element::F32, BF16),
        ((4, 2), 32, Element::Bf16, BF16),
        ((2, 2), 64, Element::Bf16, BF16),
        ((3, 1), 16, Element::Bf16, KvFormat::Float(DType::F16)),
        ((8, 2), 48, Element::Bf16, KvFormat::Int8),
        ((7, 1), 12, Element::Bf16, BF16),
        ((8, 1), 8, Element::Bf16, KvFormat::Int8),
    ];
    for (index, (heads, head_dim, element, format)) in cases.into_iter().enumerate() {
        let case = Case::new(heads, head_dim, element, format);
        let sequence = case.sequence(index as u64, 141);
        for (positions, page_size) in [(0..70, 16), (0..9, 5), (70..141, 7), (140..141, 17)] {
            let spans = [(0, positions.clone())];
            let rows = case.run(&device, &[&sequence], &spans, page_size, UNDIVIDED);
            case.check(&sequence, positions, &rows);
        }
    }
}

#[test]
fn heads_of_real_sizes_have_one_result_in_both_tilings() {
    let device = device();
    for (head_dim, element, format) in [
        (128, Element::Bf16, BF16),
        (256, Element::Bf16, KvFormat::Int8),
        (256, Element::F32, F32),
    ] {
        let case = Case::new((4, 1), head_dim, element, format);
        let sequence = case.sequence(4, 140);
        let prompt = case.run(&device, &[&sequence], &[(0, 100..140)], 16, UNDIVIDED);
        case.check(&sequence, 100..140, &prompt);
        let decoded = case.run(&device, &[&sequence], &[(0, 139..140)], 7, DIVIDED);
        assert!(bits(&decoded)[0] == bits(&prompt)[39], "{head_dim}");
    }
}

#[test]
fn windows_and_soft_caps_are_as_in_plain_loops() {
    let device = device();
    for (element, format) in [
        (Element::F32, F32),
        (Element::Bf16, BF16),
        (Element::Bf16, KvFormat::Int8),
    ] {
        for (window, soft_cap) in [
            (Some(24), None),
            (Some(1), Some(2.0)),
            (None, Some(0.5)),
            (Some(64), None),
        ] {
            let mut case = Case::new((4, 2), 16, element, format);
            case.spec.window = window;
            case.spec.soft_cap = soft_cap;
            let sequence = case.sequence(7, 200);
            for (positions, page_size) in [(0..41, 5), (150..200, 16), (199..200, 7)] {
                let spans = [(0, positions.clone())];
                let rows = case.run(&device, &[&sequence], &spans, page_size, UNDIVIDED);
                case.check(&sequence, positions, &rows);
            }
        }
    }
}

/// Computes a prompt whole, in chunks, token by token and beside other prompts, with pages of several sizes and with
/// work divided or not, and compares bits.
fn check_invariance(case: &Case, len: usize, chunk: usize, samples: &[usize]) {
    let device = device();
    let sequence = case.sequence(1, len);
    let other = case.sequence(2, len);
    let sequences = [&sequence, &other];
    let whole = bits(&case.run(&device, &sequences, &[(0, 0..len)], 16, UNDIVIDED));
    let divided = case.run(&device, &sequences, &[(0, 0..len)], 17, DIVIDED);
    assert!(
        bits(&divided) == whole,
        "a division of the work changes bits"
    );

    let chunks: Vec<Span> = (0..len)
        .step_by(chunk)
        .map(|start| (0, start..len.min(start + chunk)))
        .collect();
    let chunked = case.run(&device, &sequences, &chunks, 7, UNDIVIDED);
    assert!(bits(&chunked) == whole, "chunks of {chunk} change bits");

    for (page_size, limits) in [(16, UNDIVIDED), (5, DIVIDED)] {
        // Each sample as a decoded token, between tokens and prompts of another sequence.
        let spans: Vec<Span> = samples
            .iter()
            .flat_map(|&at| [(0, at..at + 1), (1, at / 2..at + 1), (1, at..at + 1)])
            .collect();
        let rows = bits(&case.run(&device, &sequences, &spans, page_size, limits));
        let mut row = 0;
        for (sequence, positions) in spans {
            if sequence == 0 {
                assert!(
                    rows[row] == whole[positions.start],
                    "position {} decoded with pages of {page_size} has other bits",
                    positions.start
                );
            }
            row += positions.len();
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_step() {
    for (heads, element, format) in [
        ((4, 2), Element::Bf16, BF16),
        ((3, 1), Element::Bf16, KvFormat::Int8),
        ((4, 2), Element::F32, F32),
    ] {
        let case = Case::new(heads, 16, element, format);
        check_invariance(&case, 300, 77, &[0, 63, 64, 127, 128, 255, 256, 299]);
    }
}

#[test]
fn bits_do_not_depend_on_the_step_with_windows() {
    let mut case = Case::new((8, 1), 24, Element::Bf16, BF16);
    case.spec.window = Some(90);
    check_invariance(&case, 300, 41, &[0, 89, 90, 128, 217, 218, 299]);
    case.element = Element::F32;
    case.spec.soft_cap = Some(1.5);
    check_invariance(&case, 300, 41, &[0, 89, 90, 128, 217, 218, 299]);
}

#[test]
fn bits_do_not_depend_on_the_step_where_splits_grow() {
    // With at most 16 splits, splits have 128 positions up to position 2047, and 256 after it.
    let case = Case::new((8, 8), 16, Element::Bf16, BF16);
    let device = device();
    let sequence = case.sequence(3, 2100);
    let whole = case.run(&device, &[&sequence], &[(0, 2000..2100)], 16, UNDIVIDED);
    case.check(&sequence, 2000..2100, &whole);
    let whole = bits(&whole);
    let spans: Vec<Span> = [2000..2047, 2047..2048, 2048..2049, 2049..2100]
        .map(|positions| (0, positions))
        .to_vec();
    for (page_size, limits) in [(32, DIVIDED), (5, UNDIVIDED)] {
        let parts = bits(&case.run(&device, &[&sequence], &spans, page_size, limits));
        assert!(parts == whole, "pages of {page_size}");
    }
}
