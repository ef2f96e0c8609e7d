//! The stress on a run of tests.

/// In every mode, a busy loop runs for each core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// No further stress.
    Plain,
    /// All threads of the tests share one core.
    OneCore,
    /// All processes of the tests stop at random times for a while.
    Pauses,
}

impl Mode {
    pub const ALL: [Self; 3] = [Self::Plain, Self::OneCore, Self::Pauses];

    pub fn option(self) -> &'static str {
        match self {
            Self::Plain => "--plain",
            Self::OneCore => "--one-core",
            Self::Pauses => "--pauses",
        }
    }

    /// A name for files and reports.
    pub fn name(self) -> &'static str {
        self.option().trim_start_matches('-')
    }
}
