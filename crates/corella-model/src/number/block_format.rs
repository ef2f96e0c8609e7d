//! The number formats of GGUF files, most of which store blocks of values with common scales.
//!
//! The layouts are those of ggml's types of the same names. Values are computed in f32 in the order
//! of ggml's reference code, so that they agree with it to the last bit.

use half::{bf16, f16};
use strum::{FromRepr, IntoStaticStr, VariantArray};

use crate::number::group_format::{FP4_LEVELS, fp4_scale};
use crate::{DType, GroupFormat, GroupedRow};

/// A number format of GGUF files, with its number in a tensor's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromRepr, IntoStaticStr, VariantArray)]
#[repr(u32)]
#[strum(serialize_all = "UPPERCASE")]
pub enum BlockFormat {
    F32 = 0,
    F16 = 1,
    Bf16 = 30,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    #[strum(serialize = "Q2_K")]
    Q2K = 10,
    #[strum(serialize = "Q3_K")]
    Q3K = 11,
    #[strum(serialize = "Q4_K")]
    Q4K = 12,
    #[strum(serialize = "Q5_K")]
    Q5K = 13,
    #[strum(serialize = "Q6_K")]
    Q6K = 14,
    #[strum(serialize = "IQ4_NL")]
    Iq4Nl = 20,
    #[strum(serialize = "IQ4_XS")]
    Iq4Xs = 23,
    Mxfp4 = 39,
}

/// The number of elements in a block of a K format (and of IQ4_XS).
const K_LEN: usize = 256;
/// The number of elements in a block of the other formats.
const LEN: usize = 32;

impl BlockFormat {
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// The type of unpacked floats; `None` for a format with blocks.
    pub(crate) fn float_type(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::Bf16),
            _ => None,
        }
    }

    /// ggml's name.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The number of elements in a block. A block never spans rows.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => K_LEN,
            _ => LEN,
        }
    }

    /// The size of a block, in bytes.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 | Self::Iq4Nl => 2 + LEN / 2,
            Self::Q4_1 => 4 + LEN / 2,
            Self::Q5_0 => 2 + 4 + LEN / 2,
            Self::Q5_1 => 4 + 4 + LEN / 2,
            Self::Q8_0 => 2 + LEN,
            Self::Q2K => K_LEN / 16 + K_LEN / 4 + 4,
            Self::Q3K => K_LEN / 8 + K_LEN / 4 + 12 + 2,
            Self::Q4K => 4 + 12 + K_LEN / 2,
            Self::Q5K => 4 + 12 + K_LEN / 8 + K_LEN / 2,
            Self::Q6K => K_LEN / 2 + K_LEN / 4 + K_LEN / 16 + 2,
            Self::Iq4Xs => 2 + 2 + K_LEN / 64 + K_LEN / 2,
            Self::Mxfp4 => 1 + LEN / 2,
        }
    }

    /// Dequantises whole blocks. `values` has the exact length.
    pub fn dequantise(self, blocks: &[u8], values: &mut [f32]) {
        assert_eq!(
            (
                blocks.len() % self.block_bytes(),
                values.len() * self.block_bytes()
            ),
            (0, blocks.len() * self.block_len()),
            "the number of values is not that of the blocks"
        );
        let blocks = blocks.chunks_exact(self.block_bytes());
        let values = values.chunks_exact_mut(self.block_len());
        let each = |write: fn(&[u8], &mut [f32])| {
            for (block, values) in blocks.zip(values) {
                write(block, values);
            }
        };
        match self {
            Self::F32 => each(|block, values| {
                values[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            }),
            Self::F16 => each(|block, values| values[0] = half_at(block, 0)),
            Self::Bf16 => each(|block, values| {
                values[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32();
            }),
            Self::Q4_0 => each(|block, values| {
                let scale = half_at(block, 0);
                nibbles(&block[2..], values, |q, _| scale * (f32::from(q) - 8.0));
            }),
            Self::Q4_1 => each(|block, values| {
                let (scale, least) = (half_at(block, 0), half_at(block, 2));
                nibbles(&block[4..], values, |q, _| scale * f32::from(q) + least);
            }),
            Self::Q5_0 => each(|block, values| {
                let (scale, fifth) = (half_at(block, 0), fifth_bits(&block[2..]));
                nibbles(&block[6..], values, |q, i| {
                    scale * (f32::from(q | fifth(i)) - 16.0)
                });
            }),
            Self::Q5_1 => each(|block, values| {
                let (scale, least) = (half_at(block, 0), half_at(block, 2));
                let fifth = fifth_bits(&block[4..]);
                nibbles(&block[8..], values, |q, i| {
                    scale * f32::from(q | fifth(i)) + least
                });
            }),
            Self::Q8_0 => each(|block, values| {
                let scale = half_at(block, 0);
                for (value, &q) in values.iter_mut().zip(&block[2..]) {
                    *value = scale * f32::from(q as i8);
                }
            }),
            Self::Iq4Nl => each(|block, values| {
                let scale = half_at(block, 0);
                nibbles(&block[2..], values, |q, _| {
                    scale * f32::from(UNEVEN_LEVELS[usize::from(q)])
                });
            }),
            Self::Mxfp4 => each(|block, values| {
                let scale = fp4_scale(block[0]);
                nibbles(&block[1..], values, |q, _| {
                    scale * f32::from(FP4_LEVELS[usize::from(q)])
                });
            }),
            Self::Q2K => each(q2_k),
            Self::Q3K => each(q3_k),
            Self::Q4K => each(q4_k),
            Self::Q5K => each(q5_k),
            Self::Q6K => each(q6_k),
            Self::Iq4Xs => each(iq4_xs),
        }
    }

    /// The form of blocks as groups of integers. `None` for formats with unevenly spaced values, except FP4, and for
    /// formats whose values have neither 4 nor 8 bits.
    pub fn group_format(self) -> Option<GroupFormat> {
        let (bits, has_minimum) = match self {
            Self::Q4_0 | Self::Mxfp4 => (4, false),
            Self::Q4_1 | Self::Q4K => (4, true),
            Self::Q8_0 => (8, false),
            _ => return None,
        };
        Some(GroupFormat {
            bits,
            group_len: LEN,
            has_minimum,
            is_fp4: self == Self::Mxfp4,
        })
    }

    /// Reads the integers and scales of whole blocks, which stand for exactly the values of
    /// `dequantise`. Panics if `group_format` is `None`.
    pub fn read_groups(self, blocks: &[u8], out: &mut GroupedRow) {
        let num_blocks = blocks.len() / self.block_bytes();
        out.quants.resize(num_blocks * self.block_len(), 0);
        out.scales.clear();
        out.minimums.clear();
        let blocks = blocks.chunks_exact(self.block_bytes());
        for (block, quants) in blocks.zip(out.quants.chunks_exact_mut(self.block_len())) {
            match self {
                Self::Q4_0 => {
                    out.scales.push(half_at(block, 0));
                    nibbles(&block[2..], quants, |q, _| q as i8 - 8);
                }
                Self::Q4_1 => {
                    out.scales.push(half_at(block, 0));
                    out.minimums.push(half_at(block, 2));
                    nibbles(&block[4..], quants, |q, _| q as i8);
                }
                Self::Q4K => {
                    let (scales, leasts) = (half_at(block, 0), half_at(block, 2));
                    for (part, quants) in quants.chunks_exact_mut(LEN).enumerate() {
                        let (scale, least) = scale_and_least(&block[4..16], part);
                        out.scales.push(scales * scale);
                        out.minimums.push(-(leasts * least));
                        let codes = &block[16 + part / 2 * LEN..];
                        for (q, code) in quants.iter_mut().zip(codes) {
                            *q = (code >> (part % 2 * 4) & 15) as i8;
                        }
                    }
                }
                Self::Q8_0 => {
                    out.scales.push(half_at(block, 0));
                    for (q, &byte) in quants.iter_mut().zip(&block[2..]) {
                        *q = byte as i8;
                    }
                }
                Self::Mxfp4 => {
                    out.scales.push(fp4_scale(block[0]));
                    nibbles(&block[1..], quants, |q, _| FP4_LEVELS[usize::from(q)]);
                }
                _ => panic!("{} blocks cannot be read as groups", self.name()),
            }
        }
    }
}

/// The values of the 16 codes of IQ4_NL and IQ4_XS, before scaling.
const UNEVEN_LEVELS: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Decodes 4-bit codes: the low halves of all bytes are the first values, the high halves the
/// others.
fn nibbles<T>(bytes: &[u8], values: &mut [T], value: impl Fn(u8, usize) -> T) {
    let (low, high) = values.split_at_mut(values.len() / 2);
    let half = low.len();
    for (i, (&byte, (low, high))) in bytes.iter().zip(low.iter_mut().zip(high)).enumerate() {
        *low = value(byte & 15, i);
        *high = value(byte >> 4, half + i);
    }
}

/// Reads the fifth bit of each value from the first four bytes, shifted to its place above a
/// nibble.
fn fifth_bits(bytes: &[u8]) -> impl Fn(usize) -> u8 {
    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    move |i| ((bits >> i) as u8 & 1) << 4
}

/// The 6-bit scale and offset of one of a block's 8 parts, unpacked from 12 bytes.
fn scale_and_least(packed: &[u8], part: usize) -> (f32, f32) {
    let (scale, least) = match part {
        0..4 => (packed[part] & 63, packed[part + 4] & 63),
        _ => (
            (packed[part + 4] & 15) | ((packed[part - 4] >> 6) << 4),
            (packed[part + 4] >> 4) | ((packed[part] >> 6) << 4),
        ),
    };
    (f32::from(scale), f32::from(least))
}

/// A block has two halves of 128 values, whose 4 parts of 32 share bytes. Each group of 16 values
/// has a scale and an offset.
fn q2_k(block: &[u8], values: &mut [f32]) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (scale_of_scales, scale_of_leasts) = (half_at(block, 80), half_at(block, 82));
    for (run, values) in values.chunks_exact_mut(16).enumerate() {
        let scale = scale_of_scales * f32::from(scales[run] & 15);
        let least = scale_of_leasts * f32::from(scales[run] >> 4);
        let codes = &codes[run / 8 * 32 + run % 2 * 16..];
        for (value, code) in values.iter_mut().zip(codes) {
            *value = scale * f32::from(code >> (run % 8 / 2 * 2) & 3) - least;
        }
    }
}

/// Like Q2_K, but the first 32 bytes hold a third bit of each value, and the scales have 6 bits and no offsets.
fn q3_k(block: &[u8], values: &mut [f32]) {
    let (third, codes, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let scale_of_scales = half_at(block, 108);
    for (run, values) in values.chunks_exact_mut(16).enumerate() {
        let low = scales[run % 8] >> (run / 8 * 4) & 15;
        let high = scales[8 + run % 4] >> (run / 4 * 2) & 3;
        let scale = scale_of_scales * (f32::from(low | high << 4) - 32.0);
        let codes = &codes[run / 8 * 32 + run % 2 * 16..];
        let third = &third[run % 2 * 16..];
        for (value, (code, third)) in values.iter_mut().zip(codes.iter().zip(third)) {
            let code = (code >> (run % 8 / 2 * 2) & 3) | (third >> (run / 2) & 1) << 2;
            *value = scale * (f32::from(code) - 4.0);
        }
    }
}

fn q4_k(block: &[u8], values: &mut [f32]) {
    let (packed, codes) = (&block[4..16], &block[16..]);
    parts_of_32(block, packed, values, |part, i| {
        codes[part / 2 * 32 + i] >> (part % 2 * 4) & 15
    });
}

fn q5_k(block: &[u8], values: &mut [f32]) {
    let (packed, fifth, codes) = (&block[4..16], &block[16..48], &block[48..]);
    parts_of_32(block, packed, values, |part, i| {
        let low = codes[part / 2 * 32 + i] >> (part % 2 * 4) & 15;
        low | (fifth[i] >> part & 1) << 4
    });
}

fn parts_of_32(block: &[u8], packed: &[u8], values: &mut [f32], code: impl Fn(usize, usize) -> u8) {
    let (scale_of_scales, scale_of_leasts) = (half_at(block, 0), half_at(block, 2));
    for (part, values) in values.chunks_exact_mut(32).enumerate() {
        let (scale, least) = scale_and_least(packed, part);
        let (scale, least) = (scale_of_scales * scale, scale_of_leasts * least);
        for (i, value) in values.iter_mut().enumerate() {
            *value = scale * f32::from(code(part, i)) - least;
        }
    }
}

/// A block has two halves of 128 values, whose 4 parts of 32 share the bytes of the upper two bits.
fn q6_k(block: &[u8], values: &mut [f32]) {
    let (low, rest) = block.split_at(K_LEN / 2);
    let (high, rest) = rest.split_at(K_LEN / 4);
    let (scales, _) = rest.split_at(K_LEN / 16);
    let scale_of_scales = half_at(rest, K_LEN / 16);
    for (i, value) in values.iter_mut().enumerate() {
        let (half, part, j) = (i / 128, i % 128 / 32, i % 32);
        let low = low[half * 64 + part % 2 * 32 + j] >> (part / 2 * 4) & 15;
        let high = high[half * 32 + j] >> (part * 2) & 3;
        let scale = scale_of_scales * f32::from(scales[i / 16] as i8);
        *value = scale * (f32::from(low | high << 4) - 32.0);
    }
}

fn iq4_xs(block: &[u8], values: &mut [f32]) {
    let scale_of_scales = half_at(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    let (low, codes) = (&block[4..8], &block[8..]);
    let parts = values.chunks_exact_mut(32).zip(codes.chunks_exact(16));
    for (part, (values, codes)) in parts.enumerate() {
        let low = low[part / 2] >> (part % 2 * 4) & 15;
        let high = (high >> (part * 2)) as u8 & 3;
        let scale = scale_of_scales * (f32::from(low | high << 4) - 32.0);
        nibbles(codes, values, |q, _| {
            scale * f32::from(UNEVEN_LEVELS[usize::from(q)])
        });
    }
}
