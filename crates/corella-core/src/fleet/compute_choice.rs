//! The node that computes a prompt: a prefill node, or a decode node with a part of the prompt.

use core::cmp::Ordering;

use crate::stats::SchedulerStats;

/// The assumed bandwidth of a link before its first transfer, in bytes per second: a gigabit per second, the slowest
/// network between servers. If the link is quicker, a decode node may compute the rest of a prompt although sending
/// rows would be quicker, which costs little. If a slow link were assumed to be quick, sending rows could take any
/// amount of time. Prompts that no decode node has in part are sent anyway, so the speed soon becomes known.
pub(crate) const ASSUMED_BANDWIDTH: u64 = 125_000_000;

/// A node that computes a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputePlace {
    /// The prefill node. It then sends the rows that the decode node lacks.
    Here,
    /// The decode node. No rows are sent.
    There,
}

/// A node that may compute a prompt, and its state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComputeSite {
    /// Leading rows of the prompt in the node's prefix tree.
    pub num_cached_rows: u32,
    /// Prompt tokens that the node computes first.
    pub num_queued_tokens: u64,
    /// The time for 1,024 prompt tokens, in microseconds; 0 before any were timed.
    pub prefill_us: u64,
}

impl ComputeSite {
    /// Returns the site of a node by its engine's state. Large steps show a node's speed. Before a large step was
    /// timed, all steps count.
    pub fn of(stats: &SchedulerStats, num_cached_rows: u32) -> Self {
        let prefill_us = match stats.bulk_prefill_us {
            0 => stats.prefill_us,
            bulk_us => bulk_us,
        };
        Self {
            num_cached_rows,
            num_queued_tokens: stats.num_queued_tokens,
            prefill_us,
        }
    }
}

/// The predicted costs of computing a prompt on a prefill node and on a decode node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeCost {
    pub num_prompt_tokens: u32,
    pub here: ComputeSite,
    pub there: ComputeSite,
    /// The time in which the prefill node fetches the rows that only the decode node has, in microseconds; `None` if it
    /// computes them.
    pub fetch_us: Option<u64>,
    /// Requests that decode on the decode node. Each of them waits for the prompt.
    pub num_running_there: u32,
    pub kv_bytes_per_token: u64,
    /// Bytes per second over the link to the decode node; `None` counts as a gigabit per second.
    pub bandwidth: Option<u64>,
}

impl ComputeCost {
    /// Compares the delays of both choices. For a prompt of n tokens, c of them cached, after q queued tokens, at p per
    /// token, with b bytes of a row at B bytes per second, and r requests that decode there:
    ///
    /// ```text
    /// here  = (q + max(n - c, 1)) p + (n - c_there) b / B
    /// there = (q + max(n - c, 1) (1 + r)) p
    /// ```
    ///
    /// If that is quicker, the rows that only the decode node has are fetched in a time F instead of computed:
    ///
    /// ```text
    /// here  = F + (q + max(n - c_there, 1)) p + (n - c_there) b / B
    /// ```
    ///
    /// The last token is always computed, for its logits. The chunked prefill of the rest delays each request that
    /// decodes there, and that delay counts as much as this request's. Delays of requests on a prefill node do not
    /// count, because prompts are computed beside them in any case. A decode node that has not timed a prompt counts as
    /// fast as this node. Before this node has timed a prompt, no cost can be predicted, and the prompt is computed
    /// here.
    ///
    /// If the costs are equal, a decode node that has rows of the prompt computes it, because then no rows are sent.
    pub fn place(&self) -> ComputePlace {
        if self.here.prefill_us == 0 {
            return ComputePlace::Here;
        }
        let is_there = match self.there_cost().cmp(&self.here_cost()) {
            Ordering::Less => true,
            Ordering::Equal => self.there.num_cached_rows > 0,
            Ordering::Greater => false,
        };
        match is_there {
            true => ComputePlace::There,
            false => ComputePlace::Here,
        }
    }

    /// The cost here, in 1/1024 us like the other cost, because a token may take less than a microsecond.
    fn here_cost(&self) -> u128 {
        let ComputeSite {
            num_queued_tokens,
            prefill_us,
            ..
        } = self.here;
        let computing = |site: ComputeSite| {
            let num_computed = u128::from(num_queued_tokens) + self.num_uncached(site);
            num_computed.saturating_mul(prefill_us.into())
        };
        let fetching = self.fetch_us.map(|fetch_us| {
            let fetching = u128::from(fetch_us) * 1024;
            fetching.saturating_add(computing(self.there))
        });
        let computing = computing(self.here).min(fetching.unwrap_or(u128::MAX));
        let num_missing = self
            .num_prompt_tokens
            .saturating_sub(self.there.num_cached_rows);
        let num_bytes = u128::from(num_missing) * u128::from(self.kv_bytes_per_token);
        let bandwidth = self.bandwidth.unwrap_or(ASSUMED_BANDWIDTH);
        let sending = num_bytes.saturating_mul(1024 * 1_000_000) / u128::from(bandwidth.max(1));
        computing.saturating_add(sending)
    }

    fn there_cost(&self) -> u128 {
        let prefill_us = match self.there.prefill_us {
            0 => self.here.prefill_us,
            measured_us => measured_us,
        };
        let num_delayed = 1 + u128::from(self.num_running_there);
        let num_computed =
            u128::from(self.there.num_queued_tokens) + self.num_uncached(self.there) * num_delayed;
        num_computed.saturating_mul(prefill_us.into())
    }

    fn num_uncached(&self, site: ComputeSite) -> u128 {
        let num_uncached = self.num_prompt_tokens.saturating_sub(site.num_cached_rows);
        num_uncached.max(1).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,000 tokens, 1 us for a token on both nodes, 1 KB for a row, no cached rows, no queued tokens and no running
    /// requests.
    const COST: ComputeCost = ComputeCost {
        num_prompt_tokens: 1000,
        here: site(0, 0, 1024),
        there: site(0, 0, 1024),
        fetch_us: None,
        num_running_there: 0,
        kv_bytes_per_token: 1000,
        bandwidth: QUICK,
    };

    /// A link that takes no time.
    const QUICK: Option<u64> = Some(u64::MAX);

    const fn site(num_cached_rows: u32, num_queued_tokens: u64, prefill_us: u64) -> ComputeSite {
        ComputeSite {
            num_cached_rows,
            num_queued_tokens,
            prefill_us,
        }
    }

    /// Each case was worked out by hand.
    #[test]
    fn the_choice_that_delays_less_is_made() {
        let is_there = |cost: ComputeCost| cost.place() == ComputePlace::There;
        // 1,000 us on both.
        assert!(!is_there(COST));
        // 100 us there, 1,000 us beside nine requests there, and 1,100 us beside ten. 1,000 us equals the cost here,
        // but then no rows are sent.
        let turn = ComputeCost {
            there: site(900, 0, 1024),
            ..COST
        };
        assert!(is_there(turn));
        let beside = |num_running_there| ComputeCost {
            num_running_there,
            ..turn
        };
        assert!(is_there(beside(9)));
        assert!(!is_there(beside(10)));
        // 100 rows of 1 KB take 1,000 us at 100 MB/s: 2,000 us here, and up to 2,000 there.
        let over_link = |num_running_there| ComputeCost {
            bandwidth: Some(100_000_000),
            ..beside(num_running_there)
        };
        assert!(is_there(over_link(19)));
        assert!(!is_there(over_link(20)));
        // An unknown link takes a gigabit per second: 100 rows take 800 us, so the cost here is 1,800 us.
        let over_unknown = |num_running_there| ComputeCost {
            bandwidth: None,
            ..beside(num_running_there)
        };
        assert!(is_there(over_unknown(17)));
        assert!(!is_there(over_unknown(18)));
        // This node has 950 rows, and computes the other 50; the decode node computes 100.
        let cached_here = ComputeCost {
            here: site(950, 0, 1024),
            ..turn
        };
        assert!(!is_there(cached_here));
        // With 60 tokens in its queue, this node needs 110 us.
        let queued_here = ComputeCost {
            here: site(950, 60, 1024),
            ..turn
        };
        assert!(is_there(queued_here));
        // 900 queued tokens there make the cost 1,000 us, and 901 make it 1,001.
        let queued_there = |num_queued_tokens| ComputeCost {
            there: site(900, num_queued_tokens, 1024),
            ..COST
        };
        assert!(!is_there(queued_there(901)));
        assert!(is_there(queued_there(900)));
        // The decode node is eleven times slower: 1,100 us. If it has timed no prompt, it counts as fast as this node:
        // 100 us.
        let slow = ComputeCost {
            there: site(900, 0, 11_264),
            ..COST
        };
        assert!(!is_there(slow));
        let unmeasured = ComputeCost {
            there: site(900, 0, 0),
            ..COST
        };
        assert!(is_there(unmeasured));
        // This node has timed no prompt.
        let unknown = ComputeCost {
            here: site(0, 0, 0),
            ..turn
        };
        assert!(!is_there(unknown));
    }

    /// If both nodes have the whole prompt cached, each of them computes one token.
    #[test]
    fn the_last_token_is_computed_in_any_case() {
        let whole = ComputeCost {
            here: site(1000, 0, 1024),
            there: site(1000, 0, 1024),
            ..COST
        };
        assert_eq!(whole.place(), ComputePlace::There);
        let beside_one = ComputeCost {
            num_running_there: 1,
            ..whole
        };
        assert_eq!(beside_one.place(), ComputePlace::Here);
        let two_queued = ComputeCost {
            here: site(1000, 2, 1024),
            num_running_there: 1,
            ..whole
        };
        assert_eq!(two_queued.place(), ComputePlace::There);
        let four_delayed = ComputeCost {
            num_running_there: 3,
            ..two_queued
        };
        assert_eq!(four_delayed.place(), ComputePlace::Here);
    }

    /// The prefill node fetches the 900 rows of the decode node, if that is faster than computing the rows it lacks.
    #[test]
    fn fetched_rows_are_not_computed() {
        let is_there = |fetch_us, num_running_there| {
            let cost = ComputeCost {
                there: site(900, 0, 1024),
                fetch_us: Some(fetch_us),
                num_running_there,
                ..COST
            };
            cost.place() == ComputePlace::There
        };
        // 100 us on both nodes: at equal costs the decode node computes, and no row is sent.
        assert!(is_there(0, 0));
        // Beside one request, the decode node takes 200 us. This node takes 199, 200 and 201 us.
        assert!(!is_there(99, 1));
        assert!(is_there(100, 1));
        assert!(is_there(101, 1));
        // Computing all rows takes 1,000 us here. The decode node takes 1,000 us beside nine requests, and 1,100 us
        // beside ten.
        assert!(is_there(10_000, 9));
        assert!(!is_there(10_000, 10));
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let largest = site(0, u64::MAX, u64::MAX);
        let cost = ComputeCost {
            num_prompt_tokens: u32::MAX,
            here: largest,
            there: largest,
            fetch_us: Some(u64::MAX),
            num_running_there: u32::MAX,
            kv_bytes_per_token: u64::MAX,
            bandwidth: Some(0),
        };
        assert_eq!(cost.place(), ComputePlace::Here);
    }
}
