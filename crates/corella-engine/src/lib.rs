//! The engine: drives the scheduler and an executor on a thread of its own. It knows only tokens:
//! no text, no HTTP.

mod adapter;
mod answer;
mod block_desk;
mod block_exchange;
mod command;
mod doorbell;
mod drafter;
mod engine;
mod engine_error;
mod engine_loop;
mod engine_snapshot;
mod engine_stats;
mod engine_watch;
mod feed;
mod generate;
mod head_drafter;
mod kv_exchange;
mod mask_table;
mod mask_thread;
mod output_meter;
mod rare_line;
mod spill_thread;
mod step_log;
mod submission;
mod token_constraint;
mod token_stream;
mod trace;
mod watchdog;

pub use adapter::{AdapterIndex, LoadedAdapter};
pub use block_exchange::{BlockExchange, BlockFact, BlockFacts};
pub use drafter::DraftModel;
pub use engine::{Engine, EngineConfig, EngineState, Entry};
pub use engine_error::{EngineError, PinPrefixError, ResetError, SubmitError};
pub use engine_snapshot::{EngineSnapshot, MAX_CELLS, MAX_REQUESTS, StepRecord};
pub use engine_stats::EngineStats;
pub use engine_watch::EngineWatch;
pub use generate::Generate;
pub use kv_exchange::{KvEventStream, KvExchange, KvFacts, Receipt};
pub use output_meter::{OutputCount, OutputMeter};
pub use rare_line::RareLine;
pub use submission::Submission;
pub use token_constraint::{Allowed, ConstrainedAnswer, ConstraintMaker, TokenConstraint};
pub use token_stream::{StreamEvent, StreamRelay, TokenStream, relayed_stream};
pub use trace::{Attribute, Span, SpanKind, SpanSink, TraceContext, TraceScope, Tracer};
