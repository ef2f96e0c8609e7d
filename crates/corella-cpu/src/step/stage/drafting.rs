//! Guesses of the model's own draft head.

use corella_core::{Batch, Sample, SlotId};
use corella_model::{DraftSlot, StepSample};

use crate::step::draft_head::DraftRow;

use super::{Drafted, Stage, draw_block};

/// A slot whose tokens are being guessed.
struct Drafting {
    row: DraftRow,
    num_wanted: usize,
    drawn: Vec<Sample>,
}

impl Drafting {
    fn is_done(&self) -> bool {
        self.drawn.len() == self.num_wanted
    }
}

impl Stage {
    /// Passes the results of a step to the draft head.
    pub(super) fn follow_with_draft_head(&mut self, batch: &Batch) -> Result<(), String> {
        let Some(head) = &mut self.draft_head else {
            return Ok(());
        };
        if self.plan.rows.rows.is_empty() {
            return Ok(());
        }
        let (model, plan) = (&mut self.forward, &self.plan);
        head.follow(batch, &self.slots, (&*model, plan), &mut self.pool)?;
        head.keep(batch, model, plan);
        Ok(())
    }

    /// Draws tokens after the newest token of each slot, in rounds of one token for each slot. Guesses are drawn like
    /// the model's own tokens, so that a head that agrees with the model draws the same tokens.
    pub(super) fn draft(&mut self, asked: &[DraftSlot]) -> Drafted {
        let mut drafting = self.begin_drafting(asked)?;
        let Some(head) = &mut self.draft_head else {
            return Ok(Vec::new());
        };
        let block_len = head.forward().logit_rows();
        while drafting.iter().any(|it| !it.is_done()) {
            let mut active: Vec<_> = drafting.iter_mut().filter(|it| !it.is_done()).collect();
            for Drafting { row, .. } in &active {
                let slot = self.slots.get_mut(row.slot)?;
                slot.take_up(row.position, row.token);
            }
            let rows = active.iter().map(|it| &it.row);
            head.read(rows, &self.slots, &mut self.pool)?;
            for (block, first) in active.chunks_mut(block_len).zip((0..).step_by(block_len)) {
                let rows: Vec<usize> = (first..first + block.len()).collect();
                self.pool.run(&|worker| head.logits(&rows, worker))?;
                let places = rows.iter().zip(&*block).map(|(&row, drafting)| StepSample {
                    slot: drafting.row.slot,
                    row,
                    num_tokens: drafting.row.position + 1,
                    draft: None,
                });
                let places: Vec<_> = places.collect();
                let drawn = draw_block(
                    (&mut self.pool, &self.samplers),
                    (head.forward(), false),
                    &self.slots,
                    &places,
                    &[],
                )?;
                for ((drafting, drawn), row) in block.iter_mut().zip(drawn).zip(rows) {
                    let Ok(sample) = drawn else {
                        drafting.num_wanted = drafting.drawn.len();
                        continue;
                    };
                    head.forward().hidden_state(row, &mut drafting.row.before);
                    drafting.row.token = sample.token;
                    drafting.row.position += 1;
                    drafting.drawn.push(sample);
                }
            }
        }
        let drafts = drafting.into_iter();
        Ok(drafts.map(|it| (it.row.slot, it.drawn)).collect())
    }

    /// The slots with a known hidden state, for which guesses are possible.
    fn begin_drafting(&self, asked: &[DraftSlot]) -> Result<Vec<Drafting>, String> {
        let Some(head) = &self.draft_head else {
            return Ok(Vec::new());
        };
        let max_len = self.slots.limits().max_model_len as usize;
        let mut drafting = Vec::with_capacity(asked.len());
        for ask in asked {
            let (slot, position): (SlotId, usize) = (ask.slot, ask.position as usize);
            let num_known = self.slots.get(slot)?.history().len();
            let last = position.checked_sub(1);
            let before = last.and_then(|last| head.state_behind(slot, last));
            let Some(before) = before.filter(|_| position <= num_known) else {
                continue;
            };
            let room = max_len.saturating_sub(position);
            drafting.push(Drafting {
                row: DraftRow {
                    slot,
                    token: ask.token,
                    position,
                    before,
                },
                num_wanted: (ask.max_drafts as usize).min(room).min(head.max_drafts()),
                drawn: Vec::new(),
            });
        }
        Ok(drafting)
    }
}
