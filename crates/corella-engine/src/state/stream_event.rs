//! The events of one request's stream.

use corella_core::{AdmissionError, RequestOutput};

/// An event of a stream. The first is `Accepted` or `Refused`, the others are outputs, and the last
/// output has `finish`. If the engine is lost, a terminal output may come first.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamEvent {
    Accepted,
    Refused(AdmissionError),
    Output(RequestOutput),
}

impl StreamEvent {
    /// Whether this is the stream's last event.
    pub fn is_terminal(&self) -> bool {
        match self {
            Self::Accepted => false,
            Self::Refused(_) => true,
            Self::Output(output) => output.finish.is_some(),
        }
    }
}
