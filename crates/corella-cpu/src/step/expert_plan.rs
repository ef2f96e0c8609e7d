//! The assignment of rows to experts.
//!
//! Rows are gathered by expert, in the order of the experts' ids, and within an expert in the order of the step. So
//! each expert's weights are read once per step.

use std::io;

use corella_model::{ExpertScoring, ExpertSpec};

use crate::dense::Tiles;
use crate::system::Region;

/// An expert of a row, and the factor of the expert's output.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Choice {
    pub expert: u32,
    pub weight: f32,
}

/// The experts of each row of a step, in the order of the experts' ids.
pub struct Choices {
    region: Region,
    max_rows: usize,
    stride: usize,
}

impl Choices {
    pub fn new(max_rows: usize, num_experts_per_token: usize) -> io::Result<Self> {
        let len = max_rows * num_experts_per_token;
        Ok(Self {
            region: Region::new(len * size_of::<Choice>())?,
            max_rows,
            stride: num_experts_per_token,
        })
    }

    /// # Safety
    /// The row is not written while the slice is in use.
    pub unsafe fn row(&self, row: usize, num_experts: usize) -> &[Choice] {
        // SAFETY: the row lies inside the region, which holds zeros from the start.
        unsafe { std::slice::from_raw_parts(self.row_ptr(row), self.checked(num_experts)) }
    }

    /// # Safety
    /// No other thread uses the row while the slice is in use.
    #[expect(clippy::mut_from_ref, reason = "workers write different rows")]
    pub unsafe fn row_mut(&self, row: usize, num_experts: usize) -> &mut [Choice] {
        // SAFETY: the row lies inside the region, which holds zeros from the start.
        unsafe { std::slice::from_raw_parts_mut(self.row_ptr(row), self.checked(num_experts)) }
    }

    fn row_ptr(&self, row: usize) -> *mut Choice {
        assert!(row < self.max_rows);
        // SAFETY: the assertion above keeps the access in bounds.
        unsafe { self.region.as_ptr().cast::<Choice>().add(row * self.stride) }
    }

    fn checked(&self, num_experts: usize) -> usize {
        assert!(num_experts <= self.stride);
        num_experts
    }
}

/// Chooses the experts of a row. `logits`, which are turned into scores, are the router's outputs for all experts. The
/// experts with the highest scores are chosen, and among experts with equal scores those with the lowest ids.
pub fn choose(spec: &ExpertSpec, logits: &mut [f32], bias: Option<&[f32]>, chosen: &mut [Choice]) {
    match spec.scoring {
        ExpertScoring::Softmax => {
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            logits.iter_mut().for_each(|x| *x = (*x - most).exp());
            let sum: f32 = logits.iter().sum();
            logits.iter_mut().for_each(|x| *x /= sum);
        }
        ExpertScoring::Sigmoid => logits.iter_mut().for_each(|x| *x = sigmoid(*x)),
    }
    let scores = &*logits;
    let rank = |expert: usize| scores[expert] + bias.map_or(0.0, |bias| bias[expert]);
    for index in 0..chosen.len() {
        let (earlier, rest) = chosen.split_at_mut(index);
        let is_free = |expert: &usize| earlier.iter().all(|c| c.expert as usize != *expert);
        // `max_by` takes the last of equal elements. Even if all scores are NaN, the chosen experts differ.
        let best = (0..scores.len()).rev().filter(is_free);
        let best = best.max_by(|&a, &b| rank(a).total_cmp(&rank(b)));
        let expert = best.expect("`check_spec` has seen that there are enough experts");
        rest[0] = Choice {
            expert: expert as u32,
            weight: scores[expert],
        };
    }
    let sum: f32 = chosen.iter().map(|choice| choice.weight).sum();
    let divisor = match spec.normalises {
        true => sum + spec.weight_sum_eps,
        false => 1.0,
    };
    for choice in &mut *chosen {
        choice.weight = choice.weight / divisor * spec.weight_scale;
    }
    chosen.sort_unstable_by_key(|choice| choice.expert);
}

pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The rows of each expert. A plan is reused from layer to layer.
#[derive(Default)]
pub struct ExpertPlan {
    /// The experts with any rows.
    pub experts: Vec<ActiveExpert>,
    /// For each gathered row, its source row in the step.
    pub sources: Vec<usize>,
    /// For each row of the step and each of its experts, the gathered row.
    pub places: Vec<usize>,
    /// For each expert, first the number of its rows, then the place of its next row among the gathered rows.
    next: Vec<usize>,
}

/// An expert and its gathered rows.
#[derive(Clone, Copy)]
pub struct ActiveExpert {
    pub expert: usize,
    pub tiles: Tiles,
    /// The place after the expert's last gathered row.
    end: usize,
}

impl ExpertPlan {
    /// Gathers the rows of a step. `of_row` gives the experts of a row.
    pub fn build<'a>(
        &mut self,
        spec: &ExpertSpec,
        num_rows: usize,
        tile_rows: usize,
        of_row: impl Fn(usize) -> &'a [Choice],
    ) {
        self.next.clear();
        self.next.resize(spec.num_experts, 0);
        for choice in (0..num_rows).flat_map(&of_row) {
            self.next[choice.expert as usize] += 1;
        }
        self.experts.clear();
        let mut first = 0;
        for (expert, next) in self.next.iter_mut().enumerate() {
            let end = first + *next;
            *next = first;
            if end > first {
                let tiles = Tiles::of_rows(first..end, tile_rows);
                self.experts.push(ActiveExpert { expert, tiles, end });
            }
            first = end;
        }
        self.sources.clear();
        self.sources.resize(first, 0);
        self.places.clear();
        for row in 0..num_rows {
            for choice in of_row(row) {
                let next = &mut self.next[choice.expert as usize];
                self.sources[*next] = row;
                self.places.push(*next);
                *next += 1;
            }
        }
    }

    /// The number of gathered rows.
    pub fn num_rows(&self) -> usize {
        self.sources.len()
    }

    /// The expert of a gathered row.
    pub fn expert_of(&self, row: usize) -> &ActiveExpert {
        &self.experts[self.experts.partition_point(|expert| expert.end <= row)]
    }
}

#[cfg(test)]
mod tests {
    use corella_model::{Activation, MlpSpec};

    use super::*;

    fn spec(num_experts: usize, num_experts_per_token: usize) -> ExpertSpec {
        ExpertSpec {
            num_experts,
            num_experts_per_token,
            router_bias: false,
            expert: MlpSpec {
                intermediate_size: 8,
                activation: Activation::Silu,
                is_gated: true,
                bias: false,
                gate_limit: None,
            },
            shared: None,
            scoring: ExpertScoring::Softmax,
            selection_bias: false,
            normalises: true,
            weight_sum_eps: 0.0,
            weight_scale: 1.0,
            has_scales: false,
            own_norms: None,
        }
    }

    const NONE: Choice = Choice {
        expert: 0,
        weight: 0.0,
    };

    #[test]
    fn the_best_experts_are_chosen_and_weighed() {
        let mut spec = spec(4, 2);
        // Scores are proportional to 1, 4, 2 and 1.
        let logits = [1.0_f32, 4.0, 2.0, 1.0].map(f32::ln);
        let mut chosen = [NONE; 2];
        choose(&spec, &mut logits.clone(), None, &mut chosen);
        assert_eq!(chosen.map(|choice| choice.expert), [1, 2]);
        assert!((chosen[0].weight - 4.0 / 6.0).abs() < 1e-6);
        spec.normalises = false;
        spec.weight_scale = 10.0;
        choose(&spec, &mut logits.clone(), None, &mut chosen);
        assert!((chosen[0].weight - 5.0).abs() < 1e-5);
        // A bias changes the choice, but not the weights.
        let bias = [0.0, -1.0, 0.0, 1.0];
        choose(&spec, &mut logits.clone(), Some(&bias), &mut chosen);
        assert_eq!(chosen.map(|choice| choice.expert), [2, 3]);
        assert!((chosen[1].weight - 1.25).abs() < 1e-5);
        spec.scoring = ExpertScoring::Sigmoid;
        choose(&spec, &mut logits.clone(), None, &mut chosen);
        assert!((chosen[0].weight - 8.0).abs() < 1e-5);
    }

    #[test]
    fn of_equal_experts_the_first_are_chosen_and_nan_is_no_trouble() {
        for logit in [0.0, f32::NAN] {
            let mut chosen = [NONE; 3];
            choose(&spec(5, 3), &mut [logit; 5], None, &mut chosen);
            assert_eq!(chosen.map(|choice| choice.expert), [0, 1, 2]);
        }
    }

    #[test]
    fn rows_are_gathered_by_expert() {
        let choice = |expert| Choice {
            expert,
            weight: 1.0,
        };
        let rows = [
            [choice(1), choice(3)],
            [choice(0), choice(3)],
            [choice(1), choice(3)],
        ];
        let mut plan = ExpertPlan::default();
        plan.build(&spec(5, 2), rows.len(), 2, |row| &rows[row]);
        assert_eq!(plan.sources, [1, 0, 2, 0, 1, 2]);
        assert_eq!(plan.places, [1, 3, 0, 4, 2, 5]);
        let experts: Vec<_> = plan.experts.iter().map(|e| (e.expert, e.end)).collect();
        assert_eq!(experts, [(0, 1), (1, 3), (3, 6)]);
        assert_eq!(plan.experts[2].tiles.len(), 2);
        assert_eq!(plan.expert_of(2).expert, 1);
        assert_eq!(plan.expert_of(3).expert, 3);
    }
}
