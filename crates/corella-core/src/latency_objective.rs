//! Latency objectives: the latest times at which an answer is still useful to its caller.

use core::fmt;

/// The latest times at which the answer is still useful to its caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyObjectives {
    /// Time from arrival to the first token.
    pub ttft_us: Option<u64>,
    /// Time between two output tokens.
    pub tpot_us: Option<u64>,
}

/// An objective that cannot be met, and the latency to expect instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissedObjective {
    pub kind: ObjectiveKind,
    pub expected_us: u64,
    pub objective_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectiveKind {
    Ttft,
    Tpot,
}

/// The latencies that a request can expect.
pub(crate) struct Expected {
    pub ttft_us: u64,
    pub tpot_us: u64,
}

impl Expected {
    /// The first objective that is missed.
    pub fn missed(&self, objectives: LatencyObjectives) -> Option<MissedObjective> {
        let pairs = [
            (ObjectiveKind::Ttft, objectives.ttft_us, self.ttft_us),
            (ObjectiveKind::Tpot, objectives.tpot_us, self.tpot_us),
        ];
        pairs
            .into_iter()
            .find_map(|(kind, objective_us, expected_us)| {
                let objective_us = objective_us.filter(|&objective| expected_us > objective)?;
                Some(MissedObjective {
                    kind,
                    expected_us,
                    objective_us,
                })
            })
    }
}

impl fmt::Display for MissedObjective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind {
            ObjectiveKind::Ttft => "the first token",
            ObjectiveKind::Tpot => "each further token",
        };
        let (expected_ms, objective_ms) = (self.expected_us / 1000, self.objective_us / 1000);
        write!(
            f,
            "{name} would take {expected_ms} ms, and {objective_ms} ms were asked for"
        )
    }
}
