//! Sessions: a prefill node and a decode node serve one request together.
//!
//! [`PrefillEnd`] runs all sessions of a prefill node, [`DecodeEnd`] all sessions of a decode node. [`ExportBook`]
//! tracks the rows that a prefill node's engine makes, their readers, and when their pages may be freed.
//! [`ExportTable`] tracks the exported rows and their waiting readers. None of them does IO or has a clock: a driver
//! passes in messages, facts and the time. After every call it takes out all pending actions, which are inert data, and
//! carries them out in order.
//!
//! ```text
//! submit ─▶ PrefillEnd ── Hello, Allocate ──▶ DecodeEnd ── Reserve ─▶ its scheduler
//!                      ◀── Hello, Allocated ──           ── Load ────▶ its transport
//! SubmitLocally, Open ─── FirstToken ───────▶            ── Arrived ─▶ its scheduler
//!                      ◀── LoadDone, Tokens, Finish ──
//! ```
//!
//! If a decode node has most of the prompt cached, the prefill node may ask it to compute the rest. Then it sends
//! neither rows nor a first token:
//!
//! ```text
//! Decide ◀─ PrefillEnd ── Compute ────▶ DecodeEnd ── Compute ─▶ its scheduler
//!                      ◀── Tokens, Finish ──
//! ```
//!
//! [`BlockFetcher`] fetches cached blocks from other nodes, and [`BlockSource`] serves them to others, on nodes of either
//! role.
//!
//! ```text
//! start ─▶ BlockFetcher ── Lookup ─────▶ BlockSource ── LookUp ─▶ its scheduler
//!                       ◀── Found ──────
//! BeginFetch            ── LoadBlocks ─▶             ── Hold, Read ─▶ its scheduler and transport
//!                       ◀── Data ───────
//! Publish, EndFetch     ── Landed ─────▶
//!                       ◀── Complete ───             ── Stop, Release ─▶
//! ```
//!
//! A session has one deadline, the earliest of its timeouts, and finishes exactly once. Only the prefill node speaks to
//! the client. If either node is lost, the other frees the session's resources within [`SessionConfig::lost_after_us`].
//! Pages that a transport may still write to are freed when the transport reports the end of all writes.

mod block_fetcher;
mod block_message;
mod block_source;
mod config;
mod deadline_queue;
mod decode_compute;
mod decode_end;
mod decode_opening;
mod decode_search;
mod decode_session;
mod export_book;
mod export_table;
mod fetch_pace;
mod heartbeat;
mod key;
mod landing;
mod load_config;
mod local_run;
mod message;
mod prefill_end;
mod prefill_session;
mod prompt_work;
mod siblings;
mod tombstone;

pub use block_fetcher::{BlockFetchEnd, BlockFetcher, FetcherAction, WantedBlocks};
pub use block_message::{
    BlockPart, LoadBlocks, LoadFailure, LoadKey, RowPart, ToFetcher, ToSource,
};
pub use block_source::{BlockSource, LoadId, SourceAction};
pub use config::{SessionConfig, SessionConfigError};
pub use decode_end::{DecodeAction, DecodeEnd, DecodeEndStats};
pub use export_book::{ExportBook, ExportTask, KeptEnd};
pub use export_table::{
    ExportEnd, ExportRefusal, ExportTable, ExportTableConfig, ExportTableStats, Loaded,
};
pub use fetch_pace::{BlockOffer, FetchPace};
pub use key::{NodeIncarnation, SessionKey};
pub use load_config::LoadConfig;
pub use message::{
    AbortReason, Allocate, Allocated, Finish, FirstToken, Hello, KvShape, Mismatch, Refusal,
    ToDecode, ToPrefill, Tokens,
};
pub use prefill_end::{
    ClientEvent, PrefillAction, PrefillEnd, PrefillEndStats, SessionFinish, Submission,
    SubmissionError,
};
