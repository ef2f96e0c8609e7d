//! `keep_alive`: how long a model stays loaded after a request.

use std::time::Duration;

use axum::response::Response;

use super::answer::{Door, unload_line};
use crate::config::keep_alive::KeepAlive;
use crate::wire::api_error::ApiError;
use crate::wire::shallow_value::{Emptiness, ShallowValue};

/// Reads a number of seconds, or a duration such as `"5m"`. A negative one means for ever.
pub fn keep_alive(field: Option<&ShallowValue>) -> Result<Option<KeepAlive>, ApiError> {
    let seconds = match field {
        None => return Ok(None),
        Some(ShallowValue::Number(seconds)) => Some(*seconds),
        Some(ShallowValue::Text(text)) => duration_s(text),
        Some(_) => None,
    };
    let seconds = seconds.ok_or_else(|| {
        let message = "must be a number of seconds, or a duration such as \"5m\" or \"1h30m\"; a negative one means for ever";
        ApiError::invalid("keep_alive", message)
    })?;
    Ok(Some(match Duration::try_from_secs_f64(seconds) {
        Ok(duration) => KeepAlive::For(duration),
        // The number is negative, or larger than any time.
        Err(_) => KeepAlive::Forever,
    }))
}

/// Parses a duration in Go's notation: numbers with units, such as `1h30m`, perhaps with a sign.
fn duration_s(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 8] = [
        ("ns", 1e-9),
        ("us", 1e-6),
        ("\u{b5}s", 1e-6),
        ("\u{3bc}s", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3600.0),
    ];
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let mut seconds = 0.0;
    let mut rest = unsigned;
    while !rest.is_empty() && rest != "0" {
        let is_of_number = |c: char| c.is_ascii_digit() || c == '.';
        let (number, behind) = rest.split_at(rest.find(|c: char| !is_of_number(c))?);
        let unit_end = behind.find(is_of_number).unwrap_or(behind.len());
        let (unit, behind) = behind.split_at(unit_end);
        let (_, unit_s) = UNITS.iter().find(|(name, _)| *name == unit)?;
        seconds += number.parse::<f64>().ok()? * unit_s;
        rest = behind;
    }
    let sign = if text.starts_with('-') { -1.0 } else { 1.0 };
    (!unsigned.is_empty()).then_some(sign * seconds)
}

/// Answers a request whose `keep_alive` is 0, if it has nothing to compute: it only asks to unload the model.
pub fn unloaded_answer(
    path: &str,
    model: &str,
    prompt: Option<Emptiness>,
    messages: Option<Emptiness>,
) -> Option<Response> {
    let (door, input) = match path {
        "/api/chat" => (Door::Chat, messages),
        "/api/generate" => (Door::Generate, prompt),
        _ => return None,
    };
    let is_empty = input.is_none_or(|Emptiness(is_empty)| is_empty);
    is_empty.then(|| unload_line(model, door))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(field: &Value) -> Result<Option<KeepAlive>, ApiError> {
        let field = serde_json::from_value(field.clone()).expect("any value has an outline");
        keep_alive(Option::as_ref(&field))
    }

    #[test]
    fn numbers_are_seconds_and_texts_are_durations() {
        for (field, seconds) in [
            (json!(0), 0.0),
            (json!("0"), 0.0),
            (json!("0s"), 0.0),
            (json!(90), 90.0),
            (json!(1.5), 1.5),
            (json!("5m"), 300.0),
            (json!("1h30m"), 5400.0),
            (json!("1.5h"), 5400.0),
            (json!("+250ms"), 0.25),
        ] {
            let expected = KeepAlive::For(Duration::from_secs_f64(seconds));
            assert_eq!(read(&field), Ok(Some(expected)), "{field}");
        }
    }

    #[test]
    fn negative_durations_mean_for_ever() {
        for field in [json!(-1), json!("-1m"), json!("-1ns"), json!(1e300)] {
            assert_eq!(read(&field), Ok(Some(KeepAlive::Forever)), "{field}");
        }
    }

    #[test]
    fn other_values_are_refused_and_null_is_absent() {
        for field in [
            json!("5"),
            json!("m"),
            json!(""),
            json!("5 m"),
            json!("-"),
            json!(true),
            json!([]),
        ] {
            let error = read(&field).expect_err("it is no duration");
            assert_eq!(error.param(), Some("keep_alive"), "{field}");
        }
        assert_eq!(keep_alive(None), Ok(None));
        assert_eq!(read(&Value::Null), Ok(None));
    }
}
