//! A format of replies, as the value of an option.

use std::str::FromStr;

/// The format to read: the one that the chat template shows, none, or a named one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FormatChoice<F> {
    #[default]
    Template,
    Nothing,
    Named(F),
}

impl<F> FormatChoice<F> {
    /// Returns the format to read. `shown` is the format that the chat template shows.
    pub fn of(self, shown: Option<F>) -> Option<F> {
        match self {
            Self::Template => shown,
            Self::Nothing => None,
            Self::Named(format) => Some(format),
        }
    }
}

impl<F: FromStr> FromStr for FormatChoice<F> {
    type Err = F::Err;

    fn from_str(name: &str) -> Result<Self, F::Err> {
        match name {
            "auto" => Ok(Self::Template),
            "none" => Ok(Self::Nothing),
            name => name.parse().map(Self::Named),
        }
    }
}
