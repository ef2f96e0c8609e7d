//! Where in a text its newest tokens have stood before.
//!
//! Hash chains, as LZ77 coders keep them (RFC 1951, section 4): positions with equal hashes of the
//! few tokens before them form a list, the newest first. A list leads to candidates only; how well
//! they fit is found by comparing tokens.

use alloc::vec::Vec;

use crate::TokenId;

/// Grows with the text, 8 to 12 bytes a token.
#[derive(Debug, Default)]
pub(crate) struct SuffixIndex {
    /// By hash: the newest position behind such tokens, 0 for none. A power of two of them.
    heads: Vec<u32>,
    /// By position: the next older one with the same hash, 0 for none.
    older: Vec<u32>,
}

/// Fewer tokens than these are found everywhere.
const MIN_MATCH: usize = 3;
/// A longer match is no better.
const MAX_MATCH: usize = 32;
/// Positions that one look-up compares.
const MAX_CANDIDATES: usize = 16;
const MIN_HEADS: usize = 64;

impl SuffixIndex {
    /// Where the longest match of the end of `tokens` with an earlier part of it ends; of equally
    /// long ones the newest. `tokens` begin with those of the last call.
    pub fn longest_match(&mut self, tokens: &[TokenId]) -> Option<usize> {
        self.insert(tokens);
        let (mut best, mut best_len) = (None, 0);
        let mut candidate = *self.older.get(tokens.len())? as usize;
        for _ in 0..MAX_CANDIDATES {
            if candidate == 0 {
                break;
            }
            let pairs = tokens.iter().rev().zip(tokens[..candidate].iter().rev());
            let len = { pairs }
                .take(MAX_MATCH)
                .take_while(|(a, b)| a == b)
                .count();
            if len >= MIN_MATCH && len > best_len {
                (best, best_len) = (Some(candidate), len);
            }
            if best_len == MAX_MATCH {
                break;
            }
            candidate = self.older[candidate] as usize;
        }
        best
    }

    fn insert(&mut self, tokens: &[TokenId]) {
        if tokens.len() >= self.heads.len() {
            // Doubling, so that a token's share of the work is constant.
            let num_heads = (2 * tokens.len()).next_power_of_two().max(MIN_HEADS);
            self.heads = alloc::vec![0; num_heads];
            self.older.clear();
        }
        let num_heads = self.heads.len();
        for position in self.older.len()..=tokens.len() {
            let head = match position.checked_sub(MIN_MATCH) {
                Some(start) => &mut self.heads[hash(&tokens[start..position], num_heads)],
                None => &mut 0,
            };
            self.older.push(core::mem::replace(head, position as u32));
        }
    }
}

/// FNV-1a by tokens, spread by Fibonacci's multiplier.
fn hash(tokens: &[TokenId], num_heads: usize) -> usize {
    let mixed = tokens.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &token| {
        (hash ^ u64::from(token)).wrapping_mul(0x100_0000_01b3)
    });
    let spread = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (spread >> (64 - num_heads.trailing_zeros())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By trying every place.
    fn naive(tokens: &[TokenId]) -> Option<usize> {
        let len_at = |end: usize| {
            let pairs = tokens.iter().rev().zip(tokens[..end].iter().rev());
            { pairs }
                .take(MAX_MATCH)
                .take_while(|(a, b)| a == b)
                .count()
        };
        (1..tokens.len())
            .map(|end| (len_at(end), end))
            .filter(|(len, _)| *len >= MIN_MATCH)
            .max()
            .map(|(_, end)| end)
    }

    fn text(mut seed: u64, len: usize, alphabet: u64) -> Vec<TokenId> {
        let next = |_| {
            seed = seed
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            ((seed >> 33) % alphabet) as TokenId
        };
        (0..len).map(next).collect()
    }

    /// With so many letters no list is longer than what one look-up compares.
    #[test]
    fn what_is_found_is_the_longest_and_newest() {
        let mut num_found = 0;
        for seed in 0..20 {
            let tokens = text(seed, 150, 6);
            let mut index = SuffixIndex::default();
            for len in 0..=tokens.len() {
                let expected = naive(&tokens[..len]);
                assert_eq!(
                    index.longest_match(&tokens[..len]),
                    expected,
                    "{seed}, {len}"
                );
                num_found += usize::from(expected.is_some());
            }
            // All at once, as for a prompt, and token by token are the same.
            let mut at_once = SuffixIndex::default();
            assert_eq!(at_once.longest_match(&tokens), naive(&tokens));
        }
        assert!(num_found > 500, "{num_found}");
    }

    #[test]
    fn a_match_may_reach_into_itself() {
        let mut index = SuffixIndex::default();
        assert_eq!(index.longest_match(&[7; 3]), None);
        assert_eq!(index.longest_match(&[7; 4]), Some(3));
        assert_eq!(index.longest_match(&[7; 200]), Some(199));
    }

    #[test]
    fn a_look_up_is_bounded_and_what_it_finds_is_real() {
        let tokens = text(1, 5000, 2);
        let mut index = SuffixIndex::default();
        for len in (0..=tokens.len()).step_by(7) {
            if let Some(end) = index.longest_match(&tokens[..len]) {
                assert_eq!(tokens[end - MIN_MATCH..end], tokens[len - MIN_MATCH..len]);
            }
        }
    }
}
