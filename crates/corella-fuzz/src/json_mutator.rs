//! Changes of JSON that keep it valid: values of other kinds, sizes and places.

use serde_json::{Map, Value, json};

use crate::{Random, mutate_text};

const MAX_DEPTH: usize = 120;

/// Makes a few changes, each at a random place. `words` are strings with a meaning in the notation.
pub fn mutate_json(random: &mut Random, value: &mut Value, words: &[&str]) {
    for _ in 0..1 + random.magnitude_below(5) {
        let donor = random.below(num_nodes(value));
        let donor = node(value, donor).expect("nodes are counted").clone();
        let at = random.below(num_nodes(value));
        let place = node(value, at).expect("nodes are counted");
        mutate_node(random, place, donor, words);
    }
}

/// The number of values within a value, including itself.
fn num_nodes(value: &Value) -> usize {
    let mut open = vec![value];
    let mut count = 0;
    while let Some(value) = open.pop() {
        count += 1;
        match value {
            Value::Array(items) => open.extend(items),
            Value::Object(fields) => open.extend(fields.values()),
            _ => {}
        }
    }
    count
}

/// The value at `index`, in the order in which [`num_nodes`] counts.
fn node(value: &mut Value, index: usize) -> Option<&mut Value> {
    let mut open = vec![value];
    let mut rest = index;
    while let Some(value) = open.pop() {
        if rest == 0 {
            return Some(value);
        }
        rest -= 1;
        match value {
            Value::Array(items) => open.extend(items),
            Value::Object(fields) => open.extend(fields.values_mut()),
            _ => {}
        }
    }
    None
}

fn mutate_node(random: &mut Random, place: &mut Value, donor: Value, words: &[&str]) {
    match (random.below(6), place) {
        (0, place) => *place = odd_value(random, words),
        (1, place) => *place = donor,
        (2, place) => {
            let mut inner = place.take();
            for _ in 0..1 + random.magnitude_below(MAX_DEPTH) {
                inner = match random.once_in(2) {
                    true => json!([inner]),
                    false => json!({"a": inner}),
                };
            }
            *place = inner;
        }
        (_, Value::Array(items)) => mutate_array(random, items, donor),
        (_, Value::Object(fields)) => mutate_object(random, fields, donor, words),
        (_, Value::String(text)) => {
            let other = donor.as_str().unwrap_or_default();
            mutate_text(random, text, words, other);
        }
        (_, place @ Value::Number(_)) => *place = odd_number(random, place),
        (_, place) => *place = odd_value(random, words),
    }
}

fn mutate_array(random: &mut Random, items: &mut Vec<Value>, donor: Value) {
    let at = random.below(items.len() + 1);
    match random.below(4) {
        0 if at < items.len() => drop(items.remove(at)),
        1 if at < items.len() => {
            let item = items[at].clone();
            // Repeated large items would make the input large but not unusual.
            let times = match num_nodes(&item) {
                0..16 => 1 + random.magnitude_below(1000),
                _ => 1,
            };
            items.splice(at..at, std::iter::repeat_n(item, times));
        }
        2 if at < items.len() => {
            let other = random.below(items.len());
            items.swap(at, other);
        }
        _ => items.insert(at, donor),
    }
}

fn mutate_object(
    random: &mut Random,
    fields: &mut Map<String, Value>,
    donor: Value,
    words: &[&str],
) {
    let names: Vec<String> = fields.keys().cloned().collect();
    let new_name = match random.below(3) {
        0 if !names.is_empty() => random.pick(&names),
        1 if !words.is_empty() => random.pick(words).to_owned(),
        _ => odd_text(random),
    };
    match random.below(3) {
        0 if !names.is_empty() => drop(fields.remove(&random.pick(&names))),
        1 if !names.is_empty() => {
            let moved = fields.remove(&random.pick(&names)).unwrap_or_default();
            fields.insert(new_name, moved);
        }
        _ => drop(fields.insert(new_name, donor)),
    }
}

fn odd_value(random: &mut Random, words: &[&str]) -> Value {
    match random.below(8) {
        0 => Value::Null,
        1 => json!(random.once_in(2)),
        2 => json!([]),
        3 => json!({}),
        4 if !words.is_empty() => json!(random.pick(words)),
        4 | 5 => json!(odd_text(random)),
        _ => odd_number(random, &json!(0)),
    }
}

fn odd_number(random: &mut Random, old: &Value) -> Value {
    let power = 1u64 << random.below(64);
    match random.below(8) {
        0 => json!(old.as_i64().unwrap_or_default().wrapping_add(1)),
        1 => json!(old.as_i64().unwrap_or_default().wrapping_sub(1)),
        2 => json!(-old.as_f64().unwrap_or_default()),
        3 => json!(random.pick(&[0.5, 1e-320, 1e308, -1e308, -0.0])),
        4 => json!(0),
        5 => json!((power as i64).wrapping_neg()),
        6 => json!(power),
        _ => json!(power.wrapping_sub(1)),
    }
}

fn odd_text(random: &mut Random) -> String {
    let mut text = String::new();
    if !random.once_in(4) {
        mutate_text(random, &mut text, &["a", "..", "/", "{{", "<|", "-1"], "");
    }
    text
}
