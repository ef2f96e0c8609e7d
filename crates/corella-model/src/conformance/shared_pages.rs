//! Pages that are read while steps run, and copied to another executor.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use corella_core::{PageId, Sample, StepId};

use super::driver::{Driver, Script};
use super::{LONG_PROMPT, SamplingParams, Suite, assert_same};
use crate::{KvGeometry, KvPages, LayerProgress, PageConversion, PageForm};

/// A timeout longer than any step of the suite.
const LONG: Duration = Duration::from_secs(300);
/// The number of times that the reader polls a layer before it waits for the layer. Nearly every step ends earlier.
const MAX_LOOKS: u32 = 1_000_000;

impl Suite<'_> {
    /// While a step computes its other layers, the rows of a finished layer no longer change. A step with few rows is
    /// short, so several steps give early reads a chance.
    pub fn finished_layers_stay_as_they_are(&self) {
        let script = self.script(21, LONG_PROMPT, SamplingParams::GREEDY);
        let beside = self.script(22, self.page_size + 1, SamplingParams::GREEDY);
        // One core is left for the thread that reads.
        let mut driver = self.driver();
        driver.shuffle_pages();
        driver.keeps_pages = true;
        let kv = driver.executor.kv_pages();
        let mut other = driver.begin(1, &beside);
        let mut sequence = driver.begin(0, &script);
        for chunk in [self.page_size + 3, 40, 40, LONG_PROMPT] {
            driver.advance(&mut other, usize::MAX);
            driver.advance(&mut sequence, chunk);
            let step = driver.next_step();
            let pages: Vec<_> = sequence.pages().collect();
            let (shared, read) = (Arc::clone(&kv), pages.clone());
            let early = std::thread::spawn(move || read_layers(&*shared, step, &read));
            driver.submit();
            driver.receive([&mut sequence, &mut other]);
            let early = early
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let late = driver.read_pages(&pages, PageForm::Native);
            for (layer, (early, late)) in early.iter().zip(&late).enumerate() {
                assert!(early == late, "layer {layer} changed after it was ready");
            }
            let num_layers = kv.geometry().num_layers;
            assert_eq!(
                kv.num_layers_done(step),
                num_layers,
                "a step that has returned has all layers done"
            );
        }
        driver.finish(&mut sequence);
        assert_same("read by others", &self.alone(&script), &sequence.samples);
    }

    /// The regions that a transport announces contain all pages.
    pub fn pages_lie_in_their_regions(&self) {
        let kv = self.driver().executor.kv_pages();
        let regions = kv.regions().into_iter().map(addresses);
        let regions: Vec<_> = regions.collect();
        let geometry = kv.geometry();
        for layer in 0..geometry.num_layers {
            for page in (0..geometry.num_pages).map(PageId) {
                for part in kv.native_parts(layer, page).map(addresses) {
                    let contains = |region: &Range<usize>| {
                        region.start <= part.start && part.end <= region.end
                    };
                    assert!(
                        part.is_empty() || regions.iter().any(contains),
                        "layer {layer} of page {page} lies outside the regions"
                    );
                }
            }
        }
    }

    /// Copies pages out, and writes them into another executor and into the same one, in either form.
    pub fn pages_can_be_moved(&self, expected: &[Vec<Sample>]) {
        let scripts = self.scripts();
        let index = scripts.len() - 1;
        let (script, expected) = (&scripts[index], &expected[index]);
        for form in [PageForm::Native, PageForm::Canonical] {
            let (source, tables) = self.prefill(script);
            let contents = read_tables(&source, &tables, form);
            for mut target in [self.driver(), source] {
                let tables = write_tables(&mut target, form, &contents);
                let moved = continue_in(&mut target, script, &tables);
                assert_same("in moved pages", expected, &moved);
            }
        }
    }

    /// Copies whole pages out and into other pages.
    pub fn whole_pages_have_all_layers(&self) {
        let scripts = self.scripts();
        let (mut source, tables) = self.prefill(&scripts[scripts.len() - 1]);
        let kv = source.executor.kv_pages();
        let page_bytes = kv.geometry().page_bytes();
        let layer_bytes = kv.geometry().layer_bytes();
        let ids = |pages: &[u32]| -> Vec<PageId> { pages.iter().copied().map(PageId).collect() };
        for pages in &tables {
            let layers = source.read_pages(pages, PageForm::Native);
            let mut whole = vec![0; pages.len() * page_bytes];
            // SAFETY: no step is in flight.
            unsafe { kv.read_whole(&ids(pages), &mut whole) };
            let expected = (0..pages.len()).flat_map(|page| {
                let rows = page * layer_bytes..(page + 1) * layer_bytes;
                layers
                    .iter()
                    .flat_map(move |layer| layer[rows.clone()].to_vec())
            });
            assert!(
                whole.iter().copied().eq(expected),
                "whole pages {pages:?} have other bytes than their layers"
            );
            let copies: Vec<u32> = pages.iter().map(|_| source.take_page()).collect();
            // SAFETY: the driver has taken the pages, and no batch has named them yet.
            unsafe { kv.write_whole(&ids(&copies), &whole) };
            assert!(
                source.read_pages(&copies, PageForm::Native) == layers,
                "whole pages {copies:?} are written otherwise than read"
            );
        }
    }

    /// Pages in the canonical form are converted, and continue in an executor with pages of another size. If both
    /// executors have the same element order, their outputs have the same bits. Otherwise the attention of the second
    /// executor may add up in another order, so the test compares only the contents of pages.
    pub fn pages_of_another_size_go_on(&self, expected: &[Vec<Sample>]) {
        let scripts = self.scripts();
        let index = scripts.len() - 1;
        let num_cached = LONG_PROMPT - 1;
        let (source, tables) = self.prefill(&scripts[index]);
        let from = source.executor.kv_pages().geometry().clone();
        let contents = read_tables(&source, &tables, PageForm::Canonical);
        let size = self.page_size;
        for page_size in [2 * size, size + 1, size / 2] {
            let mut target = self.driver_of(1, page_size);
            let to = target.executor.kv_pages().geometry().clone();
            assert!(!from.is_native_to(&to));
            let converted = convert(&from, &to, &contents, num_cached);
            let tables = write_tables(&mut target, PageForm::Canonical, &converted);
            let kept = read_tables(&target, &tables, PageForm::Canonical);
            assert!(
                convert(&to, &from, &kept, num_cached)
                    == convert(&from, &from, &contents, num_cached),
                "pages of {page_size} positions hold other keys and values than pages of {size}"
            );
            let moved = continue_in(&mut target, &scripts[index], &tables);
            if from.order == to.order {
                assert_same("in pages of another size", &expected[index], &moved);
            } else {
                assert_eq!(expected[index].len(), moved.len(), "number of tokens");
            }
        }
    }

    /// Returns a driver and the page table of each KV group. The pages, in shuffled order, hold the prompt without its
    /// last token.
    fn prefill(&self, script: &Script) -> (Driver, Vec<Vec<u32>>) {
        let mut source = self.driver();
        source.keeps_pages = true;
        source.shuffle_pages();
        let mut sequence = source.begin(0, script);
        source.advance(&mut sequence, usize::MAX);
        source.step(&mut [&mut sequence]);
        let num_pages = (script.prompt.len() - 1).div_ceil(self.page_size);
        source.release_slot(&sequence);
        let tables = sequence.first_pages(num_pages);
        (source, tables)
    }
}

fn addresses(memory: NonNull<[u8]>) -> Range<usize> {
    let start = memory.cast::<u8>().as_ptr().addr();
    start..start + memory.len()
}

/// The contents of a step's pages, layer by layer. Each layer is read as soon as it is ready.
fn read_layers(kv: &dyn KvPages, step: StepId, pages: &[u32]) -> Vec<Vec<u8>> {
    let pages: Vec<PageId> = pages.iter().copied().map(PageId).collect();
    let read = |layer| {
        // Polls for even layers, because a woken thread may be late, and waits for odd layers.
        let is_polled = layer % 2 == 0;
        let mut looks = 0..if is_polled { MAX_LOOKS } else { 0 };
        while kv.num_layers_done(step) <= layer && looks.next().is_some() {
            std::hint::spin_loop();
        }
        let progress = kv.wait_layer(step, layer, LONG);
        assert_ne!(
            progress,
            LayerProgress::TimedOut,
            "layer {layer} of step {step} is not ready in time"
        );
        assert!(
            kv.num_layers_done(step) > layer,
            "layer {layer} of step {step} is ready and must count as done"
        );
        let mut bytes = vec![0; pages.len() * kv.geometry().layer_bytes()];
        // SAFETY: the layer is done, and no other step is in flight until the bytes are compared.
        unsafe { kv.read(layer, &pages, PageForm::Native, &mut bytes) };
        bytes
    };
    (0..kv.geometry().num_layers).map(read).collect()
}

/// The contents of a page table's pages, layer by layer.
type Layers = Vec<Vec<u8>>;

fn read_tables(driver: &Driver, tables: &[Vec<u32>], form: PageForm) -> Vec<Layers> {
    let tables = tables.iter();
    tables.map(|pages| driver.read_pages(pages, form)).collect()
}

/// The keys and values of the first `num_positions` in pages of another geometry, with zeros after them.
fn convert(
    from: &KvGeometry,
    to: &KvGeometry,
    contents: &[Layers],
    num_positions: usize,
) -> Vec<Layers> {
    let conversion = PageConversion::new(from, to).expect("the same model");
    let num_pages = num_positions.div_ceil(to.page_size as usize);
    let convert = |pages: &Vec<u8>| {
        let mut converted = vec![0; num_pages * to.layer_bytes()];
        conversion.convert(0..num_positions, pages, &mut converted);
        converted
    };
    let convert_all = |layers: &Layers| layers.iter().map(convert).collect();
    contents.iter().map(convert_all).collect()
}

/// Writes contents to new pages in shuffled order, and returns the page table of each KV group.
fn write_tables(target: &mut Driver, form: PageForm, contents: &[Layers]) -> Vec<Vec<u32>> {
    target.shuffle_pages();
    let layer_bytes = target.executor.kv_pages().geometry().layer_bytes();
    let tables = target.take_tables(contents[0][0].len() / layer_bytes);
    for (pages, layers) in tables.iter().zip(contents) {
        target.write_pages(pages, form, layers);
    }
    tables
}

/// The output after a prompt. The pages hold the rows of all its tokens except the last.
fn continue_in(target: &mut Driver, script: &Script, tables: &[Vec<u32>]) -> Vec<Sample> {
    let num_cached = script.prompt.len() - 1;
    let mut moved = target.begin_from(1, script, tables, &script.prompt, num_cached);
    target.finish(&mut moved);
    moved.samples
}
