//! Layers with a state for each sequence.
//!
//! A slot has one record with its sequence's states of all layers. A record has the matrices at the start of a chunk,
//! and the rows of the tokens since then. A row is added to the matrices when its chunk is complete and none of its
//! tokens is a draft. So prefill and decode have the same arithmetic, a decode step only reads the matrices, and
//! rejected drafts are overwritten.

mod convolution_input;
mod convolution_layer;
mod delta_layer;
mod pipeline_states;
mod record;
mod snapshot_memory;
mod state_memory;

pub use self::convolution_layer::ConvolutionLayer;
pub use self::delta_layer::{DeltaLayer, DeltaScratch};
pub use self::pipeline_states::PipelineStates;
pub use self::record::state_bytes;
pub use self::state_memory::{SpanState, StateLimits, StateMemory};
