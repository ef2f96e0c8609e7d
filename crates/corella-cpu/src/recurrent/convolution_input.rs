//! The inputs of a convolution over a span: rows of the step, and before them the rows in the sequence's record.

use std::ops::Range;

use crate::attention::StepSpan;
use crate::dense::Buffer;

use super::record::InputRing;
use super::state_memory::{SpanState, StateMemory};

pub struct ConvolutionInput<'a> {
    span: &'a StepSpan,
    kept: &'a InputRing,
    /// The first element of the sequence's record.
    record: *mut f32,
    /// The rows of the step. Each begins with the inputs of its token.
    rows: &'a Buffer,
}

impl<'a> ConvolutionInput<'a> {
    /// The inputs of a layer, by the layer's index in its stage.
    pub fn new(
        states: &'a StateMemory,
        layer: usize,
        (span, state): (&'a StepSpan, &SpanState),
        rows: &'a Buffer,
    ) -> Self {
        Self {
            span,
            kept: states.inputs(layer),
            record: states.record(state),
            rows,
        }
    }

    /// Lists the addresses of the inputs of a token of the span and of the tokens before it, each from `channel` on.
    /// Before the sequence's first token, entries stay unchanged.
    pub fn list(&self, position: usize, channel: usize, inputs: &mut [*const f32]) {
        for (behind, input) in inputs.iter_mut().rev().enumerate() {
            let Some(at) = position.checked_sub(behind) else {
                break;
            };
            *input = match at >= self.span.start {
                // SAFETY: the row belongs to the span, and has all channels.
                true => unsafe { self.row(at).add(channel) },
                // SAFETY: the record has the inputs before the span.
                false => unsafe { self.record.add(self.kept.at(at) + channel) },
            };
        }
    }

    /// Keeps the inputs that a later span reads.
    ///
    /// # Safety
    /// No other thread uses these channels of the record, or writes these channels of the span's rows.
    pub unsafe fn keep(&self, channels: &Range<usize>) {
        let end = self.span.start + self.span.num_rows;
        let first = end.saturating_sub(self.kept.num_tokens());
        for position in self.span.start.max(first)..end {
            let (from, to) = (self.row(position), self.kept.at(position));
            // SAFETY: the row and the record have all channels, and the caller promises exclusive access.
            unsafe {
                let (from, to) = (
                    from.add(channels.start),
                    self.record.add(to + channels.start),
                );
                std::ptr::copy_nonoverlapping(from, to, channels.len());
            }
        }
    }

    /// The row of a token of the span.
    fn row(&self, position: usize) -> *mut f32 {
        let index = position - self.span.start;
        self.rows.row_ptr(self.span.first_row + index)
    }
}
