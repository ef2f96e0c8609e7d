//! Guesses of the served model's own draft head.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use corella_core::{Batch, DraftRequest, RequestId, StepId};
use corella_model::{DraftSlot, Executor};

use crate::draft::drafter::Drafts;
use crate::log::panic_message::panic_message;
use crate::state::watchdog::{Watchdog, WatchedStep};

/// Asks the executor for guesses between two steps. It keeps no state: the executor keeps the head's state of a request
/// in the request's slot.
pub(crate) struct HeadDrafter {
    watchdog: Watchdog,
    /// The number of the next round, for the watchdog's reports.
    round: u64,
}

impl HeadDrafter {
    pub(crate) fn new(watchdog: Watchdog) -> Self {
        Self { watchdog, round: 0 }
    }

    pub(crate) fn draft(
        &mut self,
        executor: &mut dyn Executor,
        requests: &[DraftRequest<'_>],
    ) -> Result<Vec<Drafts>, String> {
        let slot = |request: &DraftRequest<'_>| {
            let (&token, known) = request.tokens.split_last()?;
            Some(DraftSlot {
                slot: request.start.slot,
                token,
                position: known.len() as u32,
                max_drafts: request.max_drafts,
            })
        };
        let slots: Vec<DraftSlot> = requests.iter().filter_map(slot).collect();
        let ids: Arc<[RequestId]> = requests.iter().map(|it| it.start.request).collect();
        let batch = Batch {
            step: StepId(self.round),
            ..Batch::default()
        };
        self.round += 1;
        self.watchdog.watch(Some(WatchedStep {
            batch: Arc::new(batch),
            requests: ids,
            since: Instant::now(),
        }));
        let drafted = catch_unwind(AssertUnwindSafe(|| executor.draft(&slots)));
        self.watchdog.watch(None);
        let drafted = drafted
            .unwrap_or_else(|panic| Err(format!("it panicked: {}", panic_message(&*panic))))?;
        let of_slot = |slot| requests.iter().find(|request| request.start.slot == slot);
        let drafts = drafted.into_iter().filter_map(|(slot, samples)| {
            let tokens = samples.iter().map(|sample| sample.token).collect();
            Some((of_slot(slot)?.start.request, tokens))
        });
        Ok(drafts.collect())
    }
}
