//! The places of a model's layers in its KV pages.

use std::hash::Hasher;
use std::ops::Range;

use corella_core::KvGroup;

use crate::{KvGroups, KvLayer};

/// The place of each layer's keys and values: the KV group, and the position in its pages. Nodes name layers by their
/// index in the model (without recurrent layers and layers that read the keys and values of others), because the layers
/// of a page depend on the division into stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayers {
    groups: Vec<KvGroup>,
    num_layers: u32,
    /// The places of the model's layers; empty if a page has all layers in their order.
    places: Vec<KvLayer>,
}

impl KvLayers {
    /// One group of all layers, in their order within a page.
    pub fn one(num_layers: u32) -> Self {
        Self {
            groups: vec![KvGroup::default()],
            num_layers,
            places: Vec::new(),
        }
    }

    /// Groups with equal numbers of layers. The layers of the first group come first.
    pub fn equal(groups: &[KvGroup], num_page_layers: u32) -> Self {
        let places = |group| {
            (0..num_page_layers as usize).map(move |in_page| KvLayer {
                group,
                in_page,
                in_place: 0,
                num_in_place: 1,
            })
        };
        let places: Vec<_> = (0..groups.len()).flat_map(places).collect();
        Self {
            groups: groups.to_vec(),
            num_layers: places.len() as u32,
            places,
        }
    }

    /// The layers of pipeline stages, whose parts of a page lie one after the other. Recurrent layers, and layers that
    /// read the keys and values of others, are not counted.
    pub fn new(groups: &KvGroups, stages: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut places = Vec::new();
        let mut first = 0;
        for layers in stages {
            let num_page_layers = groups.num_page_layers(layers.clone());
            let own = groups.own_layers(layers).into_iter();
            places.extend(own.map(|place| KvLayer {
                in_page: first + place.in_page,
                ..place
            }));
            first += num_page_layers;
        }
        Self {
            groups: groups.groups().to_vec(),
            num_layers: places.len() as u32,
            places,
        }
    }

    pub fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    /// The number of the model's layers that have keys and values of their own. Layer numbers count only these layers.
    pub fn num_layers(&self) -> u32 {
        self.num_layers
    }

    /// The place of a layer, counted as in `num_layers`.
    pub fn place(&self, layer: u32) -> KvLayer {
        let (group, in_page) = (0, layer as usize);
        let place = self.places.get(in_page).copied();
        place.unwrap_or(KvLayer {
            group,
            in_page,
            in_place: 0,
            num_in_place: 1,
        })
    }

    /// The KV group of a layer, counted as in `num_layers`.
    pub fn group_of(&self, layer: u32) -> KvGroup {
        self.groups[self.place(layer).group]
    }

    /// A digest of the layers' windows, which is equal for two models with the same windows; 0 without windows.
    pub fn window_digest(&self) -> u64 {
        if self.groups.iter().all(|group| group.window.is_none()) {
            return 0;
        }
        let mut hasher = Fnv(0xcbf2_9ce4_8422_2325);
        for layer in 0..self.num_layers {
            hasher.write_u32(self.group_of(layer).window.unwrap_or(0).to_le());
        }
        hasher.finish().max(1)
    }
}

/// FNV-1a of 64 bits, which is the same in every version of the compiler's library.
struct Fnv(u64);

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
