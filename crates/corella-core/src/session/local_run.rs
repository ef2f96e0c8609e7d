//! The runs of a prefill node's own engine: the prompt for a decode node, or the rest of the request.

use alloc::boxed::Box;

use crate::session::prefill_end::SessionFinish;
use crate::session::prefill_session::{Accounting, Context, Local, PrefillSession, Remote};
use crate::session::{AbortReason, FirstToken, SessionKey};
use crate::{FinishReason, Request, RequestOutput, StoppingCriteria};

impl PrefillSession {
    pub(super) fn handle_load_progress(&mut self, key: SessionKey, context: &mut Context<'_>) {
        if self.link_of(key).is_none() {
            return;
        }
        let Local::Held { run, until_us } = &mut self.local else {
            return;
        };
        let renewed_us = context.now_us.saturating_add(context.config.hold_lease_us);
        // A renewal for each transferred chunk would take too many commands.
        if renewed_us - *until_us >= context.config.hold_lease_us / 8 {
            *until_us = renewed_us;
            let run = *run;
            let session = self.id;
            context.export(|exports| exports.renew(session, run, renewed_us));
        }
    }

    pub(super) fn handle_export_failed(&mut self, run: u32, context: &mut Context<'_>) {
        let is_present = match self.local {
            Local::Prefilling { run: present } | Local::Held { run: present, .. } => present == run,
            Local::Nothing | Local::Running { .. } => false,
        };
        if !is_present {
            return;
        }
        // No decode node could get the missing rows now.
        self.can_export = false;
        // Loaded rows may come from the failed step.
        let needs_rows = self.link().is_none_or(|link| link.needs_rows);
        if needs_rows && !matches!(self.remote, Remote::Nothing) {
            let reason = AbortReason::LoadFailed;
            self.unlink(Some(reason.clone()), context);
            self.go_on_locally(reason, context);
        }
        // The run continues, and may need the pages that are held for its own export.
        if matches!(self.local, Local::Prefilling { .. }) {
            context.release(self.id, run);
        }
    }

    pub(super) fn handle_lease_ended(&mut self, run: u32, context: &mut Context<'_>) {
        match self.local {
            Local::Held { run: present, .. } if present == run => self.lose_hold(context),
            // The run has gone on without its pages, and exports nothing any more.
            Local::Prefilling { run: present } if present == run => {
                self.handle_export_failed(run, context);
            }
            _ => {}
        }
    }

    /// Releases the pages of the prompt. No decode node is asked any more, because none could load the rows.
    pub(super) fn lose_hold(&mut self, context: &mut Context<'_>) {
        let reason = AbortReason::HoldExpired;
        self.unlink(Some(reason.clone()), context);
        self.go_on_locally(reason, context);
    }

    pub(super) fn handle_local_output(
        &mut self,
        run: u32,
        output: RequestOutput,
        context: &mut Context<'_>,
    ) {
        let is_prefill = match self.local {
            Local::Prefilling { run: present } if present == run => true,
            Local::Running { run: present } if present == run => false,
            // The run was aborted.
            _ => return,
        };
        self.accounting.get_or_insert(Accounting {
            cache_use: output.cache_use,
            queue_us: output.queue_us,
        });
        if is_prefill && let Some(sample) = &output.sample {
            self.first_token = Some(Box::new(FirstToken {
                sample: sample.clone(),
                num_cached_tokens: output.cache_use.num_cached_tokens,
            }));
        }
        let num_output_tokens = self.output.len() + usize::from(output.sample.is_some());
        match output.finish {
            None => self.emit(output.sample, None, context),
            // The run was limited to one token, and the request was not.
            Some(FinishReason::Length)
                if is_prefill && num_output_tokens < self.max_tokens as usize =>
            {
                self.emit(output.sample, None, context);
                self.handle_prefilled(run, context);
            }
            Some(finish) => {
                self.note_run_ended(run, is_prefill, context);
                let finish = SessionFinish::Finished(finish);
                self.end(output.sample, finish, AbortReason::Finished, context);
            }
        }
    }

    /// Handles that the engine has refused a run.
    pub(super) fn handle_not_run(
        &mut self,
        run: u32,
        finish: SessionFinish,
        told: AbortReason,
        context: &mut Context<'_>,
    ) {
        let is_prefill = match self.local {
            Local::Prefilling { run: present } if present == run => true,
            Local::Running { run: present } if present == run => false,
            _ => return,
        };
        self.note_run_ended(run, is_prefill, context);
        self.end(None, finish, told, context);
    }

    /// Notes the end of a run. If it exported rows, its pages may still be held.
    fn note_run_ended(&mut self, run: u32, is_prefill: bool, context: &Context<'_>) {
        let until_us = context.now_us;
        self.local = match is_prefill {
            true => Local::Held { run, until_us },
            false => Local::Nothing,
        };
    }

    /// Handles that the prompt is computed and the request needs more tokens than the first one.
    fn handle_prefilled(&mut self, run: u32, context: &mut Context<'_>) {
        let until_us = context.now_us.saturating_add(context.config.hold_lease_us);
        self.local = Local::Held { run, until_us };
        if matches!(self.remote, Remote::Nothing) {
            return self.run_locally(context);
        }
        let session = self.id;
        context.export(|exports| exports.renew(session, run, until_us));
        self.tell_first_token(context);
        self.release_loaded(context);
    }

    pub(super) fn release_loaded(&mut self, context: &mut Context<'_>) {
        let has_loaded = self.link().is_some_and(|link| link.has_loaded);
        if let Local::Held { run, .. } = self.local
            && has_loaded
        {
            self.local = Local::Nothing;
            let session = self.id;
            context.release(session, run);
        }
    }

    pub(super) fn run_locally(&mut self, context: &mut Context<'_>) {
        let session = self.id;
        let is_accepted = self.is_accepted();
        let run = self.next_run();
        let before = core::mem::replace(&mut self.local, Local::Running { run });
        let request = self.run_request();
        context.submit_locally(session, run, is_accepted, request);
        // The release follows the submission, so that the new run finds the rows.
        if let Local::Held { run, .. } = before {
            context.release(session, run);
        }
    }

    /// Returns the request for this node's engine, with the tokens that the client has.
    pub(super) fn run_request(&self) -> Request {
        let mut request = self.request.clone();
        request.stopping = self.stopping();
        request.output = self.output.clone();
        request
    }

    pub(super) fn stopping(&self) -> StoppingCriteria {
        StoppingCriteria {
            max_tokens: Some(self.max_tokens),
            ..self.request.stopping.clone()
        }
    }

    /// Returns whether the engine has accepted a run of the session, or the client has tokens.
    pub(super) fn is_accepted(&self) -> bool {
        self.num_runs > 0 || !self.output.is_empty()
    }

    pub(super) fn next_run(&mut self) -> u32 {
        self.num_runs += 1;
        self.num_runs - 1
    }
}
