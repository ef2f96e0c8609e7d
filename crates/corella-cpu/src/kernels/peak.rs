//! The peak of a processor's units, as a loop to be timed.

/// A loop of independent instructions, to measure peak throughput.
#[derive(Clone, Copy)]
pub struct Peak {
    pub run: unsafe fn(iterations: usize),
    /// The number of operations per iteration.
    pub ops: usize,
}
