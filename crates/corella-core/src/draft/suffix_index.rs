//! Finds earlier positions in a token sequence that follow the same tokens as its end.
//!
//! An index of hash chains, as in LZ77 coders (RFC 1951, section 4): positions whose last few tokens have the same hash
//! form a list, newest first. A list only yields candidates. Comparing their tokens gives the length of each match.

use alloc::vec::Vec;

use crate::TokenId;

/// An index of all positions of one text. It takes 8 to 12 bytes for each token.
#[derive(Debug, Default)]
pub(crate) struct SuffixIndex {
    /// For each hash, the newest position whose last `MIN_MATCH` tokens have that hash, or 0 for none. The length is a
    /// power of two.
    heads: Vec<u32>,
    /// Next older position with the same hash, for each position, or 0 for none.
    older: Vec<u32>,
}

/// Shorter matches are common and useless for prediction.
const MIN_MATCH: usize = 3;
/// Longer matches do not predict better, so comparing stops here.
const MAX_MATCH: usize = 32;
/// The most positions that one look-up compares.
const MAX_CANDIDATES: usize = 16;
const MIN_HEADS: usize = 64;

impl SuffixIndex {
    /// Finds the earlier position whose preceding tokens match the end of `tokens` for the longest stretch. Of equally
    /// long matches, the newest counts. `tokens` must begin with the tokens of the last call.
    pub fn longest_match(&mut self, tokens: &[TokenId]) -> Option<usize> {
        self.insert(tokens);
        let (mut best, mut best_len) = (None, 0);
        let mut candidate = *self.older.get(tokens.len())? as usize;
        for _ in 0..MAX_CANDIDATES {
            if candidate == 0 {
                break;
            }
            let pairs = tokens.iter().rev().zip(tokens[..candidate].iter().rev());
            let len = pairs.take(MAX_MATCH).take_while(|(a, b)| a == b).count();
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
            // Doubling the size makes the amortised cost of a token constant.
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

/// FNV-1a over the tokens, then Fibonacci hashing to select the list.
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

    /// The same search by comparing every position.
    fn naive(tokens: &[TokenId]) -> Option<usize> {
        let len_at = |end: usize| {
            let pairs = tokens.iter().rev().zip(tokens[..end].iter().rev());
            pairs.take(MAX_MATCH).take_while(|(a, b)| a == b).count()
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

    /// With an alphabet of six tokens no list exceeds the candidates of one look-up.
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
            // Indexing all tokens at once, as for a prompt, gives the same result as indexing them one by one.
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
