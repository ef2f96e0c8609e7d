//! The shapes of rows of keys and values in a model's layers.

use corella_model::{AttentionSpec, KvFormat, KvLayer, LayerSpec};

/// The heads of layers with equal rows, and the number of such layers in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub num_in_place: usize,
}

impl RowShape {
    pub fn new(attention: &AttentionSpec, num_in_place: usize) -> Self {
        Self {
            num_kv_heads: attention.num_kv_heads,
            head_dim: attention.head_dim,
            num_in_place,
        }
    }

    /// The distinct shapes of the layers with keys and values.
    pub fn of_layers(layers: &[LayerSpec], places: &[Option<KvLayer>]) -> Vec<Self> {
        let mut shapes = Vec::new();
        for (layer, place) in layers.iter().zip(places) {
            let shape = place.map(|place| Self::new(&layer.attention, place.num_in_place));
            if let Some(shape) = shape.filter(|shape| !shapes.contains(shape)) {
                shapes.push(shape);
            }
        }
        shapes
    }

    pub fn head_bytes(&self, page_size: usize, format: KvFormat) -> usize {
        2 * page_size * format.row_bytes(self.head_dim)
    }

    fn layer_bytes(&self, page_size: usize, format: KvFormat) -> usize {
        self.num_kv_heads * self.head_bytes(page_size, format)
    }
}

/// Memory of one place of a page: K and V of a layer of the widest rows, or of several layers of narrower rows.
pub fn place_bytes(shapes: &[RowShape], page_size: u32, format: KvFormat) -> usize {
    let bytes =
        |shape: &RowShape| shape.num_in_place * shape.layer_bytes(page_size as usize, format);
    shapes.iter().map(bytes).max().unwrap_or(0)
}
