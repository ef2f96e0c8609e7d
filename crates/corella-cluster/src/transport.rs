//! KV rows from a prefill node's memory to a decode node's memory.
//!
//! The decode node pulls. Its [`KvReceiver`] asks a prefill node's [`KvSender`] for the rows of a session, perhaps
//! before the sender knows the session, and reads them from its own socket into reserved pages. A cancelled load is
//! over at once, because no other node ever writes to those pages.
//!
//! `frame.rs` describes the wire. A row path (`row_path.rs`) moves rows from memory to memory. There are three: `tcp`,
//! `shm` and `nixl`. Each end reads and writes a connection concurrently, on few threads ([`TransferThreads`]); many
//! sessions share a connection, chunk by chunk, each within its credit.

mod account;
mod bandwidth_meter;
mod block_client;
mod block_message;
mod block_server;
pub(crate) mod checksum;
mod chunk;
mod connection_queue;
mod frame;
mod frame_queue;
mod frame_reader;
mod gate;
mod hello;
mod incoming;
mod io_parts;
mod known_sender;
mod kv_receiver;
mod kv_sender;
mod listener;
mod load_request;
mod meeting;
mod memory_region;
mod outgoing;
mod path;
mod path_name;
mod plain_pages;
mod receiver_config;
mod receiver_connection;
mod receiver_state;
mod row_path;
mod sender_config;
mod sender_connection;
mod sender_state;
mod sender_table;
mod socket;
mod timed_exports;
mod tls_socket;
mod token_bucket;
mod transfer_threads;

pub use account::TransferAccount;
pub use block_client::BlockClient;
pub use block_message::{
    BlockMessage, decode as decode_blocks, encode as encode_blocks, session_key,
};
pub use block_server::{BlockReply, BlockServer};
pub use connection_queue::ConnectionId;
pub use frame::{
    BlockFrame, BlockVerb, FRAME_BYTES, Frame, FrameError, LoadFrame, PageRun, PathFrame, Refusal,
    StateRun, TRAILER_BYTES, Trailer,
};
pub use hello::{Hello, Incompatibility};
pub use incoming::{LoadFailure, LoadStatus};
pub use kv_receiver::{KvReceiver, LoadHandle, LoadRejection, ReceiverStats};
pub use kv_sender::{ExportError, KvSender, SenderStats};
pub use load_request::LoadRequest;
pub use outgoing::SendStatus;
pub use path::nixl::{NixlAgent, NixlError, NixlLibrary, exit};
pub use path::{PathSet, ROW_PATHS};
pub use path_name::PathName;
pub use plain_pages::PlainPages;
pub use receiver_config::ReceiverConfig;
pub use row_path::{PathError, PathKind, RowPath};
pub use sender_config::SenderConfig;
pub use socket::PeerAddress;
pub use transfer_threads::TransferThreads;
