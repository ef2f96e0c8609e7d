//! The XXH3-64 checksum of payloads.
//!
//! After copying, the checksum is the largest part of the work for each byte. `twox-hash` chooses AVX2 when it runs, but
//! at half the speed of `xxhash-rust` with SSE2 unless its caller is compiled as one unit (13 beside 21 GB/s, 26 at
//! best).

use xxhash_rust::xxh3::Xxh3;

/// Takes bytes in pieces of any size.
pub struct Checksum(Xxh3);

impl Checksum {
    pub fn new() -> Self {
        Self(Xxh3::new())
    }

    pub fn reset(&mut self) {
        self.0.reset();
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn value(&self) -> u64 {
        self.0.digest()
    }
}

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    #[test]
    fn pieces_of_any_size_have_the_checksum_of_xxh3() {
        let all: Vec<u8> = (0usize..5000).map(|i| (i * i / 3 + i) as u8).collect();
        let mut checksum = Checksum::new();
        for num_bytes in (0..1100).chain([4095, 4096, 4097, 5000]) {
            let bytes = &all[..num_bytes];
            for len in [1, 63, 64, 65, 300, 5000] {
                checksum.update(&[7; 300]);
                checksum.reset();
                bytes.chunks(len).for_each(|piece| checksum.update(piece));
                let expected = xxh3_64(bytes);
                assert_eq!(checksum.value(), expected, "{num_bytes} bytes by {len}");
            }
        }
    }
}
