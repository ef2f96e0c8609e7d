//! What runs of a fleet have come to, so that nobody mistakes quiet runs for passed ones.

use corella_core::session::SessionFinish;
use corella_core::{AdmissionError, FinishReason};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PairTotals {
    pub num_runs: u64,
    pub num_events: u64,
    pub num_requests: u64,
    pub num_completed: u64,
    /// Their last token came from a decode node.
    pub num_completed_remotely: u64,
    pub num_cancelled: u64,
    pub num_cancelled_before: u64,
    pub num_deadlines: u64,
    pub num_decode_lost: u64,
    pub num_refused: u64,
    /// Refused because no decode node was left, and none may be decoded on prefill nodes.
    pub num_without_decode_node: u64,
    pub num_too_many_sessions: u64,
    pub num_failed: u64,
    /// Their prefill node died.
    pub num_clients_lost: u64,
    pub num_attempts: u64,
    pub num_second_attempts: u64,
    /// Runs that went on behind tokens that the client had.
    pub num_resumed: u64,
    pub num_suspects: u64,
    pub num_incompatible: u64,
    /// Told by the node itself, before the registry had it.
    pub num_restarts_noticed: u64,
    pub num_crashes: u64,
    pub num_blocks: u64,
    pub num_cut_connections: u64,
    pub num_repeated: u64,
    pub num_loads: u64,
    pub num_loads_done: u64,
    pub num_loads_failed: u64,
    pub num_loads_cancelled: u64,
    /// Rows written by loads of sessions that were over.
    pub num_late_rows: u64,
    pub num_load_timeouts: u64,
    pub num_exports_declined: u64,
    pub num_exports_cut_short: u64,
    pub num_leases_ended: u64,
    pub num_reads_of_failed_steps: u64,
    pub num_cached_rows: u64,
    /// Sessions that decode nodes gave up, and sessions that they did not take.
    pub num_aborts: u64,
    pub num_refusals: u64,
    pub num_unanswered_reservations: u64,
    /// Requests that decode nodes kept in host memory, took back from there, or could not keep.
    pub num_spills: u64,
    pub num_restores: u64,
    pub num_handed_back: u64,
    /// Choices that waited for another one of their prompt.
    pub num_waiting_choices: u64,
    /// Prompts of which a decode node had pages before it was decided which node computes them, and those that decode
    /// nodes computed.
    pub num_asked_first: u64,
    pub num_computed_there: u64,
    /// Requests that went on here behind tokens of a decode node that had computed the prompt.
    pub num_lost_after_compute: u64,
}

impl PairTotals {
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

    pub fn add(&mut self, other: &Self) {
        for ((_, sum), (_, value)) in self
            .fields_mut()
            .into_iter()
            .zip(other.clone().fields_mut())
        {
            *sum += *value;
        }
    }

    /// What has not happened once.
    pub fn missing(&self) -> Vec<String> {
        let mut own = self.clone();
        let fields = own.fields_mut();
        let missing = fields.into_iter().filter(|(_, value)| **value == 0);
        missing.map(|(name, _)| name.to_string()).collect()
    }

    fn fields_mut(&mut self) -> Vec<(&'static str, &mut u64)> {
        macro_rules! fields {
            ($($name:ident)*) => { vec![$((stringify!($name), &mut self.$name)),*] };
        }
        fields!(
            num_runs num_events num_requests num_completed num_completed_remotely num_cancelled
            num_cancelled_before num_deadlines num_decode_lost num_refused num_without_decode_node num_too_many_sessions
            num_failed num_clients_lost num_attempts num_second_attempts num_resumed num_suspects
            num_incompatible num_restarts_noticed num_crashes num_blocks num_cut_connections num_repeated num_loads
            num_loads_done num_loads_failed num_loads_cancelled num_late_rows num_load_timeouts
            num_exports_declined num_exports_cut_short num_leases_ended
            num_reads_of_failed_steps num_cached_rows num_aborts
            num_refusals num_unanswered_reservations num_spills num_restores num_handed_back
            num_waiting_choices num_asked_first num_computed_there num_lost_after_compute
        )
    }
}
