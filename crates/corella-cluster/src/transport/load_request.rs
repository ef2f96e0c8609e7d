//! The request of a load: its rows and their destination.

use std::time::Instant;

use corella_core::session::SessionKey;
use corella_core::{Arithmetic, PageTable, SnapshotId};

use super::PeerAddress;

/// Rows `first_row..num_rows` of a session, and their destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    pub key: SessionKey,
    pub peer: PeerAddress,
    /// The sender's arithmetic, as the caller knows it. Rows of another arithmetic are refused.
    pub arithmetic: Arithmetic,
    /// The first row to load, which is the first row of a page. The rows before it are present.
    pub first_row: u32,
    pub num_rows: u32,
    /// The session's own pages, by KV group. A table has the pages of all rows, or of the rows within its group's
    /// window.
    pub tables: Vec<PageTable>,
    /// The destination of the recurrent state after all rows, if the model has one.
    pub state: Option<SnapshotId>,
    /// The load fails if it is not done at this time.
    pub deadline: Instant,
}
