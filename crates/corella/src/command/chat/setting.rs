//! The fields of a request that `/set` changes.

use serde_json::{Map, Value, json};

use crate::input::nearest_name::nearest_name;

/// The fields that are sent with each message.
#[derive(Default)]
pub struct Settings(Map<String, Value>);

#[derive(Clone, Copy)]
enum Kind {
    /// A number between these bounds.
    Number(f64, f64),
    Integer,
    /// One text, or a list of texts.
    Texts,
    Switch,
}

/// All settings, with the bounds that servers accept. The largest `max_tokens` depends on the server and is not
/// checked.
const FIELDS: [(&str, Kind); 11] = [
    ("temperature", Kind::Number(0.0, f64::INFINITY)),
    ("top_p", Kind::Number(0.0, 1.0)),
    ("top_k", Kind::Integer),
    ("min_p", Kind::Number(0.0, 1.0)),
    ("max_tokens", Kind::Integer),
    ("seed", Kind::Integer),
    ("repetition_penalty", Kind::Number(0.0, f64::INFINITY)),
    ("presence_penalty", Kind::Number(-2.0, 2.0)),
    ("frequency_penalty", Kind::Number(-2.0, 2.0)),
    ("stop", Kind::Texts),
    ("ignore_eos", Kind::Switch),
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
                Kind::Number(..) => value.is_number(),
                Kind::Integer => value.is_u64(),
                Kind::Texts => {
                    let texts = value
                        .as_array()
                        .map_or(std::slice::from_ref(value), Vec::as_slice);
                    texts.iter().all(Value::is_string)
                }
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

    pub fn set(&mut self, name: &str, typed: &str) -> Result<(), String> {
        let (name, kind) = find(name)?;
        let (value, what) = match kind {
            Kind::Number(least, most) => {
                let number = typed.parse().ok();
                let number: Option<f64> = number.filter(|number| (least..=most).contains(number));
                let to = match most.is_finite() {
                    true => format!("to {most}"),
                    false => "up".into(),
                };
                (json!(number), format!("a number from {least} {to}"))
            }
            Kind::Integer => (json!(typed.parse::<u64>().ok()), "a whole number".into()),
            Kind::Texts => (texts(typed), "one or more texts".into()),
            Kind::Switch => (json!(typed.parse::<bool>().ok()), "true or false".into()),
        };
        if value.is_null() {
            return Err(format!("{name} is {what}, not `{typed}`"));
        }
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

/// Reads words, texts in quotes, or a list of JSON. Returns null if there is no text.
fn texts(typed: &str) -> Value {
    let words = || -> Vec<String> {
        let parts = typed.split('"').enumerate();
        let texts = parts.flat_map(|(at, part)| match at % 2 {
            0 => part.split_whitespace().collect(),
            _ => vec![part],
        });
        let texts = texts.filter(|text| !text.is_empty());
        texts.map(str::to_owned).collect()
    };
    let texts = serde_json::from_str(typed).unwrap_or_else(|_| words());
    match texts.as_slice() {
        [] => Value::Null,
        [text] => json!(text),
        texts => json!(texts),
    }
}

/// Returns the names of all settings.
pub fn names() -> impl Iterator<Item = &'static str> {
    FIELDS.iter().map(|(name, _)| *name)
}

fn find(name: &str) -> Result<(&'static str, Kind), String> {
    let advise = |here: &str| Err(format!("there is no setting {name}: use {here}"));
    let name = match name {
        // Names of Ollama.
        "num_predict" => "max_tokens",
        "repeat_penalty" => "repetition_penalty",
        "repeat_last_n" => return advise("repetition_penalty, which counts the whole text"),
        "num_ctx" => return advise("--max-model-len, when the model is loaded"),
        _ => name,
    };
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
        settings.set("num_predict", "5").unwrap();
        settings.set("repeat_penalty", "1.5").unwrap();
        let own = ["max_tokens", "repetition_penalty"].map(|name| &settings.fields()[name]);
        assert_eq!(own, [&json!(5), &json!(1.5)]);
        settings.unset("num_predict").unwrap();
        assert!(!settings.fields().contains_key("max_tokens"));
    }

    #[test]
    fn stop_takes_several_strings() {
        let mut settings = Settings::default();
        for (typed, expected) in [
            (".", json!(".")),
            ("A  B", json!(["A", "B"])),
            (r#""." "!""#, json!([".", "!"])),
            (r#""the end" it's"#, json!(["the end", "it's"])),
            (r#"["a \"b", "\n"]"#, json!(["a \"b", "\n"])),
            ("[INST] [/INST]", json!(["[INST]", "[/INST]"])),
        ] {
            settings.set("stop", typed).unwrap();
            assert_eq!(settings.fields()["stop"], expected, "{typed}");
        }
        assert_eq!(settings.display(), r#"stop ["[INST]","[/INST]"]"#);
        let error = settings.set("stop", r#""""#).unwrap_err();
        assert_eq!(error, r#"stop is one or more texts, not `""`"#);
    }

    #[test]
    fn settings_of_a_file_are_those_that_can_be_set() {
        let fields = |body: Value| body.as_object().unwrap().clone();
        let good = json!({"seed": 7, "temperature": 0.5, "stop": ["x"], "ignore_eos": true});
        let settings = Settings::from_fields(fields(good.clone())).ok().unwrap();
        assert_eq!(Value::Object(settings.fields().clone()), good);
        for (body, reason) in [
            (json!({"temprature": 1}), "did you mean temperature?"),
            (json!({"seed": -1}), "seed cannot be -1"),
            (json!({"stop": ["x", 1]}), "stop cannot be"),
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
            ("num_ctx", "4096", "use --max-model-len"),
            ("wings", "2", "the settings are temperature, top_p"),
            ("temperature", "warm", "a number from 0 up, not `warm`"),
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
