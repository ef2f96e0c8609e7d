//! The keys and values of a block of positions for attention by matrix tiles: listed in their pages, or copied.

use std::ops::Range;

use corella_model::{KvFormat, PageTable};

use crate::kernels::{InPlaceAttention, KEY_TILE, TileAttention, VALUE_TILE};
use crate::kv::{HeadPage, Side};

use super::kv_fetch::KvFetch;
use super::layer::AttentionLayer;
use super::plan::AttentionTask;
use super::span::StepSpan;
use super::tile_scratch::TileScratch;

/// An attention task and its inputs from the step.
pub struct Work<'a> {
    /// The index of the task in the worker's list.
    pub index: usize,
    pub task: &'a AttentionTask,
    pub span: &'a StepSpan,
    pub table: PageTable<'a>,
    /// The query of the task's first row.
    pub queries: *const u16,
    /// The first position that the rows of the task see.
    pub first: usize,
    /// The position after the last one that the task reads.
    pub end: usize,
    pub has_one_tile: bool,
    /// The kernels that read keys and values from their pages, if the task has few enough rows.
    pub in_place: Option<InPlaceAttention>,
}

impl AttentionLayer<'_> {
    pub(super) fn tile_kernels(&self) -> &TileAttention {
        let kernels = self.kernels.tile_attention.as_ref();
        kernels.expect("this instruction set has no tile attention")
    }

    fn head_page(&self, work: &Work<'_>, position: usize) -> HeadPage {
        HeadPage {
            layer: self.kv.layer(self.kv_layer),
            page: work.table.page(position / self.kv.page_size()),
            head: work.task.kv_head,
        }
    }

    /// Lists the current block's tiles of keys, an even number, and the tiles of values that are read from their pages.
    pub(super) fn list_tiles(
        &self,
        work: &Work<'_>,
        block: Range<usize>,
        fetch: &mut KvFetch<'_>,
        scratch: &mut TileScratch,
    ) {
        let page_size = self.kv.page_size();
        let tile_len = KEY_TILE * self.spec.head_dim;
        scratch.keys.clear();
        scratch.page_values.clear();
        for (index, first) in tiles(&block).enumerate() {
            // Positions before the window and past the end may have any keys: their weights are 0.
            let page = self.head_page(work, first.max(work.first).min(block.end - 1));
            let offset = first % page_size;
            if self.kv.format == KvFormat::Int8 && first < block.end {
                let len = KEY_TILE.min(block.end - first);
                for (side, scales) in Side::BOTH.into_iter().zip(&mut scratch.scales) {
                    let scales = &mut scales[first - block.start..][..len];
                    self.kv.copy_scales(page, side, offset, scales);
                }
            }
            let from = self.kv.tile(Side::Keys, page, offset);
            if work.in_place.is_some() {
                if first < block.end {
                    // Values before the window may be leftover memory, and 0 times leftover memory may be NaN.
                    let values = match first + KEY_TILE <= work.first {
                        true => scratch.zeros,
                        false => self.kv.tile(Side::Values, page, offset),
                    };
                    scratch.page_values.push(values);
                }
                scratch.keys.push(from);
                continue;
            }
            scratch.keys.push(match self.kv.format {
                KvFormat::Int8 => {
                    let copied = scratch.copied_keys.wrapping_add(index * tile_len);
                    let widen = self.tile_kernels().widen_keys;
                    let (stride, head_dim) = (self.kv.key_stride(), self.spec.head_dim);
                    fetch.reach(work.index, first);
                    let lines = fetch.lines(work.index, first);
                    // SAFETY: the source is a tile of the page; the copy has room for `TILE_ATTENTION_BLOCK` positions.
                    unsafe { widen(from, stride, head_dim, copied, lines) };
                    copied.cast()
                }
                KvFormat::Float(_) => from,
            });
        }
    }

    /// Copies the values of a block's positions from their pages.
    pub(super) fn copy_values(
        &self,
        work: &Work<'_>,
        block: Range<usize>,
        fetch: &mut KvFetch<'_>,
        scratch: &mut TileScratch,
    ) {
        let head_dim = self.spec.head_dim;
        let page_size = self.kv.page_size();
        for (index, first) in tiles(&block).enumerate() {
            let len = match first + KEY_TILE <= work.first {
                true => 0,
                false => block.end.saturating_sub(first).min(KEY_TILE),
            };
            let page = self.head_page(work, first.max(work.first).min(block.end - 1));
            let (tile, half) = (index / 2, index % 2);
            // SAFETY: the copy has room for `TILE_ATTENTION_BLOCK` positions.
            let to = unsafe { scratch.values.add(tile * VALUE_TILE * head_dim) };
            let from = self.kv.tile(Side::Values, page, first % page_size);
            // SAFETY: the page has `len` positions from `first` on, and the target is half a tile of values.
            unsafe {
                let to = to.add(half * KEY_TILE / 2 * 32);
                let copy = match self.kv.format {
                    KvFormat::Int8 => self.tile_kernels().widen_values,
                    KvFormat::Float(_) => self.tile_kernels().copy_values,
                };
                copy(from, len, head_dim, to, fetch.lines(work.index, first));
            }
        }
    }
}

/// The first positions of a block's tiles of keys, an even number of them.
fn tiles(block: &Range<usize>) -> impl Iterator<Item = usize> + use<> {
    let end = block.start + block.len().next_multiple_of(VALUE_TILE);
    (block.start..end).step_by(KEY_TILE)
}
