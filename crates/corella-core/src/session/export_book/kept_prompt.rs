//! Prompts that are kept for a node which is not known yet.
//!
//! Such a prompt is exported when all of its rows are computed, until a node has fetched them, their lease has ended,
//! or the client has left.

use super::{ExportBook, ExportFault, ExportTask};
use crate::session::SessionKey;
use crate::{KvFact, RequestId, SessionId};

/// The reason why a prompt is not kept any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptEnd {
    /// A node has fetched all rows.
    Fetched,
    /// The lease of the pages has ended, or a running request needed them.
    Expired,
    /// The client has left, the rows were not computed, or too many pages were held.
    Dropped,
}

impl KeptEnd {
    pub const ALL: [Self; 3] = [Self::Fetched, Self::Expired, Self::Dropped];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fetched => "pulled",
            Self::Expired => "expired",
            Self::Dropped => "dropped",
        }
    }

    pub(super) fn by_fault(fault: ExportFault) -> Self {
        match fault {
            ExportFault::Failed => Self::Dropped,
            ExportFault::LeaseEnded => Self::Expired,
        }
    }
}

/// The number of the only run of a session that keeps a prompt.
const RUN: u32 = 0;

impl ExportBook {
    /// Keeps the prompt that the engine computes as `request`, for the node that asks for `key`.
    pub fn keep(&mut self, key: SessionKey, request: RequestId, num_rows: u32) {
        self.begin(key.session, RUN, num_rows, true);
        if let Some(run) = self.runs.get_mut(&(key.session, RUN)) {
            run.kept_as = Some(key);
        }
        self.handle_submitted(key.session, RUN, request);
        // The run counts as ended now, because its outputs go to the client, not to a session.
        self.handle_ended(key.session, RUN);
    }

    /// Handles a fact about kept rows.
    pub fn handle_kv_fact(&mut self, fact: &KvFact) {
        // A kept prompt has no session that a fault would concern.
        self.handle_fact(fact);
    }

    /// Returns whether a prompt is being computed or kept.
    pub fn keeps(&self, session: SessionId) -> bool {
        let run = self.runs.get(&(session, RUN));
        run.is_some_and(|run| run.kept_as.is_some())
    }

    /// Returns the number of prompts that are being computed or kept.
    pub fn num_kept(&self) -> usize {
        let runs = self.runs.values();
        runs.filter(|run| run.kept_as.is_some()).count()
    }

    /// Returns the number of kept prompts that have ended in this way since the start.
    pub fn num_kept_ended(&self, how: KeptEnd) -> u64 {
        self.num_kept_ended[how as usize]
    }

    /// Keeps a prompt until this time, because a node fetches its rows.
    pub fn renew_kept(&mut self, session: SessionId, until_us: u64) {
        if self.keeps(session) {
            self.renew(session, RUN, until_us);
        }
    }

    /// Releases a prompt. Returns false if it is not kept.
    pub fn end_kept(&mut self, session: SessionId, how: KeptEnd) -> bool {
        let run = self.runs.get_mut(&(session, RUN));
        let Some(key) = run.and_then(|run| run.kept_as.take()) else {
            return false;
        };
        self.num_kept_ended[how as usize] += 1;
        // Ends even an export that never began, so that a node that asked early learns that no rows will come.
        self.tasks.push_back(ExportTask::Delete { key });
        self.release(session, RUN);
        true
    }

    /// Exports a kept prompt, whose rows are all computed.
    pub(super) fn export_kept(&mut self, at: (SessionId, u32)) {
        if let Some(run) = self.runs.get_mut(&at)
            && let Some(key) = run.kept_as
        {
            run.rows.make_readable();
            self.add_reader(RUN, key, 0);
        }
    }
}
