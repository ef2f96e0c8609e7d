//! The request of a load: its rows and their destination.

use std::time::Instant;

use corella_core::session::SessionKey;
use corella_core::{PageTable, SnapshotId};

use super::PeerAddress;

/// Rows `first_row..num_rows` of a session, and where they belong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    pub key: SessionKey,
    pub peer: PeerAddress,
    /// The first of a page: the rows before it are there already.
    pub first_row: u32,
    pub num_rows: u32,
    /// The session's own pages, by KV group. A table has those of all rows, or of those that are read behind its
    /// group's window.
    pub tables: Vec<PageTable>,
    /// Where the recurrent state behind all rows belongs, if there is one.
    pub state: Option<SnapshotId>,
    /// When the load fails if it is not done by then.
    pub deadline: Instant,
}
