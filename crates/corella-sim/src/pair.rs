//! Prefill and decode nodes that serve requests together, over a network that fails.
//!
//! Each node is the real scheduler, an executor that distrusts every batch, and the real state machines: one for the
//! node's end of the sessions, and two for both ends of block loads. The network is simulated: streams are cut, stall
//! or repeat messages, messages about blocks are lost and reordered, rows are sent or read from the other node's
//! memory, writes tear, links die in one direction, and nodes die and restart. A seed writes the [`PairWorkload`],
//! [`simulate_pair`] plays it, and watchers check inputs and outputs.

mod block_workload;
mod blocks;
mod call_route;
mod client_watch;
mod decode_node;
mod engine;
mod fleet;
mod fleet_event;
mod fleet_plan;
mod lease_watch;
mod pair_totals;
mod pair_workload;
mod peers;
mod prefill_node;
mod row_sender;
mod session_watch;
mod step_progress;
mod told_tokens;
mod wire;
mod world;

pub use fleet::simulate_pair;
pub use pair_totals::PairTotals;
pub use pair_workload::PairWorkload;
