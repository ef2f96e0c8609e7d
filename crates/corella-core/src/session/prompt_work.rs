//! The choice of the node that computes a prompt: the prefill node or the decode node.

use crate::session::prefill_end::PrefillAction;
use crate::session::prefill_session::{
    Accounting, Context, Local, PrefillSession, PromptWork, Remote,
};
use crate::session::{SessionKey, ToDecode};
use crate::{CacheUse, ComputePlace};

impl PrefillSession {
    /// Asks the driver to decide which node computes the prompt.
    pub(super) fn ask(&mut self, num_cached_rows: u32, context: &mut Context<'_>) {
        let Remote::Linked(link) = &mut self.remote else {
            return;
        };
        link.prompt_work = PromptWork::Undecided { num_cached_rows };
        let (key, node) = (link.key, link.node);
        context.act(PrefillAction::Decide {
            key,
            node,
            num_cached_rows,
        });
    }

    pub(super) fn handle_decision(
        &mut self,
        key: SessionKey,
        place: ComputePlace,
        context: &mut Context<'_>,
    ) {
        let Some(link) = self.link_of(key) else {
            return;
        };
        let PromptWork::Undecided { num_cached_rows } = link.prompt_work else {
            return;
        };
        match place {
            ComputePlace::Here => {
                link.prompt_work = PromptWork::Here;
                let has_loaded = link.has_loaded;
                self.compute_here(num_cached_rows, context);
                if has_loaded {
                    self.handle_load_done(context);
                }
            }
            ComputePlace::There => {
                link.prompt_work = PromptWork::There;
                link.is_allocated = true;
                link.needs_rows = false;
                self.accounting = Some(Accounting {
                    cache_use: CacheUse {
                        num_cached_tokens: num_cached_rows,
                        ..CacheUse::default()
                    },
                    queue_us: 0,
                });
                self.send(ToDecode::Compute, context);
            }
        }
    }

    /// Computes the prompt, unless the run of an earlier attempt does so already, and exports the rows that the decode
    /// node lacks.
    pub(super) fn compute_here(&mut self, num_cached_rows: u32, context: &mut Context<'_>) {
        let session = self.id;
        let is_accepted = self.is_accepted();
        let num_rows = self.num_rows();
        let Remote::Linked(link) = &mut self.remote else {
            return;
        };
        link.is_allocated = true;
        link.needs_rows = num_cached_rows < num_rows;
        link.is_exported = true;
        let key = link.key;
        let run = match self.local {
            Local::Prefilling { run } | Local::Held { run, .. } => run,
            Local::Nothing | Local::Running { .. } => {
                let run = self.next_run();
                self.local = Local::Prefilling { run };
                let mut request = self.run_request();
                request.stopping.max_tokens = Some(self.num_earlier_tokens + 1);
                request.exports_kv = true;
                context.submit_locally(session, run, is_accepted, request);
                run
            }
        };
        context.export(|exports| exports.add_reader(run, key, num_cached_rows));
        self.tell_first_token(context);
    }
}
