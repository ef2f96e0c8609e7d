//! The outcomes of runs of pairs and fleets.

use corella_core::session::SessionFinish;
use corella_core::{AdmissionError, FinishReason};

use crate::count::counts;
use crate::pair::blocks::fetch_totals::FetchTotals;

counts! {
    pub struct SessionTotals {
        num_runs,
        num_events,
        num_requests,
        num_completed,
        /// Requests whose last token came from a decode node.
        num_completed_remotely,
        num_cancelled,
        num_cancelled_before,
        num_deadlines,
        num_decode_lost,
        num_refused,
        /// Requests refused because no decode node was left and prefill nodes did not fall back.
        num_without_decode_node,
        num_too_many_sessions,
        num_failed,
        /// Requests whose prefill node died before they had ended.
        num_clients_lost,
        num_attempts,
        num_second_attempts,
        /// Runs that began with output tokens that the client already had.
        num_resumed,
        /// Runs among these that export their rows to another decode node.
        num_moved,
        num_suspects,
        num_incompatible,
        /// Restarts that the node itself reported before the registry did.
        num_restarts_noticed,
        num_crashes,
        num_blocks,
        num_cut_connections,
        num_repeated,
        num_loads,
        num_loads_done,
        num_loads_failed,
        num_loads_cancelled,
        /// Recurrent states that were sent to decode nodes.
        num_states_sent,
        /// Rows written by loads of ended sessions.
        num_late_rows,
        num_load_timeouts,
        num_exports_declined,
        num_exports_cut_short,
        num_leases_ended,
        num_reads_of_failed_steps,
        num_cached_rows,
        /// Cached rows on decode nodes that come from prefill nodes of another arithmetic.
        num_mixed_cached_rows,
        /// Sessions that decode nodes ended early, and sessions that they refused.
        num_aborts,
        num_refusals,
        num_unanswered_reservations,
        /// Requests whose KV decode nodes spilled to host memory, restored, or could not keep.
        num_spills,
        num_restores,
        num_handed_back,
        num_waiting_choices,
        /// Prompts whose decode node had pages before the computing node was chosen, and prompts computed by decode
        /// nodes.
        num_asked_first,
        num_computed_there,
        /// Requests that the prefill node continued after a decode node had computed the prompt, sent tokens, and was
        /// lost.
        num_lost_after_compute,
    }
}

counts! {
    /// The outcomes of placement in a fleet.
    pub struct PlacementTotals {
        num_lists,
        num_outages,
        num_empty_lists,
        num_probes,
        num_silent_probes,
        /// Calls placed on the node that has a part of their prompt, and calls placed on other nodes.
        num_near,
        num_elsewhere,
        /// Calls that stay on their prefill node, and calls that no node takes.
        num_here,
        num_untaken,
        /// Choices of the computing node by predicted cost: the prefill node, or the decode node.
        num_decided_here,
        num_decided_there,
        /// Calls that name a node with a part of their prompt.
        num_hinted,
        /// Fetches before a prefill from the node that has a part of the prompt, and planned fetches between any two
        /// nodes.
        num_prompt_fetches,
        num_other_pulls,
        num_transfers,
    }
}

/// The sums over runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PairTotals {
    pub sessions: SessionTotals,
    /// All 0 except in fleets.
    pub placement: PlacementTotals,
    pub loads: FetchTotals,
}

impl PairTotals {
    pub fn add(&mut self, run: &Self) {
        self.sessions.add(&run.sessions);
        self.placement.add(&run.placement);
        self.loads.add(&run.loads);
    }
}

impl SessionTotals {
    pub fn count_end(&mut self, finish: &SessionFinish) {
        let count = match finish {
            SessionFinish::Finished(FinishReason::Aborted) => &mut self.num_cancelled,
            SessionFinish::Finished(FinishReason::Error(_)) => &mut self.num_failed,
            SessionFinish::Finished(_) => &mut self.num_completed,
            SessionFinish::Refused(AdmissionError::NoDecodeNode) => {
                &mut self.num_without_decode_node
            }
            SessionFinish::Refused(_) => &mut self.num_refused,
            SessionFinish::DeadlinePassed => &mut self.num_deadlines,
            SessionFinish::DecodeLost(_) => &mut self.num_decode_lost,
        };
        *count += 1;
    }
}
