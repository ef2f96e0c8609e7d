//! Integer weights in the order in which kernels of linear layers read them.
//!
//! Inputs are in units of 128, and the last unit of a row is padded with zeros. A lane of a warp multiplies 8
//! neighbouring inputs of each block of 32 (`weight_fragment.cuh`), and reads 16 bytes at a time. So each run of 64
//! bytes of a row has 16 bytes for lane 0, then 16 for lane 1 and so on: the lane's inputs of two blocks in 8 bits, or
//! of four blocks in 4 bits. Words of 32 bits are ordered so that masks and shifts leave two neighbouring inputs in the
//! halves of a register: in 8 bits, bytes 0, 2, 1 and 3 are four inputs in order; in 4 bits, nibbles 0, 4, 1, 5, 2, 6,
//! 3 and 7 are eight.
//!
//! Scales and minimums of groups are f16, and each channel has a power of two as another factor, so that they have the
//! range of f32. Scales stored in f16 stay exact. Scales stored in bf16 stay exact unless they are 2^28 times smaller
//! than the channel's largest.

use corella_model::GroupedRow;
use half::f16;

#[cfg(test)]
mod tests;

/// The number of inputs in a unit (`linear_args.cuh`).
pub const UNIT: usize = 128;
/// The number of inputs in a block.
const BLOCK: usize = 32;
/// The number of inputs in a block that one lane has.
const LANE_INPUTS: usize = 8;

/// The layout of a linear layer's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightLayout {
    /// `[n][k]` in the type of activations.
    Floats,
    /// 8-bit integers with a scale for each output channel.
    Int8Channels,
    /// 8-bit integers with a scale for each `group_len` inputs: 32, 64 or 128.
    Int8Groups { group_len: usize },
    /// 4-bit integers with a scale for each `group_len` inputs, and a minimum where `has_minimum`.
    Int4Groups { group_len: usize, has_minimum: bool },
}

impl WeightLayout {
    pub fn group_len(self) -> Option<usize> {
        match self {
            Self::Int8Groups { group_len } | Self::Int4Groups { group_len, .. } => Some(group_len),
            _ => None,
        }
    }

    pub fn has_minimum(self) -> bool {
        matches!(
            self,
            Self::Int4Groups {
                has_minimum: true,
                ..
            }
        )
    }

    fn bits(self) -> usize {
        match self {
            Self::Int4Groups { .. } => 4,
            _ => 8,
        }
    }

    /// The length of the longest supported groups that lie within groups of `stored_len` inputs; `None` if even 32
    /// inputs may have two scales.
    pub fn group_len_within(stored_len: usize, k: usize) -> Option<usize> {
        let is_within = |len: &usize| stored_len >= k || stored_len.is_multiple_of(*len);
        [UNIT, 64, BLOCK].into_iter().find(is_within)
    }
}

/// Rows of integers on their way to a device.
#[derive(Debug)]
pub struct PackedWeight {
    layout: WeightLayout,
    k: usize,
    /// `[n]` rows of packed integers.
    pub integers: Vec<u8>,
    /// `[n][groups]`, padded to whole units; empty without groups.
    pub scales: Vec<f16>,
    /// `[n][groups]`; empty without minimums.
    pub minimums: Vec<f16>,
    /// `[n]`: the final factors of sums.
    pub channel_scales: Vec<f32>,
}

impl PackedWeight {
    /// A matrix without rows, of `k` inputs.
    pub fn new(layout: WeightLayout, k: usize) -> Self {
        assert_ne!(layout, WeightLayout::Floats, "floats are not packed");
        Self {
            layout,
            k,
            integers: Vec::new(),
            scales: Vec::new(),
            minimums: Vec::new(),
            channel_scales: Vec::new(),
        }
    }

    /// Appends a row whose scales are for `stored_len` inputs each. Without groups the row has one scale.
    pub fn push(&mut self, row: &GroupedRow, stored_len: usize) {
        assert_eq!(row.quants.len(), self.k, "inputs of a row");
        let raised = i8::from(self.layout.has_minimum() && row.minimums.is_empty()) * 8;
        self.push_integers(&row.quants, raised);
        let Some(group_len) = self.layout.group_len() else {
            assert_eq!(row.scales.len(), 1, "scales of a channel");
            self.channel_scales.push(row.scales[0]);
            return;
        };
        let num_groups = self.k.next_multiple_of(UNIT) / group_len;
        let stored = |values: &[f32], group: usize| {
            let at = group * group_len / stored_len;
            values.get(at).copied().unwrap_or(0.0)
        };
        let scales: Vec<f32> = (0..num_groups).map(|g| stored(&row.scales, g)).collect();
        let minimums: Vec<f32> = match self.layout.has_minimum() {
            // Other rows have minimums, so this row needs minimums too.
            true if row.minimums.is_empty() => scales.iter().map(|scale| -8.0 * scale).collect(),
            true => (0..num_groups).map(|g| stored(&row.minimums, g)).collect(),
            false => Vec::new(),
        };
        let largest = scales.iter().chain(&minimums);
        let factor = power_of_two(largest.fold(0.0, |most: f32, x| most.max(x.abs())));
        let halves = |values: Vec<f32>| values.into_iter().map(move |x| f16::from_f32(x / factor));
        self.scales.extend(halves(scales));
        self.minimums.extend(halves(minimums));
        self.channel_scales.push(factor);
    }

    fn push_integers(&mut self, quants: &[i8], raised: i8) {
        let bits = self.layout.bits();
        let lowest = match self.layout {
            WeightLayout::Int4Groups {
                has_minimum: false, ..
            } => 8,
            _ => raised,
        };
        let run_blocks = 64 * 8 / bits / BLOCK;
        let at = |index: usize| quants.get(index).map_or(0, |q| (q + lowest) as u8);
        for run in 0..self.k.next_multiple_of(UNIT) / (run_blocks * BLOCK) {
            for lane in 0..BLOCK / LANE_INPUTS {
                for block in 0..run_blocks {
                    let first = (run * run_blocks + block) * BLOCK + lane * LANE_INPUTS;
                    let pair = |i: usize| (at(first + 2 * i), at(first + 2 * i + 1));
                    if bits == 4 {
                        let word = (0..4).fold(0u32, |word, i| {
                            let (low, high) = pair(i);
                            let both = u32::from(low & 15) | u32::from(high & 15) << 16;
                            word | both << (4 * i)
                        });
                        self.integers.extend(word.to_le_bytes());
                        continue;
                    }
                    for half in [0, 2] {
                        let ((a, b), (c, d)) = (pair(half), pair(half + 1));
                        self.integers.extend([a, c, b, d]);
                    }
                }
            }
        }
    }
}

/// The power of two that brings `largest` to the upper end of f16's range.
fn power_of_two(largest: f32) -> f32 {
    let power = f32::from_bits(largest.to_bits() & f32::INFINITY.to_bits());
    let factor = power / 16384.0;
    match factor > 0.0 && factor.is_finite() {
        true => factor,
        false => 1.0,
    }
}
