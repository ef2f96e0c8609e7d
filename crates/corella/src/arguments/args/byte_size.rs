//! Amounts of memory like `512M` and `1.5G`. Every unit is a power of 1024.

pub fn parse_size(text: &str) -> Result<u64, String> {
    match parse_size_or_zero(text)? {
        0 => Err("must be more than 0".to_owned()),
        num_bytes => Ok(num_bytes),
    }
}

/// Parses the size of an option that zero, in any unit, switches off.
pub fn parse_size_or_zero(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "K" | "KB" | "KIB" => 1 << 10,
        "M" | "MB" | "MIB" => 1 << 20,
        "G" | "GB" | "GIB" => 1 << 30,
        "T" | "TB" | "TIB" => 1 << 40,
        unit => return Err(format!("unknown unit `{unit}`; use K, M, G or T")),
    };
    let number: f64 = digits
        .parse()
        .map_err(|_| format!("`{digits}` is not a number"))?;
    let num_bytes = number * unit as f64;
    match (0.0..=u64::MAX as f64).contains(&num_bytes) {
        true => Ok(num_bytes as u64),
        false => Err("must not be negative, and below 16 million T".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_a_unit() {
        for (text, expected) in [
            ("1", 1),
            (" 512M ", 512 << 20),
            ("1.5g", 3 << 29),
            ("2KiB", 2048),
            ("1TB", 1 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(expected), "{text}");
            assert_eq!(parse_size_or_zero(text), Ok(expected), "{text}");
        }
        for text in ["", "M", "-1M", "1X", "1e300T", "nan", "x"] {
            assert!(parse_size_or_zero(text).is_err(), "{text}");
        }
    }

    #[test]
    fn zero_has_any_unit_where_it_is_taken() {
        for text in ["0", "0M", "0G", "0.0", "0KiB", "-0"] {
            assert_eq!(parse_size_or_zero(text), Ok(0), "{text}");
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert!(parse_size("0.1").is_err());
    }
}
