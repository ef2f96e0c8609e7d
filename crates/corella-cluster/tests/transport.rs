//! Transfers between senders and receivers of one process, over real sockets.

#[path = "transport/bound.rs"]
mod bound;
#[path = "transport/fixture.rs"]
mod fixture;
#[path = "transport/frame.rs"]
mod frame;
#[path = "transport/host.rs"]
mod host;
#[path = "transport/hostile_receiver.rs"]
mod hostile_receiver;
#[path = "transport/hostile_sender.rs"]
mod hostile_sender;
#[path = "transport/loss.rs"]
mod loss;
#[path = "transport/nixl.rs"]
mod nixl;
#[path = "transport/nixl_process.rs"]
mod nixl_process;
#[path = "transport/proxy.rs"]
mod proxy;
#[path = "transport/raw_peer.rs"]
mod raw_peer;
#[path = "transport/round_trip.rs"]
mod round_trip;
#[path = "transport/tls.rs"]
mod tls;
#[path = "transport/waiting.rs"]
mod waiting;
#[path = "transport/withdrawal.rs"]
mod withdrawal;
