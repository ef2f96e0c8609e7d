//! The time until a limit has room again, as text.

use std::fmt;

/// A time in the form of OpenAI's `x-ratelimit-reset-…`: `120ms`, `8.64s`, `6m0s`.
pub struct ResetTime {
    pub time_us: u64,
}

impl fmt::Display for ResetTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.time_us.div_ceil(1000);
        if millis == 0 {
            return f.write_str("0s");
        }
        if millis < 1000 {
            return write!(f, "{millis}ms");
        }
        let (minutes, millis) = (millis / 60_000, millis % 60_000);
        if minutes > 0 {
            write!(f, "{minutes}m")?;
        }
        let fraction = format!("{:03}", millis % 1000);
        let fraction = fraction.trim_end_matches('0');
        let dot = if fraction.is_empty() { "" } else { "." };
        write!(f, "{}{dot}{fraction}s", millis / 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_openai_writes_them() {
        let written = |time_us| ResetTime { time_us }.to_string();
        assert_eq!(written(0), "0s");
        assert_eq!(written(1), "1ms");
        assert_eq!(written(120_000), "120ms");
        assert_eq!(written(8_640_000), "8.64s");
        assert_eq!(written(60_000_000), "1m0s");
        assert_eq!(written(361_500_000), "6m1.5s");
    }
}
