//! Runs whose pages are read for decode nodes, and may be released only when no read is left.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::SessionId;
use crate::session::SessionKey;

/// Reading stops when the cache store has taken an offer back and says so, which may take a moment:
/// until then the pages stay as they are, even if session and run have ended.
#[derive(Debug, Default)]
pub(super) struct ExportTable {
    by_run: BTreeMap<(SessionId, u32), Export>,
}

#[derive(Debug, Default)]
struct Export {
    /// Attempts that may still be reading: two at most, because a session retries only once.
    readers: Vec<SessionKey>,
    wants_release: bool,
}

impl ExportTable {
    pub fn insert(&mut self, session: SessionId, run: u32, reader: SessionKey) {
        let export = self.by_run.entry((session, run)).or_default();
        export.readers.push(reader);
    }

    /// Returns true if nothing reads the pages of the run. If something does,
    /// [`stop_reading`](Self::stop_reading) returns the run once the last read has ended.
    pub fn try_release(&mut self, session: SessionId, run: u32) -> bool {
        let Some(export) = self.by_run.get_mut(&(session, run)) else {
            return true;
        };
        export.wants_release = true;
        if export.readers.is_empty() {
            self.by_run.remove(&(session, run));
            return true;
        }
        false
    }

    /// An attempt reads no more. Returns the run whose pages can be let go because of it.
    pub fn stop_reading(&mut self, reader: SessionKey) -> Option<(SessionId, u32)> {
        let runs = (reader.session, 0)..=(reader.session, u32::MAX);
        let mut exports = self.by_run.range_mut(runs);
        let (&of, export) = exports.find(|(_, export)| export.readers.contains(&reader))?;
        export.readers.retain(|other| *other != reader);
        let is_over = export.readers.is_empty() && export.wants_release;
        if is_over {
            self.by_run.remove(&of);
        }
        is_over.then_some(of)
    }

    pub fn len(&self) -> usize {
        self.by_run.len()
    }
}
