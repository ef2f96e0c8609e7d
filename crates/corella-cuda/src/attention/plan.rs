//! The division of a step's attention into items for thread blocks.
//!
//! The division of a step never changes a result: the positions at which the context of a query is cut into splits
//! depend only on the query's position and the model, and the kernels merge splits in their order, from any block
//! (`kernels/attention_item.cuh`). So all other choices here may differ from step to step.

use std::ops::Range;

/// Rows of a tile for decoding. A row is a token's query head.
pub const SMALL_TILE_ROWS: usize = 16;

/// A span with more rows than this is computed in large tiles. For fewer rows, two small tiles, which both read all
/// keys and values, cost less than a mostly empty large tile.
const MAX_ROWS_IN_SMALL_TILES: usize = 2 * SMALL_TILE_ROWS;

/// The shortest split: two blocks of keys. A thread block waits more than a microsecond for its first keys, about as
/// long as it takes to compute a few blocks of keys.
const MIN_SPLIT_SHIFT: u32 = 7;

/// The value for an item that is alone in its task: its results need no partials.
const NO_PARTIALS: u32 = u32::MAX;

/// A run of rows and a range of splits of their contexts. One thread block computes an item for one KV head. The fields
/// match `attention_item.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct AttentionItem {
    pub first_row: u32,
    pub position: u32,
    pub slot: u32,
    pub first_head: u32,
    pub num_rows: u32,
    pub split_shift: u32,
    pub first_split: u32,
    pub num_splits: u32,
    pub task_first_split: u32,
    pub task_num_splits: u32,
    pub num_items: u32,
    pub partial_row: u32,
    pub counter: u32,
}

/// The parameters of a kind of attention that a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    /// Positions that a query sees, including itself.
    pub window: Option<usize>,
    /// Rows of a tile for prompts, if a kernel for them exists.
    pub large_tile_rows: Option<usize>,
}

/// Consecutive positions of a slot, for consecutive rows of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSpan {
    pub slot: u32,
    /// The row of the first token.
    pub first_row: usize,
    pub position: usize,
    pub num_tokens: usize,
}

/// The resources among which work is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLimits {
    /// Concurrent thread blocks of the device.
    pub num_blocks: usize,
    /// Rows of partial results in the available memory.
    pub num_partial_rows: usize,
}

/// The items of a step for one kind of attention.
#[derive(Debug, Default)]
pub struct AttentionPlan {
    pub small: Vec<AttentionItem>,
    pub large: Vec<AttentionItem>,
    tasks: Vec<Task>,
    num_counters: usize,
    num_partial_rows: usize,
}

/// A tile of rows, with all splits of the rows' contexts.
#[derive(Clone, Copy, Debug)]
struct Task {
    /// The undivided task, as one item.
    item: AttentionItem,
    is_large: bool,
    /// Positions read.
    num_positions: usize,
}

impl AttentionShape {
    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// The largest number of splits in a context without a window. Few KV heads need many splits to keep a device busy
    /// with one sequence: an H100 has 132 multiprocessors, and 8 KV heads with 16 splits are 128 blocks.
    fn max_splits(&self) -> usize {
        (128 / self.num_kv_heads).next_power_of_two().clamp(16, 64)
    }

    /// The binary logarithm of the length of the splits for the query at a position. Longer contexts have longer
    /// splits, so that their number stays bounded: 16 splits of 128 positions up to position 2048, of 512 up to 8192.
    /// Each further split costs time: in decoding for starting an item, and in a tile of a prompt for merging sums.
    pub fn split_shift(&self, position: usize) -> u32 {
        let num_seen = (position + 1).min(self.window.unwrap_or(usize::MAX));
        let len = num_seen.div_ceil(self.max_splits()).next_power_of_two();
        len.trailing_zeros().max(MIN_SPLIT_SHIFT)
    }

    /// The first position after `position` whose query has longer splits.
    fn end_of_split_shift(&self, position: usize) -> usize {
        let end = self.max_splits() << self.split_shift(position);
        match self.window {
            Some(window) if end >= window => usize::MAX,
            _ => end,
        }
    }

    fn first_seen(&self, position: usize) -> usize {
        let window = self.window.unwrap_or(usize::MAX);
        (position + 1).saturating_sub(window)
    }

    /// The rows of a large tile, if spans of `num_tokens` tokens are computed in large tiles.
    fn large_tile_rows_for(&self, num_tokens: usize) -> Option<usize> {
        let has_many_rows = num_tokens * self.group() > MAX_ROWS_IN_SMALL_TILES;
        self.large_tile_rows.filter(|_| has_many_rows)
    }

    /// Whether steps with one token per span may need large tiles, because many heads share a KV head.
    pub fn decodes_in_large_tiles(&self) -> bool {
        self.large_tile_rows_for(1).is_some()
    }

    /// The largest number of items in a step of `num_rows` rows, of small and of large tiles together.
    pub fn max_items(&self, num_rows: usize, limits: &PlanLimits) -> usize {
        // Dividing tasks adds at most one item for each share of the work.
        self.max_tasks(num_rows) + limits.num_blocks
    }

    /// The largest number of tasks in a step of `num_rows` rows: one for every token, or several if a token has more
    /// heads than a tile has rows. A task may have a counter for each KV head.
    pub fn max_tasks(&self, num_rows: usize) -> usize {
        num_rows * self.group().div_ceil(SMALL_TILE_ROWS)
    }
}

impl AttentionPlan {
    pub fn clear(&mut self) {
        self.small.clear();
        self.large.clear();
        self.tasks.clear();
        self.num_counters = 0;
        self.num_partial_rows = 0;
    }

    /// Plans a step anew. Items with more work come first, so that blocks that take one item after the
    /// other end at about the same time.
    pub fn build(&mut self, spans: &[AttentionSpan], shape: &AttentionShape, limits: &PlanLimits) {
        self.clear();
        for span in spans {
            let end = span.position + span.num_tokens;
            let mut position = span.position;
            while position < end {
                let run = position..end.min(shape.end_of_split_shift(position));
                position = run.end;
                self.add_tiles(span, run, shape);
            }
        }
        // Sorting is stable, so that equal steps have equal plans.
        self.tasks
            .sort_by_key(|task| std::cmp::Reverse(task.num_positions));
        let num_positions: usize = self.tasks.iter().map(|task| task.num_positions).sum();
        let num_shares = (limits.num_blocks / shape.num_kv_heads).max(1);
        let share = num_positions.div_ceil(num_shares).max(1);
        for index in 0..self.tasks.len() {
            self.divide(self.tasks[index], share, shape, limits);
        }
    }

    /// Adds the tiles of positions with splits of one length.
    fn add_tiles(&mut self, span: &AttentionSpan, run: Range<usize>, shape: &AttentionShape) {
        let group = shape.group();
        let num_rows = run.len() * group;
        let large_tile_rows = shape.large_tile_rows_for(span.num_tokens);
        let is_large = large_tile_rows.is_some();
        let tile_rows = large_tile_rows.unwrap_or(SMALL_TILE_ROWS);
        let split_shift = shape.split_shift(run.start);
        for first in (0..num_rows).step_by(tile_rows) {
            let num_rows = tile_rows.min(num_rows - first);
            let position = run.start + first / group;
            let last_position = run.start + (first + num_rows - 1) / group;
            let first_seen = shape.first_seen(position);
            let first_split = first_seen >> split_shift;
            let num_splits = (last_position >> split_shift) - first_split + 1;
            self.tasks.push(Task {
                item: AttentionItem {
                    first_row: (span.first_row + position - span.position) as u32,
                    position: position as u32,
                    slot: span.slot,
                    first_head: (first % group) as u32,
                    num_rows: num_rows as u32,
                    split_shift,
                    first_split: first_split as u32,
                    num_splits: num_splits as u32,
                    task_first_split: first_split as u32,
                    task_num_splits: num_splits as u32,
                    num_items: 1,
                    partial_row: NO_PARTIALS,
                    counter: 0,
                },
                is_large,
                num_positions: last_position + 1 - first_seen,
            });
        }
    }

    /// Adds a task as one item, or as several if it clearly exceeds a thread block's share and its partial results fit
    /// into memory.
    fn divide(&mut self, task: Task, share: usize, shape: &AttentionShape, limits: &PlanLimits) {
        let Task { item, is_large, .. } = task;
        let items = match is_large {
            true => &mut self.large,
            false => &mut self.small,
        };
        let num_splits = item.num_splits as usize;
        let num_items = num_splits.min(task.num_positions.div_ceil(share));
        let num_partial_rows = num_splits * shape.num_kv_heads * item.num_rows as usize;
        if 4 * task.num_positions <= 5 * share
            || num_items == 1
            || self.num_partial_rows + num_partial_rows > limits.num_partial_rows
        {
            items.push(item);
            return;
        }
        for index in 0..num_items {
            let first = index * num_splits / num_items;
            let end = (index + 1) * num_splits / num_items;
            items.push(AttentionItem {
                first_split: item.first_split + first as u32,
                num_splits: (end - first) as u32,
                num_items: num_items as u32,
                partial_row: self.num_partial_rows as u32,
                counter: self.num_counters as u32,
                ..item
            });
        }
        self.num_partial_rows += num_partial_rows;
        self.num_counters += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: PlanLimits = PlanLimits {
        num_blocks: 264,
        num_partial_rows: 1 << 15,
    };

    fn shape(heads: usize, kv_heads: usize, window: Option<usize>) -> AttentionShape {
        AttentionShape {
            num_heads: heads,
            num_kv_heads: kv_heads,
            window,
            large_tile_rows: Some(128),
        }
    }

    fn span(first_row: usize, position: usize, num_tokens: usize) -> AttentionSpan {
        AttentionSpan {
            slot: first_row as u32,
            first_row,
            position,
            num_tokens,
        }
    }

    fn plan(spans: &[AttentionSpan], shape: &AttentionShape, limits: PlanLimits) -> AttentionPlan {
        let mut plan = AttentionPlan::default();
        plan.build(spans, shape, &limits);
        plan
    }

    /// Each row and split that an item computes: the step's row, the head of the group, the split, the
    /// length of splits.
    fn work(plan: &AttentionPlan, shape: &AttentionShape) -> Vec<(usize, usize, u32, u32)> {
        let group = shape.group();
        let mut work = Vec::new();
        for item in plan.small.iter().chain(&plan.large) {
            for row in 0..item.num_rows as usize {
                let row = item.first_head as usize + row;
                let position = item.position as usize + row / group;
                let shift = item.split_shift;
                assert_eq!(shift, shape.split_shift(position));
                for split in item.first_split..item.first_split + item.num_splits {
                    // The tile may have splits that this row does not see. They are not the row's work.
                    let seen = shape.first_seen(position) >> shift..=position >> shift;
                    if seen.contains(&(split as usize)) {
                        let first_row = item.first_row as usize;
                        work.push((first_row + row / group, row % group, split, shift));
                    }
                }
            }
        }
        work.sort_unstable();
        work
    }

    #[test]
    fn every_row_has_all_its_splits_once() {
        let spans = [
            span(0, 0, 1),
            span(1, 9000, 1),
            span(2, 2000, 301),
            span(303, 70_000, 5),
            span(308, 5, 30),
        ];
        for shape in [
            shape(32, 8, None),
            shape(7, 1, None),
            shape(6, 2, Some(100)),
            shape(48, 2, Some(4096)),
            shape(40, 1, None),
        ] {
            for limits in [
                LIMITS,
                PlanLimits {
                    num_blocks: 1,
                    ..LIMITS
                },
                PlanLimits {
                    num_blocks: 100_000,
                    num_partial_rows: 1 << 20,
                },
            ] {
                let plan = plan(&spans, &shape, limits);
                let mut wanted = Vec::new();
                for span in &spans {
                    for token in 0..span.num_tokens {
                        let position = span.position + token;
                        let shift = shape.split_shift(position);
                        for head in 0..shape.group() {
                            for split in shape.first_seen(position) >> shift..=position >> shift {
                                wanted.push((span.first_row + token, head, split as u32, shift));
                            }
                        }
                    }
                }
                assert!(work(&plan, &shape) == wanted, "{shape:?}, {limits:?}");
                let num_rows = spans.iter().map(|span| span.num_tokens).sum();
                let num_items = plan.small.len() + plan.large.len();
                assert!(num_items <= shape.max_items(num_rows, &limits));
                assert!(plan.num_counters <= shape.max_tasks(num_rows));
                assert!(plan.num_partial_rows <= limits.num_partial_rows);
            }
        }
    }

    #[test]
    fn splits_depend_on_the_position_alone_and_their_number_is_bounded() {
        for (shape, most) in [
            (shape(32, 8, None), 16),
            (shape(8, 2, None), 64),
            (shape(4, 4, Some(1000)), 17),
        ] {
            let mut before = 0;
            for position in (0..300_000).step_by(61) {
                let shift = shape.split_shift(position);
                assert!(shift >= before);
                before = shift;
                let num_splits = (position >> shift) - (shape.first_seen(position) >> shift) + 1;
                assert!(num_splits <= most, "{position}: {num_splits}");
            }
        }
    }

    #[test]
    fn one_sequence_is_divided_and_many_are_not() {
        let shape = shape(32, 8, None);
        let alone = plan(&[span(0, 8191, 1)], &shape, LIMITS);
        assert_eq!(alone.small.len(), 16);
        assert!(alone.small.iter().all(|item| item.num_items == 16));
        assert_eq!(alone.num_partial_rows, 16 * 8 * 4);

        let many: Vec<_> = (0..64).map(|row| span(row, 1024, 1)).collect();
        let many = plan(&many, &shape, LIMITS);
        assert_eq!(many.small.len(), 64);
        assert!(
            many.small
                .iter()
                .all(|item| item.partial_row == NO_PARTIALS)
        );

        // One long context among short ones would otherwise end long after them.
        let mut mixed: Vec<_> = (0..64).map(|row| span(row, 100, 1)).collect();
        mixed.push(span(64, 100_000, 1));
        let mixed = plan(&mixed, &shape, LIMITS);
        let num_long = mixed.small.iter().filter(|item| item.slot == 64).count();
        assert_eq!(num_long, 13);
        assert_eq!(mixed.small[0].slot, 64);
    }

    #[test]
    fn prompts_are_computed_in_large_tiles_where_there_are_any() {
        let mut shape = shape(32, 8, None);
        assert!(!shape.decodes_in_large_tiles());
        let spans = [span(0, 0, 100), span(100, 50, 8), span(108, 50, 1)];
        let tiles = plan(&spans, &shape, LIMITS);
        let rows = |items: &[AttentionItem]| items.iter().map(|item| item.num_rows).sum::<u32>();
        assert_eq!((rows(&tiles.large), rows(&tiles.small)), (400, 36));
        shape.large_tile_rows = None;
        let tiles = plan(&spans, &shape, LIMITS);
        assert_eq!((rows(&tiles.large), rows(&tiles.small)), (0, 436));
    }

    #[test]
    fn heads_that_share_a_kv_head_in_great_numbers_are_decoded_in_large_tiles() {
        let shape = shape(40, 1, None);
        assert!(shape.decodes_in_large_tiles());
        let tiles = plan(&[span(0, 500, 1)], &shape, LIMITS);
        assert!(tiles.small.is_empty() && !tiles.large.is_empty());
    }
}
