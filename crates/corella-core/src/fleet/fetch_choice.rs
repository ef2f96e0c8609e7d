//! Compute or fetch: the number of a request's blocks to fetch.

/// The measured costs of computing a request's blocks and of fetching them from a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchCost {
    /// The number of blocks of the prompt that this node lacks.
    pub num_blocks: u32,
    /// The number of these blocks that the source has, from the first on.
    pub num_offered: u32,
    /// The time that the request would wait before it starts.
    pub queue_us: u64,
    /// The time from the decision until the source begins to send.
    pub round_trip_us: u64,
    /// The time to fetch 1,024 blocks, and the time to compute them. One block may take less than a microsecond.
    pub fetch_kiloblock_us: u64,
    pub compute_kiloblock_us: u64,
}

impl FetchCost {
    /// The time to the first token, in 1/1024 us, if the first `num_fetched` blocks are fetched and the others
    /// computed: max(Q, r + k f) + (n − k) c, without a round trip if none is fetched.
    fn ttft(&self, num_fetched: u32) -> u128 {
        let queue = u128::from(self.queue_us) * 1024;
        let fetch = u128::from(num_fetched) * u128::from(self.fetch_kiloblock_us);
        let start = match num_fetched {
            0 => queue,
            _ => queue.max(u128::from(self.round_trip_us) * 1024 + fetch),
        };
        let num_computed = self.num_blocks - num_fetched;
        start + u128::from(num_computed) * u128::from(self.compute_kiloblock_us)
    }

    /// The number of blocks to fetch, from the first on: 0 if computing all is as quick. If two numbers of blocks give
    /// the same time, the smaller number is chosen, because a fetch loads the source.
    ///
    /// Fetching costs nothing as long as the queue hides it, and k f + (n − k) c is linear from there on. So the time
    /// is least for no block, for all blocks, or for one of two numbers: the blocks that the queue hides, and one block
    /// more.
    pub fn num_to_fetch(&self) -> u32 {
        let limit = self.num_blocks.min(self.num_offered);
        let hidden_us = self.queue_us.saturating_sub(self.round_trip_us);
        let hidden = u128::from(hidden_us) * 1024;
        let num_hidden = hidden
            .checked_div(self.fetch_kiloblock_us.into())
            .map_or(limit, |num| num.min(limit.into()) as u32);
        let candidates = [0, num_hidden, (num_hidden + 1).min(limit), limit];
        let best = candidates
            .into_iter()
            .min_by_key(|&num_fetched| (self.ttft(num_fetched), num_fetched));
        best.unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::kv_cache_model::below;

    /// Times of one block in us.
    fn cost(
        num_blocks: u32,
        queue_us: u64,
        round_trip_us: u64,
        fetch: u64,
        compute: u64,
    ) -> FetchCost {
        FetchCost {
            num_blocks,
            num_offered: num_blocks,
            queue_us,
            round_trip_us,
            fetch_kiloblock_us: fetch * 1024,
            compute_kiloblock_us: compute * 1024,
        }
    }

    /// Each case was worked out by hand.
    #[test]
    fn what_is_quicker_is_chosen() {
        // A fetch of all takes 50 + 10 × 10 = 150 us, computing them 10 × 100 = 1,000.
        assert_eq!(cost(10, 0, 50, 10, 100).num_to_fetch(), 10);
        // Two blocks take 40 us to compute, and 50 + 2 to fetch.
        assert_eq!(cost(2, 0, 50, 1, 20).num_to_fetch(), 0);
        // Fetching a block is slower than computing it. The queue hides five of ten blocks: 100 + 5 × 50 = 350 us. A
        // sixth adds 50 us and saves 20.
        assert_eq!(cost(10, 350, 100, 50, 20).num_to_fetch(), 5);
        // The queue hides nothing.
        assert_eq!(cost(10, 100, 100, 50, 20).num_to_fetch(), 0);
        // The queue of 320 us hides four blocks and a part of the fifth. The fifth ends at 350 us, and saves 40 us.
        assert_eq!(cost(10, 320, 100, 50, 40).num_to_fetch(), 5);
        // The queue is longer than the fetch.
        assert_eq!(cost(10, 10_000, 100, 50, 20).num_to_fetch(), 10);
        // Both are equally quick.
        assert_eq!(cost(10, 0, 0, 20, 20).num_to_fetch(), 0);
        // The source has three blocks.
        let offered = FetchCost {
            num_offered: 3,
            ..cost(10, 0, 50, 10, 100)
        };
        assert_eq!(offered.num_to_fetch(), 3);
        // Half a microsecond for a block, and costs of 0 before any measurement.
        let fine = FetchCost {
            fetch_kiloblock_us: 512,
            ..cost(10, 0, 4, 0, 1)
        };
        assert_eq!(fine.num_to_fetch(), 10);
        assert_eq!(cost(0, 0, 0, 0, 0).num_to_fetch(), 0);
    }

    /// Tries all numbers of blocks.
    #[test]
    fn no_other_number_of_blocks_is_quicker() {
        let random = &mut 1;
        let mut counts = [0; 3];
        for _ in 0..20_000 {
            let num_blocks = below(random, 40) as u32;
            let cost = FetchCost {
                num_blocks,
                num_offered: below(random, 50) as u32,
                queue_us: below(random, 2) * below(random, 3_000),
                round_trip_us: below(random, 500),
                fetch_kiloblock_us: below(random, 100_000),
                compute_kiloblock_us: below(random, 100_000),
            };
            let limit = num_blocks.min(cost.num_offered);
            let mut best = (u128::MAX, 0);
            for num_fetched in 0..=limit {
                let queue = u128::from(cost.queue_us) * 1024;
                let mut at = queue;
                if num_fetched > 0 {
                    let mut ready = u128::from(cost.round_trip_us) * 1024;
                    for _ in 0..num_fetched {
                        ready += u128::from(cost.fetch_kiloblock_us);
                    }
                    at = at.max(ready);
                }
                for _ in num_fetched..num_blocks {
                    at += u128::from(cost.compute_kiloblock_us);
                }
                best = best.min((at, num_fetched));
            }
            assert_eq!(cost.num_to_fetch(), best.1, "{cost:?}");
            counts[usize::from(best.1 > 0) + usize::from(best.1 > 0 && best.1 < limit)] += 1;
        }
        assert!(counts.iter().all(|&count| count > 300), "{counts:?}");
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let cost = FetchCost {
            num_blocks: u32::MAX,
            num_offered: u32::MAX,
            queue_us: u64::MAX,
            round_trip_us: u64::MAX,
            fetch_kiloblock_us: u64::MAX,
            compute_kiloblock_us: u64::MAX,
        };
        assert_eq!(cost.num_to_fetch(), 0);
    }
}
