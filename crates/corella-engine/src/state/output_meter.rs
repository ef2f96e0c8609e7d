//! Counts the outputs of requests that other nodes bring, whose clients this server never sees.

use corella_core::RequestOutput;

/// Counts requests that are decoded here and whose prompts other nodes have computed.
pub trait OutputMeter: Send + Sync {
    /// Counts a request that begins to decode. `adapter` is the engine's name of its adapter, if any.
    /// `num_received_tokens` of its prompt have come from another node.
    fn begin(&self, num_received_tokens: u32, adapter: Option<&str>) -> Box<dyn OutputCount>;
}

/// Counts the outputs of one request. If this is dropped before the last output, the request counts as aborted.
pub trait OutputCount: Send {
    fn handle_output(&mut self, output: &RequestOutput);
}
