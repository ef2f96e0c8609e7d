//! The KV memory of all pipeline stages as one. A page's layers are numbered from the first stage to the last.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use corella_core::{PageId, StepId};
use corella_model::{KvGeometry, KvLayers, KvPages, LayerProgress, StateRecords};

use super::memory::KvMemory;

pub struct PipelinePages {
    geometry: KvGeometry,
    /// The memory of each stage, in the order of the layers.
    stages: Vec<Arc<KvMemory>>,
    states: Option<Box<dyn StateRecords>>,
}

impl PipelinePages {
    /// Each stage has at least `num_pages` pages. Pages from `num_pages` on are not visible outside.
    pub fn new(layers: KvLayers, num_pages: u32, stages: Vec<Arc<KvMemory>>) -> Self {
        let has_places = |kv: &&Arc<KvMemory>| kv.num_places() > 0;
        let kv = stages.iter().find(has_places).unwrap_or(&stages[0]);
        assert!(stages.iter().all(|kv| kv.num_pages() >= num_pages as usize));
        let (num_kv_heads, head_dim) = kv.visible_heads();
        let geometry = KvGeometry {
            num_layers: stages.iter().map(|kv| kv.num_places() as u32).sum(),
            layers,
            num_kv_heads: num_kv_heads as u32,
            head_dim: head_dim as u32,
            page_size: kv.page_size() as u32,
            num_pages,
            format: kv.format,
            order: kv.order,
        };
        Self {
            geometry,
            stages,
            states: None,
        }
    }

    /// Adds the states of recurrent layers.
    pub fn with_states(mut self, states: Option<impl StateRecords + 'static>) -> Self {
        self.states = states.map(|states| Box::new(states) as _);
        self
    }

    /// The stage of a layer, and the layer's index in the pages of that stage.
    fn stage(&self, layer: u32) -> (&KvMemory, usize) {
        let mut of_stage = layer as usize;
        for kv in &self.stages {
            if of_stage < kv.num_places() {
                return (kv, of_stage);
            }
            of_stage -= kv.num_places();
        }
        panic!("layer {layer} behind the last one");
    }
}

// SAFETY: each page of a layer has memory of its own, which workers use only for batches that name the page.
unsafe impl KvPages for PipelinePages {
    fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    fn regions(&self) -> Vec<NonNull<[u8]>> {
        self.stages.iter().map(|kv| kv.bytes()).collect()
    }

    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2] {
        assert!(page.0 < self.geometry.num_pages, "page {page}");
        let (kv, layer) = self.stage(layer);
        kv.native_parts(layer, page.0 as usize)
    }

    fn note_written(&self, page: PageId) {
        for kv in &self.stages {
            kv.note_used(page.0 as usize);
        }
    }

    fn states(&self) -> Option<&dyn StateRecords> {
        self.states.as_deref()
    }

    fn num_layers_done(&self, step: StepId) -> u32 {
        let mut num_done = 0;
        for kv in &self.stages {
            let of_stage = kv.counter.num_done(step).unwrap_or(kv.num_places());
            num_done += of_stage as u32;
            if of_stage < kv.num_places() {
                break;
            }
        }
        num_done
    }

    fn wait_layer(&self, step: StepId, layer: u32, timeout: Duration) -> LayerProgress {
        let (kv, layer) = self.stage(layer);
        kv.counter.wait(step, layer, timeout)
    }
}

#[cfg(test)]
mod tests {
    use corella_model::{
        AttentionSpec, DType, ElementOrder, KvFormat, PageForm, RotarySpec, quantise_int8_row,
    };

    use super::*;
    use crate::kernels::{Isa, Kernels, kernels};
    use crate::kv::{HeadPage, RowShape, Rows, Side};

    const PAGE_SIZE: usize = 32;
    const NUM_PAGES: u32 = 4;
    const HEAD_DIM: usize = 6;
    const FORMATS: [KvFormat; 4] = [
        KvFormat::Float(DType::F32),
        KvFormat::Float(DType::F16),
        KvFormat::Float(DType::Bf16),
        KvFormat::Int8,
    ];

    /// The pages of two stages, the first with one layer and the second with two.
    fn pages(format: KvFormat, order: ElementOrder) -> PipelinePages {
        let attention = AttentionSpec::plain(3, 3, HEAD_DIM, RotarySpec::plain(1e4, HEAD_DIM));
        let stages = [1, 2].map(|num_layers| {
            let (num_pages, page_size) = (NUM_PAGES as usize + 1, PAGE_SIZE as u32);
            let shapes = [RowShape::new(&attention, 1)];
            let kv = KvMemory::new(num_layers, &shapes, num_pages, page_size, format, order);
            Arc::new(kv.unwrap())
        });
        PipelinePages::new(KvLayers::one(3), NUM_PAGES, stages.to_vec())
    }

    fn value(layer: usize, page: usize, head: usize, side: Side, position: usize, i: usize) -> f32 {
        let number = (layer * 4 + page) * 3 + head;
        let number = (number * 2 + side as usize) * PAGE_SIZE + position;
        ((number * HEAD_DIM + i) as f32 * 0.37).sin() * 8.0
    }

    /// Fills pages as workers do.
    fn fill(pages: &PipelinePages, kernels: &Kernels) {
        let layers = pages
            .stages
            .iter()
            .flat_map(|kv| (0..kv.num_places()).map(move |at| (kv, at)));
        for (global, (kv, layer)) in layers.enumerate() {
            for page in 0..NUM_PAGES as usize {
                for head in 0..3 {
                    let at = HeadPage { layer, page, head };
                    for side in Side::BOTH {
                        for position in 0..PAGE_SIZE {
                            let row: Vec<f32> = (0..HEAD_DIM)
                                .map(|i| value(global, page, head, side, position, i))
                                .collect();
                            let rows = Rows {
                                first: row.as_ptr(),
                                stride: HEAD_DIM,
                                len: 1,
                            };
                            // SAFETY: no other thread uses the memory.
                            unsafe { kv.only_rows().write(kernels, side, at, position, rows) };
                        }
                    }
                }
            }
        }
    }

    /// All pages of a layer.
    fn read(pages: &PipelinePages, layer: u32, form: PageForm) -> Vec<u8> {
        let ids: Vec<PageId> = (0..NUM_PAGES).map(PageId).collect();
        let mut bytes = vec![0; ids.len() * pages.geometry.layer_bytes()];
        // SAFETY: no other thread uses the memory.
        unsafe { pages.read(layer, &ids, form, &mut bytes) };
        bytes
    }

    #[test]
    fn either_order_has_the_same_canonical_form() {
        let portable = kernels(Isa::Portable).unwrap();
        for format in FORMATS {
            let orders = [ElementOrder::Plain, ElementOrder::Tiles];
            let both = orders.map(|order| pages(format, order));
            both.iter().for_each(|pages| fill(pages, portable));
            let fresh = orders.map(|order| pages(format, order));
            for layer in 0..3 {
                let [plain, tiles] = both.each_ref().map(|p| read(p, layer, PageForm::Canonical));
                assert!(plain == tiles, "{format:?}");
                let natives = both.each_ref().map(|p| read(p, layer, PageForm::Native));
                assert!(natives[0] != natives[1], "{format:?}");
                // First writes the canonical form, then the native form with the pages in reverse order.
                for (fresh, native) in fresh.iter().zip(&natives) {
                    let ids: Vec<PageId> = (0..NUM_PAGES).map(PageId).collect();
                    // SAFETY: no other thread uses the memory.
                    unsafe { fresh.write(layer, &ids, PageForm::Canonical, &plain) };
                    assert!(
                        read(fresh, layer, PageForm::Native) == *native,
                        "{format:?}"
                    );
                    let ids: Vec<PageId> = ids.into_iter().rev().collect();
                    // SAFETY: as above.
                    unsafe { fresh.write(layer, &ids, PageForm::Native, native) };
                    let reversed = read(fresh, layer, PageForm::Canonical);
                    let page_bytes = fresh.geometry.layer_bytes();
                    let pages = reversed
                        .chunks(page_bytes)
                        .rev()
                        .zip(plain.chunks(page_bytes));
                    pages.for_each(|(a, b)| assert!(a == b, "{format:?}"));
                }
            }
        }
    }

    /// `[head][K, V][position][dimension]`, layer by layer across the stages.
    #[test]
    fn the_canonical_form_is_what_it_says() {
        for order in [ElementOrder::Plain, ElementOrder::Tiles] {
            let pages = pages(KvFormat::Float(DType::F32), order);
            fill(&pages, kernels(Isa::Portable).unwrap());
            for layer in 0..3 {
                let bytes = read(&pages, layer as u32, PageForm::Canonical);
                let mut found = bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|bytes| f32::from_le_bytes(*bytes));
                for page in 0..NUM_PAGES as usize {
                    for head in 0..3 {
                        for side in Side::BOTH {
                            for at in 0..PAGE_SIZE * HEAD_DIM {
                                let (position, i) = (at / HEAD_DIM, at % HEAD_DIM);
                                let expected = value(layer, page, head, side, position, i);
                                assert_eq!(found.next(), Some(expected));
                            }
                        }
                    }
                }
            }
        }
    }

    /// `quantise_int8_row`, which converts pages for this executor, rounds all numbers as the executor does.
    #[test]
    fn integers_are_rounded_here_as_everywhere() {
        let rows = [
            [1.0, -2.0, 3.0, -4.0, 5.0, -6.0],
            // These numbers are halves after the scaling.
            [127.0, 0.5, 1.5, -0.5, -2.5, 126.5],
            [0.0, -0.0, 0.0, 0.0, 0.0, 0.0],
            [f32::MAX, f32::MIN_POSITIVE, -f32::MAX, 1e38, -1e30, 0.0],
            // The inverses of the scales of these rows are infinite.
            [1e-45, 0.0, -1e-45, 3e-45, 0.0, 0.0],
            [1e-38, 5e-39, -2e-39, 0.0, 1e-40, 0.0],
            [f32::INFINITY, 1.0, -1.0, 0.0, 2.0, 3.0],
            [0.1, 0.2, f32::NEG_INFINITY, 0.3, 0.4, 0.5],
        ];
        for isa in Isa::ALL {
            let Some(kernels) = kernels(isa) else {
                continue;
            };
            let pages = pages(KvFormat::Int8, ElementOrder::Plain);
            for (position, row) in rows.iter().enumerate() {
                let at = HeadPage {
                    layer: 0,
                    page: 0,
                    head: 0,
                };
                let stored = Rows {
                    first: row.as_ptr(),
                    stride: HEAD_DIM,
                    len: 1,
                };
                // SAFETY: no other thread uses the memory.
                unsafe {
                    pages.stages[0]
                        .only_rows()
                        .write(kernels, Side::Keys, at, position, stored)
                };
            }
            let page = read(&pages, 0, PageForm::Canonical);
            let scales = &page[2 * PAGE_SIZE * HEAD_DIM..];
            for (position, row) in rows.iter().enumerate() {
                let mut expected = [0; HEAD_DIM];
                let scale = quantise_int8_row(row, &mut expected);
                let found = &page[position * HEAD_DIM..][..HEAD_DIM];
                assert_eq!(found, expected, "{isa}: {row:?}");
                let found = scales.as_chunks().0[position];
                assert_eq!(
                    f32::from_le_bytes(found).to_bits(),
                    scale.to_bits(),
                    "{isa}: {row:?}"
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "page 4")]
    fn the_page_for_warm_up_belongs_to_no_request() {
        let pages = pages(KvFormat::Int8, ElementOrder::Plain);
        pages.native_parts(0, PageId(NUM_PAGES));
    }

    #[test]
    #[should_panic(expected = "layer 3 behind the last one")]
    fn layers_end_with_the_last_stage() {
        let pages = pages(KvFormat::Int8, ElementOrder::Plain);
        pages.native_parts(3, PageId(0));
    }
}
