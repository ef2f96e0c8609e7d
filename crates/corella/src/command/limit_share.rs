//! A speed as a share of the machine's limit, with an explanation if it is above 100 %.

use std::fmt;

/// A measured limit of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Arithmetic,
    Memory,
}

impl Limit {
    /// Returns why a share of this limit may be above 100 %.
    pub fn why_exceeded(self) -> &'static str {
        match self {
            Self::Arithmetic => "the machine was slower while its peak was measured",
            Self::Memory => {
                "caches held a part of the data, or the machine was slower while its memory was measured"
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct LimitShare {
    limit: Limit,
    percent: f64,
}

impl LimitShare {
    pub fn new(limit: Limit, speed: f64, most: f64) -> Self {
        let percent = (100.0 * speed / most).round();
        Self { limit, percent }
    }

    pub fn percent(self) -> f64 {
        self.percent
    }

    pub fn is_exceeded(self) -> bool {
        self.percent > 100.0
    }
}

impl fmt::Display for LimitShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_exceeded() {
            // A number above 100 % would mislead, so the possible reasons are shown instead.
            true => write!(f, "above 100 %: {}", self.limit.why_exceeded()),
            false => write!(f, "{:.0} %", self.percent),
        }
    }
}

/// Returns the explanations below a table of shares, a line for each exceeded limit.
pub fn footnotes(shares: &[LimitShare]) -> String {
    [Limit::Arithmetic, Limit::Memory]
        .into_iter()
        .filter(|limit| shares.iter().any(|s| s.limit == *limit && s.is_exceeded()))
        .map(|limit| {
            let unit = match limit {
                Limit::Arithmetic => "operations",
                Limit::Memory => "bytes",
            };
            format!("\n  above 100 % of {unit}: {}", limit.why_exceeded())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_above_100_is_words() {
        let of_memory = |speed| LimitShare::new(Limit::Memory, speed, 10.0);
        assert_eq!(of_memory(3.0).to_string(), "30 %");
        // The rounded share decides, because the table shows it.
        assert_eq!(of_memory(10.04).to_string(), "100 %");
        assert!(
            of_memory(13.7)
                .to_string()
                .starts_with("above 100 %: caches")
        );
        let of_peak = LimitShare::new(Limit::Arithmetic, 1.87, 1.0);
        assert!(of_peak.to_string().starts_with("above 100 %: the machine"));
    }

    #[test]
    fn a_table_says_a_word_once() {
        let of_memory = |speed| LimitShare::new(Limit::Memory, speed, 10.0);
        assert_eq!(footnotes(&[of_memory(3.0), of_memory(10.0)]), "");
        let notes = footnotes(&[of_memory(13.0), of_memory(2.0), of_memory(14.0)]);
        assert_eq!(notes.trim().lines().count(), 1, "{notes}");
        assert!(notes.contains("of bytes: caches"), "{notes}");
    }
}
