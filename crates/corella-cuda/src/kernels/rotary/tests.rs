//! Compares queries and pages with plain loops in f64.

use corella_model::{
    AttentionSpec, DType, ElementOrder, KvFormat, KvGeometry, KvLayers, NormKind, NormSpec, QkNorm,
    RotaryScaling, RotarySpec, quantise_int8_row,
};
use half::{bf16, f16};

use super::{RotaryKernel, RotaryStep, rotary_angles};
use crate::device::{Element, SharedDevice};
use crate::kernels::test_memory::{Random, device, download, upload};

const BF16: KvFormat = KvFormat::Float(DType::Bf16);
const F32: KvFormat = KvFormat::Float(DType::F32);
const MAX_CONTEXT: usize = 64;
const NUM_SLOTS: usize = 3;

struct Case {
    spec: AttentionSpec,
    element: Element,
    format: KvFormat,
    page_size: usize,
    query_norm: Vec<f32>,
    key_norm: Vec<f32>,
}

/// A row's slot, position (-1 for a row that pads the step) and projection.
type Row = (usize, i32, Vec<f32>);

/// The output of the kernel.
struct Written {
    /// The queries as f32, row by row.
    queries: Vec<Vec<f32>>,
    /// The KV region, all of whose bytes were 0xee before.
    kv: Vec<u8>,
}

impl Case {
    fn new(spec: AttentionSpec, element: Element, format: KvFormat, page_size: usize) -> Self {
        let mut random = Random::new(5);
        let (query, key) = match spec.qk_norm {
            None => (0, 0),
            Some(QkNorm::Heads(_)) => (spec.head_dim, spec.head_dim),
            Some(QkNorm::Whole(_)) => (spec.query_len(), spec.kv_len()),
        };
        Self {
            query_norm: random.numbers(query),
            key_norm: random.numbers(key),
            spec,
            element,
            format,
            page_size,
        }
    }

    fn geometry(&self) -> KvGeometry {
        KvGeometry {
            num_layers: 3,
            layers: KvLayers::one(3),
            num_kv_heads: self.spec.num_kv_heads as u32,
            head_dim: self.spec.head_dim as u32,
            page_size: self.page_size as u32,
            num_pages: (NUM_SLOTS * self.table_len()) as u32,
            format: self.format,
            order: ElementOrder::Plain,
        }
    }

    fn table_len(&self) -> usize {
        MAX_CONTEXT.div_ceil(self.page_size)
    }

    /// Slots use every third page.
    fn page(&self, slot: usize, index: usize) -> usize {
        index * NUM_SLOTS + slot
    }

    fn random_row(&self, random: &mut Random, slot: usize, position: i32) -> Row {
        let len = self.spec.query_len() + 2 * self.spec.kv_len();
        let numbers = random.numbers(len).into_iter();
        let row = numbers.map(|x| bf16::from_f32(3.0 * x).to_f32()).collect();
        (slot, position, row)
    }

    fn run(&self, device: &SharedDevice, rows: &[Row]) -> Written {
        let (spec, geometry) = (&self.spec, self.geometry());
        let kernel = RotaryKernel::load(device, spec, &geometry, self.element).unwrap();
        let kv_bytes = geometry.num_pages as usize * geometry.page_bytes();
        let kv = upload(device, &vec![0xee_u8; kv_bytes]);
        let mut tables = vec![0_u32; NUM_SLOTS * self.table_len()];
        for (i, entry) in tables.iter_mut().enumerate() {
            *entry = self.page(i / self.table_len(), i % self.table_len()) as u32;
        }
        let tables = upload(device, &tables);
        let places: Vec<[i32; 4]> = rows
            .iter()
            .map(|(slot, position, _)| [17, *position, *slot as i32, 0])
            .collect();
        let places = upload(device, &places);
        let angles = match &spec.rotary {
            Some(rotary) => rotary_angles(rotary, MAX_CONTEXT),
            None => Vec::new(),
        };
        let angles = upload(device, &angles);
        let norms = [&self.query_norm, &self.key_norm].map(|norm| upload(device, norm));
        let elements: Vec<f32> = rows.iter().flat_map(|(_, _, row)| row.clone()).collect();
        let len = rows.len() * spec.query_len();
        let (qkv, queries) = match self.element {
            Element::F32 => (upload(device, &elements), upload(device, &vec![0_f32; len])),
            Element::Bf16 => {
                let elements: Vec<bf16> = elements.iter().map(|x| bf16::from_f32(*x)).collect();
                (
                    upload(device, &elements),
                    upload(device, &vec![bf16::ZERO; len]),
                )
            }
        };
        let step = RotaryStep {
            num_rows: rows.len(),
            qkv: qkv.pointer(),
            queries: queries.pointer(),
            kv: kv.pointer().add(2 * geometry.layer_bytes()),
            rows: places.pointer(),
            tables: tables.pointer(),
            table_len: self.table_len(),
            angles: angles.pointer(),
            query_norm: norms[0].pointer(),
            key_norm: norms[1].pointer(),
        };
        // SAFETY: all of this is the device's memory with the sizes of the shapes.
        unsafe { kernel.launch(device, &step) }.unwrap();
        let queries: Vec<f32> = match self.element {
            Element::F32 => download(device, &queries, len),
            Element::Bf16 => {
                let queries: Vec<bf16> = download(device, &queries, len);
                queries.iter().map(|x| x.to_f32()).collect()
            }
        };
        Written {
            queries: queries
                .chunks(spec.query_len())
                .map(<[f32]>::to_vec)
                .collect(),
            kv: download(device, &kv, kv_bytes),
        }
    }

    /// Norm and RoPE of the heads of queries, or of keys, of a row.
    fn reference(&self, heads: &[f32], weights: &[f32], position: usize) -> Vec<f64> {
        let head_dim = self.spec.head_dim;
        let mut x: Vec<f64> = heads.iter().map(|x| f64::from(*x)).collect();
        if let Some(QkNorm::Heads(norm) | QkNorm::Whole(norm)) = self.spec.qk_norm {
            for part in x.chunks_mut(weights.len()) {
                let len = part.len() as f64;
                let mean = match norm.kind {
                    NormKind::Rms => 0.0,
                    NormKind::Layer { .. } => part.iter().sum::<f64>() / len,
                };
                let square = part.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / len;
                let scale = 1.0 / (square + f64::from(norm.eps)).sqrt();
                for (x, weight) in part.iter_mut().zip(weights) {
                    *x = (*x - mean) * scale * f64::from(*weight);
                }
            }
        }
        if let Some(rotary) = &self.spec.rotary {
            let turned = rotary.frequencies(MAX_CONTEXT);
            for head in x.chunks_mut(head_dim) {
                for (i, frequency) in turned.frequencies.iter().enumerate() {
                    let (sine, cosine) = (position as f64 * frequency).sin_cos();
                    let (a, b) = (head[i], head[i + head_dim / 2]);
                    head[i] = (a * cosine - b * sine) * turned.magnitude;
                    head[i + head_dim / 2] = (b * cosine + a * sine) * turned.magnitude;
                }
            }
        }
        x
    }

    /// A key (side 0) or value (side 1) in the pages: its bytes and its scale.
    fn stored<'a>(
        &self,
        kv: &'a [u8],
        place: (usize, usize),
        head: usize,
        side: usize,
    ) -> (&'a [u8], f32) {
        let (slot, position) = place;
        let geometry = self.geometry();
        let page = self.page(slot, position / self.page_size);
        let part = page * geometry.page_bytes()
            + 2 * geometry.layer_bytes()
            + head * geometry.head_bytes();
        let index = side * self.page_size + position % self.page_size;
        let len = self.spec.head_dim * self.format.size();
        let scale = match self.format {
            KvFormat::Int8 => {
                let at = part + geometry.element_bytes() + 4 * index;
                f32::from_le_bytes(kv[at..][..4].try_into().unwrap())
            }
            KvFormat::Float(_) => 1.0,
        };
        (&kv[part + index * len..][..len], scale)
    }

    fn meaning(&self, (bytes, scale): (&[u8], f32)) -> Vec<f64> {
        let numbers = bytes
            .chunks(self.format.size())
            .map(|bytes| match self.format {
                KvFormat::Float(DType::F32) => f32::from_le_bytes(bytes.try_into().unwrap()),
                KvFormat::Float(DType::F16) => {
                    f16::from_le_bytes(bytes.try_into().unwrap()).to_f32()
                }
                KvFormat::Float(DType::Bf16) => {
                    bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32()
                }
                KvFormat::Int8 => f32::from(bytes[0] as i8) * scale,
            });
        numbers.map(f64::from).collect()
    }

    fn check(&self, device: &SharedDevice) {
        let mut random = Random::new(9);
        let places = [(0, 0), (2, 13), (0, 1), (1, -1), (1, 63), (2, 14)];
        let rows: Vec<Row> = places
            .into_iter()
            .map(|(slot, position)| self.random_row(&mut random, slot, position))
            .collect();
        let written = self.run(device, &rows);
        let spec = &self.spec;
        let mut num_bytes = 0;
        for ((slot, position, row), queries) in rows.iter().zip(&written.queries) {
            let Ok(position) = usize::try_from(*position) else {
                continue;
            };
            let (query_len, kv_len) = (spec.query_len(), spec.kv_len());
            let wanted = self.reference(&row[..query_len], &self.query_norm, position);
            let half_a_bit = match self.element {
                Element::F32 => 1e-6,
                Element::Bf16 => 1.0 / 256.0,
            };
            assert_near(
                &queries.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
                &wanted,
                |wanted| half_a_bit * wanted.abs() + 2e-6,
            );
            let keys = self.reference(&row[query_len..][..kv_len], &self.key_norm, position);
            let values = &row[query_len + kv_len..];
            for head in 0..spec.num_kv_heads {
                let range = head * spec.head_dim..(head + 1) * spec.head_dim;
                let place = (*slot, position);
                let stored = self.stored(&written.kv, place, head, 0);
                let largest = keys[range.clone()]
                    .iter()
                    .fold(0.0, |a: f64, b| a.max(b.abs()));
                assert_near(&self.meaning(stored), &keys[range.clone()], |wanted| {
                    2e-6 + match self.format {
                        KvFormat::Float(DType::F32) => 1e-6 * wanted.abs(),
                        KvFormat::Float(DType::F16) => wanted.abs() / 2048.0,
                        KvFormat::Float(DType::Bf16) => wanted.abs() / 256.0,
                        KvFormat::Int8 => largest / 254.0 * 1.00001,
                    }
                });
                // Values are not changed, so their bytes are known.
                let (bytes, scale) = self.stored(&written.kv, place, head, 1);
                let value = &values[range];
                if self.format == KvFormat::Int8 {
                    let mut wanted = vec![0; value.len()];
                    let wanted_scale = quantise_int8_row(value, &mut wanted);
                    assert_eq!((bytes, scale), (&wanted[..], wanted_scale));
                } else {
                    let value: Vec<f64> = value.iter().map(|x| f64::from(*x)).collect();
                    // The projection is bf16, which all these formats hold.
                    assert_near(&self.meaning((bytes, 1.0)), &value, |_| 0.0);
                }
                num_bytes += 2 * self.format.row_bytes(spec.head_dim);
            }
        }
        // No other byte was written, and no byte for the row that pads the step.
        let num_changed = written.kv.iter().filter(|byte| **byte != 0xee).count();
        assert!(
            num_changed <= num_bytes,
            "{num_changed} bytes instead of {num_bytes}"
        );

        // A row alone has the same bits.
        let alone = self.run(device, &rows[1..2]);
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&alone.queries[0]), bits(&written.queries[1]));
        for head in 0..spec.num_kv_heads {
            for side in 0..2 {
                let of = |kv| self.stored(kv, (2, 13), head, side);
                assert_eq!(of(&alone.kv), of(&written.kv));
            }
        }
    }
}

fn assert_near(values: &[f64], wanted: &[f64], tolerance: impl Fn(f64) -> f64) {
    assert_eq!(values.len(), wanted.len());
    for (i, (value, wanted)) in values.iter().zip(wanted).enumerate() {
        assert!(
            (value - wanted).abs() <= tolerance(*wanted),
            "element {i}: {value} instead of {wanted}"
        );
    }
}

fn plain(heads: (usize, usize), head_dim: usize) -> AttentionSpec {
    AttentionSpec::plain(heads.0, heads.1, head_dim, RotarySpec::plain(1e4, head_dim))
}

#[test]
fn heads_are_rotated_and_written_to_their_pages() {
    let device = device();
    for (heads, head_dim, element, format, page_size) in [
        ((4, 2), 16, Element::F32, F32, 16),
        ((3, 1), 12, Element::Bf16, BF16, 5),
        ((2, 2), 128, Element::Bf16, KvFormat::Float(DType::F16), 7),
        ((4, 2), 24, Element::Bf16, KvFormat::Int8, 5),
        ((1, 1), 256, Element::F32, KvFormat::Int8, 16),
        ((7, 1), 2, Element::F32, BF16, 4),
    ] {
        Case::new(plain(heads, head_dim), element, format, page_size).check(&device);
    }
}

#[test]
fn queries_and_keys_are_normed_by_head_or_as_a_whole() {
    let device = device();
    let centred = NormSpec {
        kind: NormKind::Layer { bias: false },
        eps: 1e-5,
    };
    for norm in [
        QkNorm::Heads(NormSpec::rms(1e-6)),
        QkNorm::Whole(NormSpec::rms(1e-2)),
        QkNorm::Heads(centred),
        QkNorm::Whole(centred),
    ] {
        for (element, format) in [(Element::F32, F32), (Element::Bf16, KvFormat::Int8)] {
            let mut spec = plain((4, 2), 24);
            spec.qk_norm = Some(norm);
            Case::new(spec, element, format, 7).check(&device);
        }
    }
}

#[test]
fn some_pairs_turn_or_none_and_with_a_magnitude() {
    let device = device();
    let mut spec = plain((4, 2), 16);
    spec.rotary = Some(RotarySpec {
        theta: 1e4,
        num_dims: 12,
        scaling: RotaryScaling::LongRope {
            short: vec![1.0, 1.5, 2.0, 3.0, 1.0, 7.0],
            long: vec![2.0; 6],
            original_max_position: 4096,
            attention_factor: 1.25,
        },
    });
    Case::new(spec, Element::F32, F32, 5).check(&device);
    let mut spec = plain((4, 2), 16);
    spec.rotary = None;
    Case::new(spec, Element::Bf16, BF16, 5).check(&device);
}

#[test]
fn rows_that_are_not_numbers_spoil_their_scale_and_no_more() {
    let device = device();
    let mut spec = plain((1, 1), 8);
    spec.rotary = None;
    let case = Case::new(spec, Element::F32, KvFormat::Int8, 4);
    for (value, wanted) in [
        (0.0, 0.0),
        (f32::INFINITY, f32::NAN),
        (f32::NAN, f32::NAN),
        (1e-45, 0.0),
    ] {
        let mut row = vec![0.0; 24];
        row[17] = value;
        let written = case.run(&device, &[(0, 3, row)]);
        let (bytes, scale) = case.stored(&written.kv, (0, 3), 0, 1);
        assert!(
            scale == wanted || scale.is_nan() && wanted.is_nan(),
            "{value}: {scale}"
        );
        if !wanted.is_nan() {
            assert_eq!(bytes, [0; 8], "{value}");
        }
    }
}
