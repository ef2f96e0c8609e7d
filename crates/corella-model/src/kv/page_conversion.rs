//! Conversion of pages between executors of the same model.

use std::ops::Range;

use half::{bf16, f16};

use crate::number::int8_row::quantise_int8_row;
use crate::{DType, KvFormat, KvGeometry};

/// Converts canonical pages of a sender to canonical pages of a receiver, which may differ in KV format and page size.
/// Between equal formats no bit changes.
#[derive(Clone, Debug, PartialEq)]
pub struct PageConversion {
    from: KvGeometry,
    to: KvGeometry,
}

/// The keys are one side, the values the other.
const NUM_SIDES: usize = 2;

impl PageConversion {
    /// `None` if a token's keys and values differ in shape, because the models then differ.
    pub fn new(from: &KvGeometry, to: &KvGeometry) -> Option<Self> {
        let shape = |of: &KvGeometry| (of.layers.num_layers(), of.num_kv_heads, of.head_dim);
        (shape(from) == shape(to)).then(|| Self {
            from: from.clone(),
            to: to.clone(),
        })
    }

    /// Converts some positions of a sequence, in one layer. `from` begins with the sender's page that holds the first
    /// position, and `to` with the receiver's page that holds this position. Other positions in `to` stay unchanged.
    pub fn convert(&self, positions: Range<usize>, from: &[u8], to: &mut [u8]) {
        let [from_size, to_size] = [&self.from, &self.to].map(|of| of.page_size as usize);
        let first = [from_size, to_size].map(|size| positions.start / size * size);
        let mut row = vec![0.0; self.from.head_dim as usize];
        let mut next = positions.start;
        while next < positions.end {
            let [at, to_at] = [next - first[0], next - first[1]];
            let in_from = from_size - at % from_size;
            let in_to = to_size - to_at % to_size;
            let len = (positions.end - next).min(in_from).min(in_to);
            let from = &from[at / from_size * self.from.layer_bytes()..];
            let to = &mut to[to_at / to_size * self.to.layer_bytes()..];
            self.convert_run(
                (&from[..self.from.layer_bytes()], at % from_size),
                (&mut to[..self.to.layer_bytes()], to_at % to_size),
                len,
                &mut row,
            );
            next += len;
        }
    }

    /// Converts `len` neighbouring positions of one page into one page. Each page comes with the first of these
    /// positions in it.
    fn convert_run(
        &self,
        (from, from_at): (&[u8], usize),
        (to, to_at): (&mut [u8], usize),
        len: usize,
        row: &mut [f32],
    ) {
        for head in 0..self.from.num_kv_heads as usize {
            for side in 0..NUM_SIDES {
                let from_rows = Rows::new(&self.from, head, side);
                let to_rows = Rows::new(&self.to, head, side);
                if self.from.format == self.to.format {
                    let elements = from_rows.elements(from_at..from_at + len);
                    to[to_rows.elements(to_at..to_at + len)].copy_from_slice(&from[elements]);
                    let scales = from_rows.scales(from_at..from_at + len);
                    to[to_rows.scales(to_at..to_at + len)].copy_from_slice(&from[scales]);
                    continue;
                }
                for i in 0..len {
                    let [at, to_at] = [from_at + i, to_at + i].map(|at| at..at + 1);
                    let elements = &from[from_rows.elements(at.clone())];
                    decode(self.from.format, elements, &from[from_rows.scales(at)], row);
                    // Scales stand after all elements of the head.
                    let scales = to_rows.scales(to_at.clone());
                    let elements = to_rows.elements(to_at);
                    let (before, rest) = to.split_at_mut(scales.start);
                    encode(
                        self.to.format,
                        row,
                        &mut before[elements],
                        &mut rest[..scales.len()],
                    );
                }
            }
        }
    }
}

/// The place of one head's keys, or of its values, in one layer of a canonical page.
struct Rows {
    first: usize,
    row_bytes: usize,
    first_scale: usize,
    scale_bytes: usize,
}

impl Rows {
    fn new(geometry: &KvGeometry, head: usize, side: usize) -> Self {
        let row_bytes = geometry.head_dim as usize * geometry.format.size();
        let scale_bytes = geometry.format.row_bytes(geometry.head_dim as usize) - row_bytes;
        let first = head * geometry.head_bytes();
        let before = side * geometry.page_size as usize;
        Self {
            first: first + before * row_bytes,
            row_bytes,
            first_scale: first + geometry.element_bytes() + before * scale_bytes,
            scale_bytes,
        }
    }

    fn elements(&self, positions: Range<usize>) -> Range<usize> {
        let at = |position| self.first + position * self.row_bytes;
        at(positions.start)..at(positions.end)
    }

    /// The bytes of the scales; empty for formats without scales.
    fn scales(&self, positions: Range<usize>) -> Range<usize> {
        let at = |position| self.first_scale + position * self.scale_bytes;
        at(positions.start)..at(positions.end)
    }
}

fn decode(format: KvFormat, elements: &[u8], scale: &[u8], out: &mut [f32]) {
    match format {
        KvFormat::Float(DType::F32) => {
            for (out, bytes) in out.iter_mut().zip(elements.as_chunks().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        KvFormat::Float(DType::F16) => {
            for (out, bytes) in out.iter_mut().zip(elements.as_chunks().0) {
                *out = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        KvFormat::Float(DType::Bf16) => {
            for (out, bytes) in out.iter_mut().zip(elements.as_chunks().0) {
                *out = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        KvFormat::Int8 => {
            let scale = f32::from_le_bytes(scale.as_chunks().0[0]);
            for (out, byte) in out.iter_mut().zip(elements) {
                *out = f32::from(*byte as i8) * scale;
            }
        }
    }
}

/// Rounds as an executor does when it stores the row.
fn encode(format: KvFormat, row: &[f32], elements: &mut [u8], scale: &mut [u8]) {
    match format {
        KvFormat::Float(DType::F32) => {
            for (out, value) in elements.as_chunks_mut().0.iter_mut().zip(row) {
                *out = value.to_le_bytes();
            }
        }
        KvFormat::Float(DType::F16) => {
            for (out, value) in elements.as_chunks_mut().0.iter_mut().zip(row) {
                *out = f16::from_f32(*value).to_le_bytes();
            }
        }
        KvFormat::Float(DType::Bf16) => {
            for (out, value) in elements.as_chunks_mut().0.iter_mut().zip(row) {
                *out = bf16::from_f32(*value).to_le_bytes();
            }
        }
        KvFormat::Int8 => {
            scale.copy_from_slice(&quantise_int8_row(row, elements).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ElementOrder;
    use crate::KvLayers;

    const F32: KvFormat = KvFormat::Float(DType::F32);
    const F16: KvFormat = KvFormat::Float(DType::F16);
    const BF16: KvFormat = KvFormat::Float(DType::Bf16);
    const HEAD_DIM: usize = 2;
    const NUM_HEADS: usize = 2;

    fn geometry(format: KvFormat, page_size: usize) -> KvGeometry {
        KvGeometry {
            num_layers: 1,
            layers: KvLayers::one(1),
            num_kv_heads: NUM_HEADS as u32,
            head_dim: HEAD_DIM as u32,
            page_size: page_size as u32,
            num_pages: 9,
            format,
            order: ElementOrder::Plain,
        }
    }

    fn convert(from: &KvGeometry, to: &KvGeometry, num_positions: usize, pages: &[u8]) -> Vec<u8> {
        let conversion = PageConversion::new(from, to).unwrap();
        let num_pages = num_positions.div_ceil(to.page_size as usize);
        let mut out = vec![0xee; num_pages * to.layer_bytes()];
        conversion.convert(0..num_positions, pages, &mut out);
        out
    }

    /// Pages of f32 in which an element is `1000 * head + 100 * position + 10 * side + dimension`, in the order of
    /// `PageForm::Canonical`.
    fn pages(page_size: usize, num_positions: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for first in (0..num_positions).step_by(page_size) {
            for head in 0..NUM_HEADS {
                for side in 0..2 {
                    for position in first..first + page_size {
                        for i in 0..HEAD_DIM {
                            let value = 1000 * head + 100 * position + 10 * side + i;
                            let bits = match position < num_positions {
                                true => (value as f32).to_bits(),
                                false => 0xeeee_eeee,
                            };
                            bytes.extend(bits.to_le_bytes());
                        }
                    }
                }
            }
        }
        bytes
    }

    #[test]
    fn positions_find_their_pages_of_another_size() {
        for (from, to) in [(16, 32), (32, 16), (1, 16), (16, 1), (7, 5), (4, 4)] {
            for num_positions in [1, 15, 16, 17, 40] {
                let converted = convert(
                    &geometry(F32, from),
                    &geometry(F32, to),
                    num_positions,
                    &pages(from, num_positions),
                );
                let expected = pages(to, num_positions);
                assert_eq!(
                    converted, expected,
                    "{from} to {to}, {num_positions} positions"
                );
            }
        }
    }

    /// Half of a page may be converted first, and the rest into the same page later.
    #[test]
    fn a_sequence_may_come_in_pieces() {
        let (from, to) = (geometry(F32, 4), geometry(F32, 16));
        let conversion = PageConversion::new(&from, &to).unwrap();
        let (sent, expected) = (pages(4, 40), pages(16, 40));
        let mut out = vec![0xee; expected.len()];
        for (start, end) in [(8, 20), (0, 8), (20, 23), (23, 40)] {
            let sent = &sent[start / 4 * from.layer_bytes()..];
            let out = &mut out[start / 16 * to.layer_bytes()..];
            conversion.convert(start..end, sent, out);
        }
        assert_eq!(out, expected);
    }

    #[test]
    fn integers_are_multiplied_by_their_scale_and_rounded_by_the_largest() {
        // One head of one position: key 254, -3, value 0.5, 1.
        let one_head = |format| KvGeometry {
            num_kv_heads: 1,
            ..geometry(format, 1)
        };
        let floats = |values: [f32; 4]| values.map(f32::to_le_bytes).concat();
        let scales = |key: f32, value: f32| [key.to_le_bytes(), value.to_le_bytes()].concat();
        let converted = convert(
            &one_head(F32),
            &one_head(KvFormat::Int8),
            1,
            &floats([254.0, -3.0, 0.5, 1.0]),
        );
        // -3 / 2 is a tie, and so is 0.5 * 127; both go to even.
        let mut expected = vec![127, -2_i8 as u8, 64, 127];
        expected.extend(scales(2.0, 1.0 / 127.0));
        assert_eq!(converted, expected);

        let mut integers = vec![3, -4_i8 as u8, 127, 0];
        integers.extend(scales(0.5, 2.0));
        let converted = convert(&one_head(KvFormat::Int8), &one_head(F32), 1, &integers);
        assert_eq!(converted, floats([1.5, -2.0, 254.0, 0.0]));
        let converted = convert(&one_head(KvFormat::Int8), &one_head(BF16), 1, &integers);
        let halves = [1.5, -2.0, 254.0, 0.0].map(|value| bf16::from_f32(value).to_le_bytes());
        assert_eq!(converted, halves.concat());
    }

    #[test]
    fn floats_round_to_nearest() {
        let one_head = |format| KvGeometry {
            num_kv_heads: 1,
            ..geometry(format, 1)
        };
        // 1 + 2^-8 is half way between two numbers of bf16, 1 + 3 * 2^-8 too; f16 holds both.
        let values = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -65_519.0_f32, 3.0e-8];
        let bytes = values.map(f32::to_le_bytes).concat();
        let halves = |bits: [u16; 4]| bits.map(u16::to_le_bytes).concat();
        let converted = convert(&one_head(F32), &one_head(BF16), 1, &bytes);
        assert_eq!(converted, halves([0x3f80, 0x3f82, 0xc780, 0x3301]));
        let converted = convert(&one_head(F32), &one_head(F16), 1, &bytes);
        assert_eq!(converted, halves([0x3c04, 0x3c0c, 0xfbff, 0x0001]));
    }

    #[test]
    fn the_same_format_changes_no_bit() {
        for format in [F32, F16, BF16, KvFormat::Int8] {
            let [from, to] = [3, 5].map(|page_size| geometry(format, page_size));
            // Patterns that any arithmetic would change, NaN among them.
            let bytes: Vec<u8> = (0..5 * from.layer_bytes())
                .map(|i| (i * 37 % 256) as u8)
                .collect();
            let there = convert(&from, &to, 15, &bytes);
            assert_ne!(there, bytes);
            assert_eq!(convert(&to, &from, 15, &there), bytes, "{format:?}");
        }
    }

    #[test]
    fn other_models_are_refused() {
        let from = geometry(F32, 16);
        for change in [
            |to: &mut KvGeometry| to.layers = KvLayers::one(2),
            |to: &mut KvGeometry| to.num_kv_heads += 1,
            |to: &mut KvGeometry| to.head_dim += 1,
        ] {
            let mut to = from.clone();
            change(&mut to);
            assert_eq!(PageConversion::new(&from, &to), None);
        }
    }
}
