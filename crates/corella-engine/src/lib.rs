//! The engine: drives the scheduler and an executor on a thread of its own. It knows only tokens: no text, no HTTP.
//!
//! The rooms of the crate, from bottom to top. A room uses only those above it in this list:
//!
//! * `log`: log lines at a limited rate, texts of panics, and the log of the last steps.
//! * `wake`: the wake-up of the loop, and news to and from it.
//! * `trace`: spans of requests.
//! * `token_constraint`: constraints on answers.
//! * `kv_disk`: blocks of the prefix cache on a disk.
//! * `adapter`: adapters by their names and fingerprints.
//! * `state`: the state and counts that callers and the loop share, and the watchdog over its steps.
//! * `watch`: snapshots of the engine for its watcher.
//! * `request`: submissions, their streams of events, and the commands of callers to the loop.
//! * `exchange`: KV and blocks that other nodes bring or fetch.
//! * `mask`: masks of constrained answers.
//! * `draft`: guesses of the next tokens, by a draft model or a draft head.
//! * `engine_loop`: the loop of the engine's thread, and its drivers.
//! * `engine`: the handle that callers use.
//! * `generate`: tokens from any source.

mod adapter;
mod draft;
mod engine;
mod engine_loop;
mod exchange;
mod generate;
mod kv_disk;
mod log;
mod mask;
mod request;
mod state;
mod token_constraint;
mod trace;
mod wake;
mod watch;

pub use adapter::{AdapterIndex, LoadedAdapter};
pub use draft::drafter::DraftModel;
pub use engine::{Engine, EngineConfig};
pub use exchange::block_exchange::BlockExchange;
pub use exchange::kv_exchange::{KvExchange, Receipt};
pub use generate::Generate;
pub use kv_disk::{
    DiskEvents, KvDiskConfig, KvDiskFolder, KvDiskLabel, KvDiskStats, KvFileContent, KvFilePages,
    KvFileReport, KvPlaces, inspect_kv_disk,
};
pub use log::rare_line::RareLine;
pub use request::block_fact::BlockFact;
pub use request::submission::Submission;
pub use request::token_stream::{StreamRelay, TokenStream, relayed_stream};
pub use state::engine_error::{EngineError, PinPrefixError, ResetError, SubmitError};
pub use state::engine_stats::EngineStats;
pub use state::output_meter::{OutputCount, OutputMeter};
pub use state::shared::{EngineState, Entry};
pub use state::step_tokens::StepTokens;
pub use state::stream_event::StreamEvent;
pub use token_constraint::{Allowed, ConstrainedAnswer, ConstraintMaker, TokenConstraint};
pub use trace::{Attribute, Span, SpanKind, SpanSink, TraceContext, TraceScope, Tracer};
pub use wake::feed::FeedReader;
pub use watch::engine_snapshot::{EngineSnapshot, MAX_CELLS, MAX_REQUESTS, StepRecord};
pub use watch::engine_watch::EngineWatch;
