//! Transfers between senders and receivers of one process, over real sockets.

mod bound;
mod fixture;
mod frame;
mod host;
mod hostile_receiver;
mod hostile_sender;
mod loss;
mod nixl;
mod nixl_process;
mod raw_peer;
mod round_trip;
mod state;
mod tls;
mod waiting;
mod withdrawal;
