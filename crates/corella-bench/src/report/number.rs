//! Numbers for readers, with the significant digits only.

/// Three decimals below 1, three significant digits up to 1,000, and whole numbers with separators above.
pub(crate) fn number(value: f64) -> String {
    let text = match value.abs() {
        size if size >= 99.95 || size == 0.0 => return separated(value),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    };
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn separated(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    match value < 0.0 {
        true => format!("-{text}"),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_tell_something() {
        for (value, expected) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (0.0123, "0.012"),
            (2.5, "2.5"),
            (3.756, "3.76"),
            (10.04, "10"),
            (12.54, "12.5"),
            (99.96, "100"),
            (1_234.5, "1,234"),
            (1_234_567.0, "1,234,567"),
            (-2_000.0, "-2,000"),
        ] {
            assert_eq!(number(value), expected);
        }
    }
}
