//! Durations of the stages of requests that two nodes serve together.

use prometheus_client::metrics::histogram::Histogram;

const BUCKETS: [f64; 18] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
    20.0, 40.0, 80.0,
];
const SHARE_BUCKETS: [f64; 11] = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95];

/// Durations on a prefill node, by its own clock.
#[derive(Clone, Debug)]
pub struct PrefillTimes {
    /// From opening a session until the decode node reports that it takes the request.
    pub allocate: Histogram,
    /// From the submission of a prompt to this node's engine to its first token.
    pub prefill: Histogram,
    /// From the first byte of KV rows until the decode node reports that it has all rows.
    pub transfer: Histogram,
    /// The share of a transfer that was over when its last layer was computed: 1 − (last byte sent − last layer
    /// computed) / (bytes / measured bandwidth), and never below 0. The receiver's report is not used: it comes only
    /// after the end of the step.
    pub hidden_share: Histogram,
    /// From the first token, drawn by this node, to the first token from the decode node.
    pub handover: Histogram,
}

/// Durations on a decode node, by its own clock.
#[derive(Clone, Debug)]
pub struct DecodeTimes {
    /// From asking this node's engine for pages to its answer.
    pub reserve: Histogram,
    /// From asking for KV rows, perhaps before they are computed, until all rows have arrived.
    pub load: Histogram,
    /// From the arrival of the rows and the first token to the first token drawn here.
    pub first_decode: Histogram,
}

impl PrefillTimes {
    pub(super) fn new() -> Self {
        Self {
            allocate: Histogram::new(BUCKETS),
            prefill: Histogram::new(BUCKETS),
            transfer: Histogram::new(BUCKETS),
            hidden_share: Histogram::new(SHARE_BUCKETS),
            handover: Histogram::new(BUCKETS),
        }
    }
}

impl DecodeTimes {
    pub(super) fn new() -> Self {
        Self {
            reserve: Histogram::new(BUCKETS),
            load: Histogram::new(BUCKETS),
            first_decode: Histogram::new(BUCKETS),
        }
    }
}
