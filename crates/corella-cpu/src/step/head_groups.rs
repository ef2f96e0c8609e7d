//! Groups of heads whose output channels fill whole panels.

use std::ops::Range;

use corella_model::AttentionSpec;

use crate::kernels::PANEL_LANES;

/// The heads of queries, then keys, then values, cut into the smallest groups that fill whole panels.
pub struct HeadGroups {
    num_heads: usize,
    head_dim: usize,
    heads_of_group: usize,
}

impl HeadGroups {
    pub fn new(spec: &AttentionSpec) -> Self {
        let fills_panels = |heads: &usize| (heads * spec.head_dim).is_multiple_of(PANEL_LANES);
        Self {
            num_heads: num_projected(spec),
            head_dim: spec.head_dim,
            heads_of_group: (1..PANEL_LANES).find(fills_panels).unwrap_or(PANEL_LANES),
        }
    }

    pub fn len(&self) -> usize {
        self.num_heads.div_ceil(self.heads_of_group)
    }

    /// The number of output channels in a full group.
    pub fn num_lanes(&self) -> usize {
        self.heads_of_group * self.head_dim
    }

    pub fn heads(&self, group: usize) -> Range<usize> {
        let first = group * self.heads_of_group;
        first..self.num_heads.min(first + self.heads_of_group)
    }

    /// The panels of a full group; the last group may have fewer.
    pub fn panels(&self, group: usize) -> Range<usize> {
        let num_panels = self.num_lanes() / PANEL_LANES;
        group * num_panels..(group + 1) * num_panels
    }
}

/// The number of heads in the projection of a layer's input.
pub fn num_projected(spec: &AttentionSpec) -> usize {
    let num_sides = match (spec.kv_source, spec.values_are_keys) {
        (Some(_), _) => 0,
        (None, true) => 1,
        (None, false) => 2,
    };
    spec.num_heads + num_sides * spec.num_kv_heads
}

#[cfg(test)]
mod tests {
    use corella_model::RotarySpec;

    use super::*;

    #[test]
    fn heads_lie_in_the_panels_of_their_group() {
        for head_dim in [2, 8, 16, 24, 32, 64, 80, 100, 128] {
            let groups = HeadGroups::new(&AttentionSpec::plain(
                6,
                3,
                head_dim,
                RotarySpec::plain(1e4, head_dim),
            ));
            let mut next = 0;
            for group in 0..groups.len() {
                let (heads, panels) = (groups.heads(group), groups.panels(group));
                assert_eq!(heads.start, next);
                assert_eq!(heads.start * head_dim, panels.start * PANEL_LANES);
                assert!(heads.end * head_dim <= panels.end * PANEL_LANES);
                next = heads.end;
            }
            assert_eq!(next, 12);
        }
    }
}
