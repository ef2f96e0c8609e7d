//! Durations like `90s`, `10m` and `2h`. A number without a unit counts seconds.

use std::time::Duration;

/// Longer than any process runs, and far from the limits of clocks.
const MOST: Duration = Duration::from_secs(10 * 365 * 86_400);

pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let seconds = match &text[digits.len()..] {
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        unit => return Err(format!("unknown unit `{unit}`; use s, m, h or d")),
    };
    let number: f64 = digits
        .parse()
        .map_err(|_| format!("`{digits}` is not a number"))?;
    let duration = Duration::try_from_secs_f64(number * seconds);
    match duration {
        Ok(duration) if duration > Duration::ZERO && duration <= MOST => Ok(duration),
        _ => Err("must be more than 0, and at most 10 years".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_a_unit() {
        for (text, seconds) in [
            ("90", 90),
            ("90s", 90),
            (" 10m ", 600),
            ("1.5h", 5400),
            ("2d", 172_800),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_secs(seconds)),
                "{text}"
            );
        }
        assert_eq!(parse_duration("0.5"), Ok(Duration::from_millis(500)));
        for text in [
            "", "m", "0", "0m", "-1", "-1m", "10M", "1w", "1h30m", "nan", "inf", "1e300",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
