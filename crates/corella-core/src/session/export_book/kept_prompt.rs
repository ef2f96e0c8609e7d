//! Prompts that are kept for nodes without a name yet.
//!
//! The rows of such a prompt are exported once all of them are computed, until some node has fetched them, their lease
//! is over, or the client has left that would have named the node.

use super::{ExportBook, ExportFault, ExportTask};
use crate::session::SessionKey;
use crate::{KvFact, RequestId, SessionId};

/// How the keeping of a prompt has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptEnd {
    /// A node has all of its rows.
    Fetched,
    /// Its lease was over, or a running request needed the pages.
    Expired,
    /// Its client has left, its rows were not computed, or there was no room to keep them.
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
    /// The engine computes a prompt as `request`, whose rows are kept for the node that asks for `key`.
    pub fn keep(&mut self, key: SessionKey, request: RequestId, num_rows: u32) {
        self.begin(key.session, RUN, num_rows, true);
        if let Some(run) = self.runs.get_mut(&(key.session, RUN)) {
            run.kept_as = Some(key);
        }
        self.handle_submitted(key.session, RUN, request);
        // Its outputs are the client's and tell nothing of the rows.
        self.handle_ended(key.session, RUN);
    }

    /// What the engine says of rows, where they are only kept.
    pub fn handle_kv_fact(&mut self, fact: &KvFact) {
        // A fault is for a session, and a prompt is kept without one.
        self.handle_fact(fact);
    }

    /// Whether a prompt is being computed or kept.
    pub fn keeps(&self, session: SessionId) -> bool {
        let run = self.runs.get(&(session, RUN));
        run.is_some_and(|run| run.kept_as.is_some())
    }

    /// Prompts that are being computed or kept.
    pub fn num_kept(&self) -> usize {
        let runs = self.runs.values();
        runs.filter(|run| run.kept_as.is_some()).count()
    }

    /// Since the start.
    pub fn num_kept_ended(&self, how: KeptEnd) -> u64 {
        self.num_kept_ended[how as usize]
    }

    /// Some node fetches the rows: they are kept until this time.
    pub fn renew_kept(&mut self, session: SessionId, until_us: u64) {
        if self.keeps(session) {
            self.renew(session, RUN, until_us);
        }
    }

    /// Lets go of a prompt. False when it is not kept.
    pub fn end_kept(&mut self, session: SessionId, how: KeptEnd) -> bool {
        let run = self.runs.get_mut(&(session, RUN));
        let Some(key) = run.and_then(|run| run.kept_as.take()) else {
            return false;
        };
        self.num_kept_ended[how as usize] += 1;
        // Also when nothing was stored: a peer that asks early learns that nothing will come.
        self.tasks.push_back(ExportTask::Delete { key });
        self.release(session, RUN);
        true
    }

    /// All rows of a run are computed. If they are kept for others, these may ask for them now.
    pub(super) fn export_kept(&mut self, at: (SessionId, u32)) {
        if let Some(run) = self.runs.get_mut(&at)
            && let Some(key) = run.kept_as
        {
            run.rows.make_readable();
            self.add_reader(RUN, key, 0);
        }
    }
}
