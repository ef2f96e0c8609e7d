//! The XXH3-64 checksum of payloads, with the processor's fastest instructions.
//!
//! The `xxhash-rust` crate chooses its instructions at build time, and so uses the oldest
//! processor's. Apart from copying, its checksum was the largest part of the work for each byte.
//! The algorithm follows <https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>.

use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::xxh3_64;

const STRIPE_BYTES: usize = 64;
const SECRET_BYTES: usize = 192;
static SECRET: [u8; SECRET_BYTES] = const_custom_default_secret(0);
/// Each stripe uses the secret from 8 bytes further on.
const SECRET_STEP: usize = 8;
const STRIPES_PER_BLOCK: usize = (SECRET_BYTES - STRIPE_BYTES) / SECRET_STEP;
/// Shorter inputs have an algorithm of their own.
const MAX_SHORT_BYTES: usize = 240;

const PRIME32: [u64; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
const PRIME64: [u64; 5] = [
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
];

type Lanes = [u64; 8];

const FIRST_LANES: Lanes = [
    PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0],
];

/// Takes bytes in pieces of any size.
pub struct Checksum {
    lanes: Lanes,
    /// Number of the current block's stripes in the lanes.
    num_stripes: usize,
    num_bytes: u64,
    /// The beginning, for short inputs.
    first: [u8; MAX_SHORT_BYTES],
    /// The last stripe in the lanes, followed by bytes not in them yet. At least one byte is held
    /// back, because the input's last stripe is treated differently.
    last: [u8; 2 * STRIPE_BYTES],
    num_waiting: usize,
    accumulate: Accumulate,
}

/// Adds whole stripes to the lanes. Returns the number of the current block's stripes in them.
type Accumulate = fn(&mut Lanes, &[[u8; STRIPE_BYTES]], usize) -> usize;

impl Checksum {
    pub fn new() -> Self {
        Self {
            lanes: FIRST_LANES,
            num_stripes: 0,
            num_bytes: 0,
            first: [0; MAX_SHORT_BYTES],
            last: [0; 2 * STRIPE_BYTES],
            num_waiting: 0,
            accumulate: fastest(),
        }
    }

    pub fn reset(&mut self) {
        self.lanes = FIRST_LANES;
        self.num_stripes = 0;
        self.num_bytes = 0;
        self.num_waiting = 0;
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if self.num_bytes < MAX_SHORT_BYTES as u64 {
            let first = &mut self.first[self.num_bytes as usize..];
            let len = first.len().min(bytes.len());
            first[..len].copy_from_slice(&bytes[..len]);
        }
        self.num_bytes += bytes.len() as u64;
        if self.num_waiting > 0 {
            let waiting = &mut self.last[STRIPE_BYTES + self.num_waiting..];
            let len = waiting.len().min(bytes.len());
            waiting[..len].copy_from_slice(&bytes[..len]);
            self.num_waiting += len;
            bytes = &bytes[len..];
            if bytes.is_empty() {
                return;
            }
            // The stripe is full, and not the last.
            self.last.copy_within(STRIPE_BYTES.., 0);
            let (stripe, _) = self.last.as_chunks();
            self.num_stripes = (self.accumulate)(&mut self.lanes, &stripe[..1], self.num_stripes);
        }
        let (stripes, rest) = bytes[..bytes.len() - 1].as_chunks();
        if let Some(last) = stripes.last() {
            self.num_stripes = (self.accumulate)(&mut self.lanes, stripes, self.num_stripes);
            self.last[..STRIPE_BYTES].copy_from_slice(last);
        }
        self.num_waiting = rest.len() + 1;
        let waiting = &bytes[bytes.len() - self.num_waiting..];
        self.last[STRIPE_BYTES..][..waiting.len()].copy_from_slice(waiting);
    }

    pub fn value(&self) -> u64 {
        if self.num_bytes <= MAX_SHORT_BYTES as u64 {
            return xxh3_64(&self.first[..self.num_bytes as usize]);
        }
        let mut lanes = self.lanes;
        let stripe = self.last[self.num_waiting..].first_chunk();
        let stripe = stripe.expect("there is one before the bytes that wait");
        accumulate_stripe(&mut lanes, stripe, SECRET_BYTES - STRIPE_BYTES - 7);
        let mut value = self.num_bytes.wrapping_mul(PRIME64[0]);
        for (pair, lanes) in lanes.as_chunks::<2>().0.iter().enumerate() {
            let [a, b] = [0, 1].map(|i| lanes[i] ^ word(&SECRET, 11 + 16 * pair + 8 * i));
            let product = u128::from(a) * u128::from(b);
            value = value.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        value ^= value >> 37;
        value = value.wrapping_mul(0x1656_6791_9E37_79F9);
        value ^ (value >> 32)
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("eight bytes from there"))
}

fn accumulate_stripe(lanes: &mut Lanes, stripe: &[u8; STRIPE_BYTES], secret_at: usize) {
    for i in 0..8 {
        let value = word(stripe, 8 * i);
        let keyed = value ^ word(&SECRET, secret_at + 8 * i);
        lanes[i ^ 1] = lanes[i ^ 1].wrapping_add(value);
        lanes[i] = lanes[i].wrapping_add((keyed & 0xffff_ffff) * (keyed >> 32));
    }
}

/// Mixes the lanes at the end of a block.
fn scramble(lanes: &mut Lanes) {
    for (i, lane) in lanes.iter_mut().enumerate() {
        *lane ^= *lane >> 47;
        *lane ^= word(&SECRET, SECRET_BYTES - STRIPE_BYTES + 8 * i);
        *lane = lane.wrapping_mul(PRIME32[0]);
    }
}

fn portable(lanes: &mut Lanes, stripes: &[[u8; STRIPE_BYTES]], mut num_stripes: usize) -> usize {
    for stripe in stripes {
        accumulate_stripe(lanes, stripe, SECRET_STEP * num_stripes);
        num_stripes += 1;
        if num_stripes == STRIPES_PER_BLOCK {
            scramble(lanes);
            num_stripes = 0;
        }
    }
    num_stripes
}

#[cfg(target_arch = "x86_64")]
fn fastest() -> Accumulate {
    fn with_avx2(lanes: &mut Lanes, stripes: &[[u8; STRIPE_BYTES]], num_stripes: usize) -> usize {
        // SAFETY: chosen only on processors with AVX2.
        unsafe { avx2::accumulate(lanes, stripes, num_stripes) }
    }
    match is_x86_feature_detected!("avx2") {
        true => with_avx2,
        false => portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fastest() -> Accumulate {
    portable
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{Lanes, SECRET, SECRET_STEP, STRIPE_BYTES, STRIPES_PER_BLOCK, scramble};

    /// Computes the same as `portable`.
    #[target_feature(enable = "avx2")]
    pub fn accumulate(
        lanes: &mut Lanes,
        stripes: &[[u8; STRIPE_BYTES]],
        mut num_stripes: usize,
    ) -> usize {
        let mut rest = stripes;
        while !rest.is_empty() {
            let len = rest.len().min(STRIPES_PER_BLOCK - num_stripes);
            let (block, others) = rest.split_at(len);
            accumulate_in_block(lanes, block, num_stripes);
            num_stripes += len;
            if num_stripes == STRIPES_PER_BLOCK {
                scramble(lanes);
                num_stripes = 0;
            }
            rest = others;
        }
        num_stripes
    }

    #[target_feature(enable = "avx2")]
    fn accumulate_in_block(lanes: &mut Lanes, stripes: &[[u8; STRIPE_BYTES]], first: usize) {
        assert!(first + stripes.len() <= STRIPES_PER_BLOCK);
        let halves = lanes.as_mut_ptr().cast::<__m256i>();
        // SAFETY: eight lanes are two vectors.
        let mut sums = unsafe {
            [
                _mm256_loadu_si256(halves),
                _mm256_loadu_si256(halves.add(1)),
            ]
        };
        for (i, stripe) in stripes.iter().enumerate() {
            let bytes = stripe.as_ptr().cast::<__m256i>();
            let secret = SECRET[SECRET_STEP * (first + i)..]
                .as_ptr()
                .cast::<__m256i>();
            for (half, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a stripe is two vectors, and so is the secret from any stripe's offset on.
                let (value, secret) = unsafe {
                    let value = _mm256_loadu_si256(bytes.add(half));
                    (value, _mm256_loadu_si256(secret.add(half)))
                };
                let keyed = _mm256_xor_si256(value, secret);
                let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
                let neighbours = _mm256_shuffle_epi32::<0b01_00_11_10>(value);
                *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(product, neighbours));
            }
        }
        // SAFETY: as above.
        unsafe {
            _mm256_storeu_si256(halves, sums[0]);
            _mm256_storeu_si256(halves.add(1), sums[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * i / 3 + i) as u8).collect()
    }

    fn checksum<'a>(accumulate: Accumulate, pieces: impl Iterator<Item = &'a [u8]>) -> u64 {
        let mut checksum = Checksum::new();
        checksum.accumulate = accumulate;
        // `reset` must forget these bytes.
        checksum.update(&[7; 300]);
        checksum.reset();
        pieces.for_each(|piece| checksum.update(piece));
        checksum.value()
    }

    #[test]
    fn every_length_has_the_checksum_that_everybody_knows() {
        let all = bytes(5000);
        for len in (0..2200).chain([4095, 4096, 4097, 5000]) {
            let expected = xxh3_64(&all[..len]);
            for accumulate in [portable, fastest()] {
                let found = checksum(accumulate, std::iter::once(&all[..len]));
                assert_eq!(found, expected, "{len} bytes");
            }
        }
    }

    #[test]
    fn pieces_make_no_difference() {
        let all = bytes(3000);
        let expected = xxh3_64(&all);
        for len in 1..1100 {
            for accumulate in [portable, fastest()] {
                assert_eq!(
                    checksum(accumulate, all.chunks(len)),
                    expected,
                    "pieces of {len} bytes"
                );
            }
        }
        // Pieces of unequal lengths.
        let mut at = 0;
        let uneven = (1usize..).map_while(|i| {
            let len = (i * 37 % 200).min(all.len() - at);
            at += len;
            (at < all.len() || len > 0).then(|| &all[at - len..at])
        });
        assert_eq!(checksum(fastest(), uneven), expected);
    }
}
