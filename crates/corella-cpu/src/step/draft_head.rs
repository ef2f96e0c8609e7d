//! The draft head: a layer that some models, such as DeepSeek-V3 and Qwen3-Next, are trained with. It guesses the token
//! after the next one (multi-token prediction).
//!
//! The head's input for a token combines the token's embedding and the model's hidden state after the previous token.
//! The model's output head maps the layer's output to the next token. So the row of a token depends only on this token
//! and earlier ones, like the rows of all other layers. The head's keys and values therefore use the ids of the model's
//! pages, and are shared, found again and given up with these pages. The head has KV memory of its own, because the
//! pages themselves hold only the model's layers. A page from a disk or another node comes without the head's keys and
//! values, and guesses after such pages are worse.
//!
//! Each step writes the head's keys and values of its tokens. Only guessing needs attention and the parts after it.
//! Guessing first runs the layer for the newest token of a request, which no step has computed. Then it runs the layer
//! for each guess, with the head's own output in place of the model's hidden state. The rows of guesses in a page are
//! void, like all rows after the request's computed tokens. If the request has no page for such a row, the row is in a
//! spare page of the slot.

use corella_core::{Batch, PageId, SlotId};
use corella_model::{DecoderSpec, DeviceError, KvFormat, KvLayer, LayerSpec, PageTable, Slots};

use crate::dense::{Buffer, PackedRows};
use crate::kernels::Kernels;
use crate::kv::{RowShape, place_bytes};
use crate::system::{ThreadPool, Worker};
use crate::weights::{PackedAdapter, PackedDraftHead, PackedMatrix, PackedNorm};

use super::forward::norm::RowNorm;
use super::forward::{Forward, ForwardLimits, ForwardParts, Incoming};
use super::kept_state::KeptStates;
use super::layout::StepLayout;
use super::profile::barrier_after;
use super::profile::{Operation, Walk};

pub struct DraftHead {
    /// The layer, between the model's embedding and output head.
    forward: Forward,
    embedding_norm: PackedNorm,
    hidden_norm: PackedNorm,
    join: PackedMatrix,
    /// The inputs of `join`.
    joined: PackedRows,
    /// For each worker, the two parts of an input of `join`: the embedding and the hidden state.
    parts: Buffer,
    layout: StepLayout,
    kept: KeptStates,
    group: usize,
    /// The id of the first spare page.
    first_spare: usize,
    num_spare: usize,
    max_drafts: usize,
}

pub struct DraftHeadParts {
    pub spec: DecoderSpec,
    pub layer: LayerSpec,
    pub weights: PackedDraftHead,
    pub kernels: &'static Kernels,
    /// A KV group that keeps all pages.
    pub group: usize,
    /// The limits of the model, whose page ids the head shares.
    pub limits: ForwardLimits,
    pub num_threads: usize,
}

/// A token that the head reads.
pub struct DraftRow {
    pub slot: SlotId,
    pub token: u32,
    pub position: usize,
    /// The hidden state after the previous token, of the model or of the head itself.
    pub before: Vec<f32>,
}

/// Bytes of the head's keys and values in a page.
pub fn draft_page_bytes(spec: &DecoderSpec, page_size: u32, format: KvFormat) -> usize {
    let of_layer =
        |layer: &LayerSpec| place_bytes(&[RowShape::new(&layer.attention, 1)], page_size, format);
    spec.draft_head.as_ref().map_or(0, of_layer)
}

/// Bytes of the hidden states that a running request keeps for the head.
pub fn draft_state_bytes(spec: &DecoderSpec, max_drafts: usize) -> usize {
    let state_bytes = spec.hidden_size * size_of::<f32>();
    spec.draft_head
        .as_ref()
        .map_or(0, |_| (1 + max_drafts) * state_bytes)
}

impl DraftHead {
    pub fn new(parts: DraftHeadParts) -> Result<Self, DeviceError> {
        let (hidden, limits) = (parts.spec.hidden_size, parts.limits);
        let states = limits.states;
        let num_spare = states.max_drafts.div_ceil(limits.page_size as usize);
        let max_rows = limits.max_rows.max(states.max_num_seqs);
        let PackedDraftHead {
            embedding_norm,
            hidden_norm,
            join,
            weights,
        } = parts.weights;
        let row_shapes = vec![RowShape::new(&parts.layer.attention, 1)];
        let no_memory = |error| DeviceError(format!("no memory for the draft head: {error}"));
        let joined = PackedRows::new(max_rows, 2 * hidden, join.form, join.is_grouped());
        Ok(Self {
            joined: joined.map_err(no_memory)?,
            parts: Buffer::new(parts.num_threads, 2 * hidden).map_err(no_memory)?,
            forward: Forward::new(ForwardParts {
                spec: DecoderSpec {
                    layers: vec![parts.layer],
                    ..parts.spec
                },
                kernels: parts.kernels,
                weights,
                first_layer: 0,
                kv_layers: vec![Some(KvLayer {
                    group: parts.group,
                    in_page: 0,
                    in_place: 0,
                    num_in_place: 1,
                })],
                row_shapes,
                limits: ForwardLimits {
                    num_pages: limits.num_pages + num_spare * states.max_num_seqs,
                    max_rows,
                    ..limits
                },
                num_threads: parts.num_threads,
                draws: true,
                max_adapter_rank: None,
            })?,
            embedding_norm,
            hidden_norm,
            join,
            layout: StepLayout::default(),
            kept: KeptStates::new(hidden, states.max_num_seqs, states.num_snapshots),
            group: parts.group,
            first_spare: limits.num_pages,
            num_spare,
            max_drafts: states.max_drafts,
        })
    }

    pub fn forward(&mut self) -> &mut Forward {
        &mut self.forward
    }

    pub fn max_drafts(&self) -> usize {
        self.max_drafts
    }

    /// Begins the kept states of starting slots, from their snapshots if there are any.
    pub fn start(&mut self, batch: &Batch) {
        self.kept.start(batch);
    }

    /// Copies keys and values of the rows that a batch copies.
    pub fn copy_rows(&mut self, batch: &Batch) {
        for copy in &batch.copies {
            let (from, to) = (copy.from.0 as usize, copy.to.0 as usize);
            // SAFETY: the batch's copies were checked against the number of pages, which is no smaller
            // here, and no worker runs.
            unsafe { self.forward.kv.copy_rows(from, to, copy.num_rows as usize) };
        }
    }

    /// Writes the head's keys and values of a step's tokens. The layers of `model` have run for all rows of `of_model`.
    pub fn follow(
        &mut self,
        batch: &Batch,
        slots: &Slots<PackedAdapter>,
        (model, of_model): (&Forward, &StepLayout),
        pool: &mut ThreadPool,
    ) -> Result<(), String> {
        self.layout.clear();
        for (span, rows) in batch.spans.iter().zip(of_model.spans.iter()) {
            let slot = slots.get(span.slot)?;
            let tokens = &slot.history()[rows.start..][..rows.num_rows];
            let tables = slot.tables(span.start);
            self.layout.add_span(tokens, rows.start, tables);
        }
        // No attention is computed, so there are no kinds of attention to divide.
        let (tile_rows, shape) = (self.forward.tile_rows(), self.forward.task_shape());
        let kinds = std::iter::empty();
        self.layout
            .finish(kinds, tile_rows, shape, pool.num_threads());
        let before = |row: usize, state: &mut [f32]| {
            let span = &of_model.spans[of_model.rows.rows[row].span];
            if row > span.first_row {
                // SAFETY: the model's layers have run, and its residual stream is not written now.
                unsafe { model.read_hidden_state(row - 1, state) };
                return;
            }
            let slot = batch.spans[of_model.rows.rows[row].span].slot.0 as usize;
            let kept = span
                .start
                .checked_sub(1)
                .and_then(|at| self.kept.get(slot, at));
            match kept {
                Some(kept) => state.copy_from_slice(kept),
                // There is no hidden state before position 0, to which the head's rows do not attend. After a failed
                // step the state is missing, too, and guesses are worse.
                None => state.fill(0.0),
            }
        };
        let (head, layout) = (&*self, &self.layout);
        pool.run(&|worker| {
            let profile = head.forward.profile.as_deref();
            let walk = &mut Walk::new(worker, profile, layout.is_prefill());
            head.join(before, walk);
            head.forward.keys_and_values(layout, walk);
        })?;
        Ok(())
    }

    /// Keeps the hidden states of each span after the last token that is no draft and after each draft.
    pub fn keep(&mut self, batch: &Batch, model: &mut Forward, of_model: &StepLayout) {
        for (span, rows) in batch.spans.iter().zip(of_model.spans.iter()) {
            let num_kept = 1 + span.num_drafts as usize;
            let skipped = rows.num_rows - num_kept;
            let (slot, first) = (span.slot.0 as usize, rows.start + skipped);
            let first_row = rows.first_row + skipped;
            self.kept.replace(slot, first, num_kept, |index, state| {
                model.hidden_state(first_row + index, state);
            });
        }
        self.kept.keep(batch);
    }

    /// The model's hidden state after a position of a slot, if kept.
    pub fn state_behind(&self, slot: SlotId, position: usize) -> Option<Vec<f32>> {
        self.kept
            .get(slot.0 as usize, position)
            .map(<[f32]>::to_vec)
    }

    /// Runs the layer for rows of different slots. The pages hold all rows of earlier tokens. Afterwards `logits` can
    /// be called.
    pub fn read<'a>(
        &mut self,
        rows: impl Iterator<Item = &'a DraftRow> + Clone,
        slots: &Slots<PackedAdapter>,
        pool: &mut ThreadPool,
    ) -> Result<(), String> {
        self.layout.clear();
        for row in rows.clone() {
            let tables = slots.get(row.slot)?.tables(row.position as u32);
            let mut tables: Vec<_> = tables.collect();
            let table = tables[self.group];
            let entry = row.position / self.forward.kv.page_size();
            let mut pages = table.pages().to_vec();
            // A slot has the same spare pages for the same entries until its next step.
            for spare in 0..(entry + 1).saturating_sub(table.first() + pages.len()) {
                let page = self.first_spare + row.slot.0 as usize * self.num_spare + spare;
                assert!(
                    spare < self.num_spare,
                    "a guess needs more spare pages than a slot has"
                );
                pages.push(PageId(page as u32));
            }
            tables[self.group] = PageTable::new(table.first(), &pages);
            self.layout.add_span(&[row.token], row.position, tables);
        }
        self.forward.divide(&mut self.layout);
        let states: Vec<&[f32]> = rows.map(|row| &*row.before).collect();
        let (head, layout) = (&*self, &self.layout);
        pool.run(&|worker| {
            let profile = head.forward.profile.as_deref();
            let walk = &mut Walk::new(worker, profile, layout.is_prefill());
            head.join(|row, state| state.copy_from_slice(states[row]), walk);
            head.forward.layers(layout, Incoming::InPlace, worker);
        })
    }

    /// Computes the logits of rows of `read`, at most `Forward::logit_rows`.
    pub fn logits(&self, rows: &[usize], worker: &Worker<'_>) {
        self.forward.logits(&self.layout, rows, worker);
    }

    /// Computes the layer's input for the layout's rows. `before` writes the hidden state after the token before a row.
    fn join(&self, before: impl Fn(usize, &mut [f32]), walk: &mut Walk<'_>) {
        let (forward, grid, worker) = (&self.forward, self.layout.grid, walk.worker.index());
        let (spec, kernels) = (forward.spec(), forward.kernels());
        for row in grid.own_rows(worker) {
            // SAFETY: this row of the parts belongs to this worker.
            let parts = unsafe { self.parts.row_mut(worker) };
            let parts = &mut parts[..2 * spec.hidden_size];
            let (embedding, state) = parts.split_at_mut(spec.hidden_size);
            forward.embed(self.layout.rows.rows[row].token, embedding);
            before(row, state);
            RowNorm::new(kernels, Some(&self.embedding_norm), embedding).apply(embedding);
            RowNorm::new(kernels, Some(&self.hidden_norm), state).apply(state);
            let tile = grid.tiles.rows(grid.tiles.tile_of(row));
            // SAFETY: the row of the joined inputs belongs to this worker.
            unsafe {
                self.joined.write(kernels, &tile, row, 0, parts);
                self.joined.complete(kernels, &tile, row, &self.join);
            }
        }
        barrier_after(Operation::Embed, walk);
        let out = forward.stream_output();
        forward.dense(
            Operation::Embed,
            &self.joined,
            grid,
            (&self.join).into(),
            out,
            walk,
        );
    }
}
