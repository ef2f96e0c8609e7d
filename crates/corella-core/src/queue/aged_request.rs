//! The aged request that starts next, while it waits for room.

use crate::request_state::RequestIndex;

/// The aged request that starts next and lacks pages or a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AgedRequest {
    pub index: RequestIndex,
    pub num_needed_pages: usize,
    /// Rows that another request can fill before the aged one should start.
    pub num_rows_left: u32,
}

/// The findings of the current step about the waiting requests.
#[derive(Debug, Default)]
pub(crate) struct AdmissionRound {
    /// Waiting requests that this step has found to be followers.
    pub num_followers: usize,
    /// The aged request that starts next and does not fit yet. No other request may delay it.
    pub aged: Option<AgedRequest>,
    /// The latest ticket of the requests that start in this step.
    pub latest_ticket: Option<u64>,
}
