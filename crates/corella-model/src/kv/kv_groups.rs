//! The KV groups of a decoder: layers that share page tables.

use std::ops::Range;

use corella_core::{KvGroup, MAX_KV_GROUPS};

use crate::{DecoderSpec, LayerSpec};

/// The division of a decoder's layers into KV groups.
///
/// A page holds the layers of one group, and one pool of pages of one size serves all groups. So groups have equal
/// numbers of layers where the numbers divide evenly: a page has room for the layers of the largest group, and smaller
/// groups waste the rest of their pages. Among the divisions that the scheduler supports, `by_window` takes the one
/// with the least memory for a request of the longest context, so windows are not used where they would cost more than
/// they save.
///
/// Each place in a page has room for a layer with the widest rows. Several layers with narrower rows share a place, as
/// far as it has room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroups {
    groups: Vec<KvGroup>,
    /// `None` for recurrent layers, which have no keys and values.
    of_layers: Vec<Option<GroupLayer>>,
    /// Whether all layers use the same rows of a page, one after the other. An encoder needs the keys and values of a
    /// layer only until the next layer overwrites them.
    are_shared: bool,
}

/// The place of a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    pub group: usize,
    /// The layer's place in a page of its group.
    pub in_page: usize,
    /// The layer's index within the place.
    pub in_place: usize,
    /// The number of layers with rows of this width that fit into the place.
    pub num_in_place: usize,
}

/// The data that determine the place of a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupLayer {
    group: usize,
    /// The number of layers with rows of this width that share a place in a page.
    num_in_place: usize,
    /// The layer that has the keys and values: this one, or an earlier one.
    source: usize,
}

/// Layers that read the same positions, with rows of the same width.
struct Kind {
    window: Option<u32>,
    num_in_place: usize,
    num_layers: usize,
}

impl KvGroups {
    /// One group of all layers, which keeps the pages of the whole context, with or without windows.
    pub fn one(spec: &DecoderSpec) -> Self {
        Self {
            groups: vec![KvGroup::default()],
            of_layers: of_layers(spec, |_| 0),
            are_shared: spec.encoder.is_some(),
        }
    }

    /// Groups that keep only pages in their windows.
    pub fn by_window(spec: &DecoderSpec) -> Self {
        if spec.encoder.is_some() {
            return Self::one(spec);
        }
        let max_position = u32::try_from(spec.max_position).unwrap_or(u32::MAX);
        let widest = widest_row(spec);
        let of_layer = |layer: &LayerSpec| {
            let window = layer.attention.window.map(u32::try_from);
            let window = window.and_then(Result::ok);
            Kind {
                // A window as long as the context hides no position.
                window: window.filter(|&window| window < max_position),
                num_in_place: num_in_place(layer, widest),
                num_layers: 1,
            }
        };
        let mut kinds: Vec<Kind> = Vec::new();
        for layer in spec.layers.iter().filter(|layer| layer.has_kv()) {
            let new = of_layer(layer);
            match kinds.iter_mut().find(|kind| kind.is_like(&new)) {
                Some(kind) => kind.num_layers += 1,
                None => kinds.push(new),
            }
        }
        let num_layers: usize = kinds.iter().map(|kind| kind.num_layers).sum();
        // The number of rows, each of one layer, that a request of the longest context keeps.
        let num_rows_kept = |num_page_layers: usize| {
            let of_kind = |kind: &Kind| {
                let num_layers = kind.num_groups(num_page_layers) * num_page_layers;
                num_layers as u64 * u64::from(kind.window.unwrap_or(max_position))
            };
            kinds.iter().map(of_kind).sum::<u64>()
        };
        let num_groups = |num_page_layers| {
            let of_kinds = kinds.iter().map(|kind| kind.num_groups(num_page_layers));
            of_kinds.sum::<usize>()
        };
        let possible = (1..=num_layers).filter(|&len| num_groups(len) <= MAX_KV_GROUPS);
        let best = possible.min_by_key(|&len| (num_rows_kept(len), num_groups(len)));
        let one = Self::one(spec);
        let without_groups =
            one.num_page_layers(0..spec.layers.len()) as u64 * u64::from(max_position);
        let Some(num_page_layers) = best.filter(|&len| num_rows_kept(len) < without_groups) else {
            return one;
        };
        let (mut groups, mut first_groups) = (Vec::new(), Vec::new());
        for kind in &kinds {
            first_groups.push(groups.len());
            let window = kind.window;
            groups.extend((0..kind.num_groups(num_page_layers)).map(|_| KvGroup { window }));
        }
        // Layers of a kind go to the kind's groups in turn, so that each stage of a pipeline has about equal parts of
        // all groups.
        let mut num_seen = vec![0; kinds.len()];
        let group_of = |layer: &LayerSpec| {
            let own = of_layer(layer);
            let kind = kinds.iter().position(|kind| kind.is_like(&own));
            let kind = kind.expect("every layer has been counted");
            let turn = num_seen[kind] % kinds[kind].num_groups(num_page_layers);
            num_seen[kind] += 1;
            first_groups[kind] + turn
        };
        Self {
            of_layers: of_layers(spec, group_of),
            groups,
            are_shared: false,
        }
    }

    pub fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    /// The places of consecutive layers, such as those of a pipeline stage, in pages that hold no other layers of their
    /// group. `None` for recurrent layers.
    ///
    /// A layer that reads another layer's keys and values has the same place, so `layers` must contain both layers.
    pub fn layers(&self, layers: Range<usize>) -> Vec<Option<KvLayer>> {
        let mut num_places = vec![0; self.groups.len()];
        // For each group and width with a place that is not full, the place of the next layer.
        let mut open: Vec<(GroupLayer, KvLayer)> = Vec::new();
        let mut places: Vec<Option<KvLayer>> = Vec::new();
        for index in layers.clone() {
            let Some(layer) = self.of_layers[index] else {
                places.push(None);
                continue;
            };
            if layer.source != index {
                places.push(places[layer.source - layers.start]);
                continue;
            }
            let is_like = |(other, _): &(GroupLayer, KvLayer)| other.is_like(&layer);
            let place = match open.iter().position(is_like) {
                Some(found) => open.swap_remove(found).1,
                None => {
                    let in_page = num_places[layer.group];
                    num_places[layer.group] += usize::from(!self.are_shared);
                    KvLayer {
                        group: layer.group,
                        in_page,
                        in_place: 0,
                        num_in_place: layer.num_in_place,
                    }
                }
            };
            if place.in_place + 1 < layer.num_in_place && !self.are_shared {
                let in_place = place.in_place + 1;
                open.push((layer, KvLayer { in_place, ..place }));
            }
            places.push(Some(place));
        }
        places
    }

    /// The places of the range's layers with keys and values of their own.
    pub fn own_layers(&self, layers: Range<usize>) -> Vec<KvLayer> {
        let first = layers.start;
        let places = self.layers(layers).into_iter().enumerate();
        let own = places.filter(|(index, _)| {
            let layer = &self.of_layers[first + index];
            layer.is_some_and(|layer| layer.source == first + index)
        });
        own.filter_map(|(_, place)| place).collect()
    }

    /// The number of places that these layers need in a page.
    pub fn num_page_layers(&self, layers: Range<usize>) -> usize {
        let layers = self.layers(layers).into_iter().flatten();
        layers.map(|layer| layer.in_page + 1).max().unwrap_or(0)
    }

    /// Whether these groups fit a decoder: each layer's group keeps all positions that the layer reads.
    pub fn are_of(&self, spec: &DecoderSpec) -> bool {
        let keeps = |(of_layer, layer): (&Option<GroupLayer>, &LayerSpec)| {
            let Some(GroupLayer { group, .. }) = *of_layer else {
                return layer.recurrent.is_some();
            };
            let (window, kept) = (layer.attention.window, self.groups[group].window);
            let is_kept = |kept| window.is_some_and(|window| window <= kept as usize);
            layer.recurrent.is_none() && kept.is_none_or(is_kept)
        };
        let mut layers = self.of_layers.iter().zip(&spec.layers);
        self.of_layers.len() == spec.layers.len() && layers.all(keeps)
    }
}

impl Kind {
    fn is_like(&self, other: &Self) -> bool {
        (self.window, self.num_in_place) == (other.window, other.num_in_place)
    }

    fn num_groups(&self, num_page_layers: usize) -> usize {
        self.num_layers
            .div_ceil(num_page_layers * self.num_in_place)
    }
}

impl GroupLayer {
    fn is_like(&self, other: &Self) -> bool {
        (self.group, self.num_in_place) == (other.group, other.num_in_place)
    }
}

/// Gives each layer with keys and values of its own a group. Layers that read the keys and values of another layer are
/// in its group.
fn of_layers(
    spec: &DecoderSpec,
    mut group_of: impl FnMut(&LayerSpec) -> usize,
) -> Vec<Option<GroupLayer>> {
    let widest = widest_row(spec);
    let mut found: Vec<Option<GroupLayer>> = Vec::new();
    for (source, layer) in spec.layers.iter().enumerate() {
        found.push(match (&layer.recurrent, layer.attention.kv_source) {
            (Some(_), _) => None,
            (None, Some(source)) => found[source],
            (None, None) => Some(GroupLayer {
                group: group_of(layer),
                num_in_place: num_in_place(layer, widest),
                source,
            }),
        });
    }
    found
}

/// The largest number of elements of a token's keys in a layer.
fn widest_row(spec: &DecoderSpec) -> usize {
    let layers = spec.layers.iter().filter(|layer| layer.has_kv());
    let widths = layers.map(|layer| layer.attention.kv_len());
    widths.max().unwrap_or(0)
}

/// The number of layers with rows of this width that fit into the place of a layer with the widest rows.
fn num_in_place(layer: &LayerSpec, widest: usize) -> usize {
    (widest / layer.attention.kv_len().max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Activation, AttentionSpec, BranchNorms, EncoderSpec, FeedForward, GatedDeltaSpec,
        LayerSpec, MlpSpec, NormSpec, RecurrentSpec, RotarySpec,
    };

    fn spec(max_position: usize, windows: impl IntoIterator<Item = Option<usize>>) -> DecoderSpec {
        let norm = NormSpec::rms(1e-5);
        let layer = |window| {
            let attention = AttentionSpec {
                window,
                ..AttentionSpec::plain(2, 1, 8, RotarySpec::plain(1e4, 8))
            };
            let mlp = FeedForward::Mlp(MlpSpec::gated(8, Activation::Silu));
            LayerSpec::plain(attention, BranchNorms::before(norm), mlp)
        };
        let layers = windows.into_iter().map(layer).collect();
        DecoderSpec::plain(64, 16, max_position, layers, norm)
    }

    /// One layer without a window behind each run of `num_local` layers with one.
    fn alternating(
        num_layers: usize,
        num_local: usize,
        window: usize,
    ) -> impl Iterator<Item = Option<usize>> {
        (0..num_layers).map(move |layer| ((layer + 1) % (num_local + 1) != 0).then_some(window))
    }

    /// The windows of the groups, each with the number of groups that have it, and the layers of a page.
    fn shape(spec: &DecoderSpec) -> (Vec<(Option<u32>, usize)>, usize) {
        let groups = KvGroups::by_window(spec);
        assert!(groups.are_of(spec));
        let mut counts: Vec<(Option<u32>, usize)> = Vec::new();
        for group in groups.groups() {
            match counts
                .iter_mut()
                .find(|(window, _)| *window == group.window)
            {
                Some((_, count)) => *count += 1,
                None => counts.push((group.window, 1)),
            }
        }
        (counts, groups.num_page_layers(0..spec.layers.len()))
    }

    #[test]
    fn layers_with_and_without_windows_are_in_groups_of_equal_size() {
        // The layers of Gemma 2 2B, and of Gemma 3 1B, 4B, 12B and 27B.
        let gemma_2 = spec(8192, alternating(26, 1, 4096));
        assert_eq!(shape(&gemma_2), (vec![(Some(4096), 1), (None, 1)], 13));
        let gemma_3 = [
            (26, 512, 32_768, 6, 4),
            (34, 1024, 131_072, 6, 5),
            (48, 1024, 131_072, 5, 8),
            (62, 1024, 131_072, 6, 10),
        ];
        for (num_layers, window, max_position, num_groups, num_page_layers) in gemma_3 {
            let spec = spec(max_position, alternating(num_layers, 5, window));
            let expected = vec![(Some(window as u32), num_groups), (None, 1)];
            assert_eq!(shape(&spec), (expected, num_page_layers));
        }
    }

    #[test]
    fn a_window_of_all_layers_makes_one_group() {
        let mistral = spec(32_768, vec![Some(4096); 32]);
        assert_eq!(shape(&mistral), (vec![(Some(4096), 1)], 32));
        let llama = spec(2048, vec![None; 16]);
        assert_eq!(KvGroups::by_window(&llama), KvGroups::one(&llama));
        assert_eq!(shape(&llama), (vec![(None, 1)], 16));
    }

    #[test]
    fn windows_that_save_nothing_are_no_groups() {
        // A window as long as the context.
        let phi = spec(2048, vec![Some(2048); 4]);
        assert_eq!(KvGroups::by_window(&phi), KvGroups::one(&phi));
        // Pages of a few layers would make too many groups. In pages of more layers, the group of the layer with a
        // window would use only a part of each page.
        let mut windows = vec![None; 13];
        windows[3] = Some(1024);
        let spec = spec(2048, windows);
        assert_eq!(KvGroups::by_window(&spec), KvGroups::one(&spec));
    }

    #[test]
    fn stages_have_parts_of_all_groups() {
        let spec = spec(131_072, alternating(34, 5, 1024));
        let groups = KvGroups::by_window(&spec);
        assert_eq!(groups.num_page_layers(0..34), 5);
        // In a stage of 17 layers, 15 or 14 have a window, in 6 groups.
        assert_eq!(groups.num_page_layers(0..17), 3);
        assert_eq!(groups.num_page_layers(17..34), 3);
        let layers = groups.layers(17..34);
        for (index, layer) in layers.iter().enumerate() {
            assert!(
                !layers[..index].contains(layer),
                "layer {index} shares its place"
            );
        }
    }

    #[test]
    fn groups_of_another_model_are_noticed() {
        let [narrow, wide, full] =
            [Some(512), Some(1024), None].map(|window| spec(4096, vec![window; 4]));
        let groups = KvGroups::by_window(&wide);
        assert!(groups.are_of(&narrow) && groups.are_of(&wide));
        assert!(!groups.are_of(&full));
        assert!(!groups.are_of(&spec(4096, vec![Some(1024); 5])));
        assert!(KvGroups::one(&full).are_of(&narrow));
    }

    /// Recurrent layers have no keys and values, so pages hold only the others.
    #[test]
    fn recurrent_layers_are_in_no_group() {
        let mut hybrid = spec(4096, vec![None; 8]);
        for (index, layer) in hybrid.layers.iter_mut().enumerate() {
            layer.recurrent = (index % 4 != 3).then(|| {
                RecurrentSpec::GatedDelta(GatedDeltaSpec {
                    num_key_heads: 1,
                    num_value_heads: 2,
                    key_dim: 8,
                    value_dim: 8,
                    kernel_len: 4,
                    norm: NormSpec::rms(1e-5),
                })
            });
        }
        assert_eq!(shape(&hybrid), (vec![(None, 1)], 2));
        let groups = KvGroups::one(&hybrid);
        let second = KvLayer {
            group: 0,
            in_page: 1,
            in_place: 0,
            num_in_place: 1,
        };
        assert_eq!(
            groups.layers(6..8),
            [
                None,
                Some(KvLayer {
                    in_page: 0,
                    ..second
                })
            ]
        );
        assert_eq!(groups.layers(0..8)[7], Some(second));
        assert_eq!(groups.num_page_layers(0..3), 0);
        hybrid.layers[3].recurrent = hybrid.layers[0].recurrent.clone();
        assert!(!groups.are_of(&hybrid));
    }

    /// In the shape of Gemma 4 31B, layers without a window have rows half as wide as the other layers' rows, so two of
    /// them share a place. A layer that reads another layer's rows has the same place as that layer.
    #[test]
    fn narrow_rows_share_places() {
        let mut mixed = spec(131_072, alternating(12, 5, 1024));
        for layer in &mut mixed.layers {
            let is_full = layer.attention.window.is_none();
            layer.attention.num_kv_heads = if is_full { 1 } else { 2 };
        }
        assert_eq!(shape(&mixed), (vec![(Some(1024), 5), (None, 1)], 2));
        let groups = KvGroups::by_window(&mixed);
        let layers = groups.layers(0..12);
        let place = |layer: usize| layers[layer].map(|it| (it.group, it.in_page, it.in_place));
        assert_eq!(place(5), Some((5, 0, 0)));
        assert_eq!(place(11), Some((5, 0, 1)));
        assert_eq!(place(10), Some((4, 1, 0)));
        // With all layers in one group, a page has ten places, and one more for both full layers.
        assert_eq!(KvGroups::one(&mixed).num_page_layers(0..12), 11);

        mixed.layers[11].attention.kv_source = Some(5);
        mixed.layers[10].attention.kv_source = Some(4);
        let groups = KvGroups::by_window(&mixed);
        let layers = groups.layers(0..12);
        assert_eq!((layers[11], layers[10]), (layers[5], layers[4]));
        assert_eq!(groups.own_layers(0..12).len(), 10);
        assert!(groups.are_of(&mixed));
    }

    /// An encoder keeps no keys or values for later steps, so the memory of one layer is enough.
    #[test]
    fn the_layers_of_an_encoder_share_their_rows() {
        let mut encoder = spec(512, [None, Some(64), None]);
        encoder.encoder = Some(EncoderSpec {
            embedding_norm: None,
            num_segments: 0,
            first_position: 0,
            norms_sums: false,
        });
        let groups = KvGroups::by_window(&encoder);
        assert_eq!(groups, KvGroups::one(&encoder));
        assert_eq!(groups.num_page_layers(0..3), 1);
        let first = KvLayer {
            group: 0,
            in_page: 0,
            in_place: 0,
            num_in_place: 1,
        };
        assert_eq!(groups.layers(0..3), [Some(first); 3]);
    }
}
