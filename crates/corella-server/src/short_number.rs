//! Writes 32-bit numbers in JSON, whose numbers have 64 bits.

/// Returns the number with the fewest digits that gives the same `f32`: 0.4 and not
/// 0.4000000059604645.
pub fn in_short(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_shown_as_it_was_written() {
        assert_eq!(serde_json::json!(in_short(0.4)).to_string(), "0.4");
        assert_eq!(in_short(1.0), 1.0);
        assert_eq!(in_short(0.8) as f32, 0.8);
    }
}
