//! The fields of a request that `/set` changes.

use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

use crate::input::nearest_name::nearest_name;

/// Numbers that servers accept. The server checks whether the model can generate that many tokens.
const RANGES: [(&str, RangeInclusive<f64>); 6] = [
    ("temperature", 0.0..=f64::INFINITY),
    ("top_p", 0.0..=1.0),
    ("min_p", 0.0..=1.0),
    ("repetition_penalty", 0.0..=f64::INFINITY),
    ("presence_penalty", -2.0..=2.0),
    ("frequency_penalty", -2.0..=2.0),
];

/// The fields that are sent with each message.
#[derive(Default)]
pub struct Settings(Map<String, Value>);

#[derive(Clone, Copy)]
enum Kind {
    Number,
    Integer,
    Text,
    Switch,
}

const FIELDS: [(&str, Kind); 11] = [
    ("temperature", Kind::Number),
    ("top_p", Kind::Number),
    ("top_k", Kind::Integer),
    ("min_p", Kind::Number),
    ("max_tokens", Kind::Integer),
    ("seed", Kind::Integer),
    ("repetition_penalty", Kind::Number),
    ("presence_penalty", Kind::Number),
    ("frequency_penalty", Kind::Number),
    ("stop", Kind::Text),
    ("ignore_eos", Kind::Switch),
];

/// Parameters of Ollama that have other names here, with those names.
const OF_OLLAMA: [(&str, &str); 4] = [
    ("num_predict", "max_tokens"),
    ("repeat_penalty", "repetition_penalty"),
    (
        "repeat_last_n",
        "repetition_penalty, which counts the whole text",
    ),
    ("num_ctx", "--max-model-len, when the model is loaded"),
];

impl Settings {
    pub fn new(fields: Vec<(&'static str, Value)>) -> Self {
        let fields = fields.into_iter();
        Self(
            fields
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
        )
    }

    /// Reads the settings of a file, which may have only the names of `/set`.
    pub fn from_fields(fields: Map<String, Value>) -> Result<Self, String> {
        for (name, value) in &fields {
            let (_, kind) = find(name)?;
            let is_right = match kind {
                Kind::Number => value.is_number(),
                Kind::Integer => value.is_u64(),
                Kind::Text => value.is_string(),
                Kind::Switch => value.is_boolean(),
            };
            if !is_right {
                return Err(format!("{name} cannot be {value}"));
            }
        }
        Ok(Self(fields))
    }

    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }

    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let (name, kind) = find(name)?;
        let wrong = |what: &str| format!("{name} is {what}, not `{value}`");
        let value = match kind {
            Kind::Number => match value.parse::<f64>() {
                Ok(number) if number.is_finite() => {
                    check_range(name, number, value)?;
                    json!(number)
                }
                _ => return Err(wrong("a number")),
            },
            Kind::Integer => match value.parse::<u64>() {
                Ok(number) => json!(number),
                Err(_) => return Err(wrong("a whole number")),
            },
            Kind::Text => json!(value),
            Kind::Switch => match value.parse::<bool>() {
                Ok(is_on) => json!(is_on),
                Err(_) => return Err(wrong("true or false")),
            },
        };
        self.0.insert(name.to_owned(), value);
        Ok(())
    }

    /// Restores the default.
    pub fn unset(&mut self, name: &str) -> Result<(), String> {
        let (name, _) = find(name)?;
        self.0.remove(name);
        Ok(())
    }

    /// Lists the settings, one per line.
    pub fn display(&self) -> String {
        if self.0.is_empty() {
            let names: Vec<_> = names().collect();
            return format!("nothing is set; the settings are {}", names.join(", "));
        }
        let lines = self.0.iter().map(|(name, value)| match value {
            Value::String(text) => format!("{name} {text}"),
            value => format!("{name} {value}"),
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

fn check_range(name: &str, number: f64, typed: &str) -> Result<(), String> {
    let range = RANGES.iter().find(|(known, _)| *known == name);
    match range {
        Some((_, range)) if !range.contains(&number) => {
            let (least, most) = (range.start(), range.end());
            let range = match most.is_finite() {
                true => format!("from {least} to {most}"),
                false => format!("from {least} up"),
            };
            Err(format!("{name} is a number {range}, not `{typed}`"))
        }
        _ => Ok(()),
    }
}

/// Returns the names of all settings.
pub fn names() -> impl Iterator<Item = &'static str> {
    FIELDS.iter().map(|(name, _)| *name)
}

fn find(name: &str) -> Result<(&'static str, Kind), String> {
    if let Some((_, here)) = OF_OLLAMA.iter().find(|(known, _)| *known == name) {
        return Err(format!("there is no setting {name}: use {here}"));
    }
    let field = FIELDS.iter().find(|(known, _)| *known == name);
    field
        .copied()
        .ok_or_else(|| match nearest_name(name, names()) {
            Some(near) => format!("there is no setting {name}; did you mean {near}?"),
            None => format!(
                "there is no setting {name}; the settings are {}",
                names().collect::<Vec<_>>().join(", ")
            ),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_become_json_of_the_right_type() {
        let mut settings = Settings::new(vec![("seed", json!(7))]);
        settings.set("temperature", "0.5").unwrap();
        settings.set("top_k", "40").unwrap();
        settings.set("stop", "12").unwrap();
        let expected = json!({"seed": 7, "temperature": 0.5, "top_k": 40, "stop": "12"});
        assert_eq!(Value::Object(settings.fields().clone()), expected);
        settings.unset("seed").unwrap();
        assert!(!settings.fields().contains_key("seed"));
    }

    #[test]
    fn settings_of_a_file_are_those_that_can_be_set() {
        let fields = |body: Value| body.as_object().unwrap().clone();
        let good = json!({"seed": 7, "temperature": 0.5, "stop": "x", "ignore_eos": true});
        let settings = Settings::from_fields(fields(good.clone())).ok().unwrap();
        assert_eq!(Value::Object(settings.fields().clone()), good);
        for (body, reason) in [
            (json!({"temprature": 1}), "did you mean temperature?"),
            (json!({"seed": -1}), "seed cannot be -1"),
            (json!({"stop": ["x"]}), "stop cannot be"),
        ] {
            let error = Settings::from_fields(fields(body)).err().unwrap();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_wrong_name_or_value_changes_nothing() {
        let mut settings = Settings::default();
        for (name, value, reason) in [
            ("temprature", "1", "did you mean temperature?"),
            ("num_predict", "2", "use max_tokens"),
            ("num_ctx", "4096", "use --max-model-len"),
            ("wings", "2", "the settings are temperature, top_p"),
            ("temperature", "warm", "a number, not `warm`"),
            ("temperature", "inf", "a number"),
            ("temperature", "-1", "a number from 0 up, not `-1`"),
            ("top_p", "1.5", "from 0 to 1, not `1.5`"),
            ("presence_penalty", "3", "from -2 to 2"),
            ("max_tokens", "-3", "a whole number"),
            ("ignore_eos", "yes", "true or false"),
        ] {
            let error = settings.set(name, value).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        assert!(settings.fields().is_empty());
    }
}
