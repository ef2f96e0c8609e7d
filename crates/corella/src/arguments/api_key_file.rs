//! `--api-keys FILE`: the API keys of a server, as a TOML file.
//!
//! No error repeats a line's content, because it may be a key.

use std::path::{Path, PathBuf};

use corella_server::{ApiKey, KeyDigest};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::Error;
use crate::input::nearest_name::nearest_name;
use crate::input::option_file;

/// The sources of a server's keys.
pub struct KeySource {
    /// A key with all permissions.
    pub single: Option<String>,
    pub file: Option<PathBuf>,
}

impl KeySource {
    /// Returns the keys of both sources: none if neither is given.
    pub fn read(&self) -> Result<Vec<ApiKey>, Error> {
        let mut keys = match &self.file {
            Some(path) => read_file(path)?,
            None => Vec::new(),
        };
        let Some(single) = &self.single else {
            return Ok(keys);
        };
        if single.is_empty() {
            return Err(Error::Config(
                "--api-key is empty: give a key, or leave the option out".to_owned(),
            ));
        }
        let single = ApiKey::unlimited(SINGLE_NAME, single);
        if keys.iter().any(|key| key.secret == single.secret) {
            return Err(Error::Config(
                "--api-key is also a key of --api-keys: leave one of them out".to_owned(),
            ));
        }
        keys.push(single);
        Ok(keys)
    }
}

/// The name by which logs call the key of `--api-key`.
const SINGLE_NAME: &str = "--api-key";

/// Limits the keys of a file: a request's key is compared with each of them.
const MAX_KEYS: usize = 10_000;

fn read_file(path: &Path) -> Result<Vec<ApiKey>, Error> {
    let shown = path.display().to_string();
    let text = option_file::read_text(path)
        .map_err(|error| Error::Config(format!("--api-keys cannot read {shown}: {error}")))?;
    let keys = KeyFile { shown, text: &text }.keys();
    keys.map_err(Error::Config)
}

struct KeyFile<'a> {
    shown: String,
    text: &'a str,
}

impl KeyFile<'_> {
    fn keys(&self) -> Result<Vec<ApiKey>, String> {
        let root = DeTable::parse(self.text).map_err(|error| {
            let line = error.span().map_or(1, |span| self.line(span.start));
            self.wrong(line, "this is not valid TOML")
        })?;
        let mut keys: Vec<(usize, ApiKey)> = Vec::new();
        for (name, value) in root.into_inner() {
            let line = self.line(name.span().start);
            let tables = match (name.get_ref().as_ref(), value.into_inner()) {
                ("key", DeValue::Array(tables)) => tables,
                (name, _) => {
                    let is_near = name != "key" && nearest_name(name, ["key"]).is_some();
                    let near = if is_near {
                        "; did you mean [[key]]?"
                    } else {
                        ""
                    };
                    let reason = format!("only [[key]] tables are allowed{near}");
                    return Err(self.wrong(line, &reason));
                }
            };
            for table in tables {
                let line = self.line(table.span().start);
                let DeValue::Table(table) = table.into_inner() else {
                    return Err(self.wrong(line, "only [[key]] tables are allowed"));
                };
                let key = self.key(line, table)?;
                for (other_line, other) in &keys {
                    let twin = match other {
                        other if other.name == key.name => "name",
                        other if other.secret == key.secret => "key",
                        _ => continue,
                    };
                    let reason = format!("this {twin} is also that of line {other_line}");
                    return Err(self.wrong(line, &reason));
                }
                keys.push((line, key));
            }
        }
        match keys.len() {
            0 => Err(format!("--api-keys {} has no [[key]]", self.shown)),
            1..=MAX_KEYS => Ok(keys.into_iter().map(|(_, key)| key).collect()),
            _ => Err(format!(
                "--api-keys {} has more than {MAX_KEYS} keys",
                self.shown
            )),
        }
    }

    fn key(&self, line: usize, table: DeTable) -> Result<ApiKey, String> {
        let (mut name, mut secret) = (None, None);
        let mut key = ApiKey {
            is_admin: false,
            ..ApiKey::unlimited("", "")
        };
        for (field, value) in table {
            let line = self.line(field.span().start);
            let wrong = |what: &str| self.wrong(line, &format!("`{}` {what}", field.get_ref()));
            match (field.get_ref().as_ref(), value.get_ref()) {
                ("name", DeValue::String(text)) if is_name(text) => name = Some(text.to_string()),
                ("name", _) => {
                    return Err(wrong(
                        "must be 1 to 64 letters, digits, dots, dashes or underscores",
                    ));
                }
                ("key" | "sha256", _) if secret.is_some() => {
                    return Err(wrong(
                        "cannot stand beside the other: give either `key` or `sha256`",
                    ));
                }
                ("key", DeValue::String(text)) if is_key(text) => {
                    secret = Some(KeyDigest::of(text.as_bytes()));
                }
                ("key", _) => {
                    return Err(wrong(
                        "must be a text of at least 16 visible ASCII characters",
                    ));
                }
                ("sha256", DeValue::String(text)) => {
                    let digest = KeyDigest::from_hex(text);
                    secret = Some(digest.ok_or_else(|| wrong(SHA256_FORM))?);
                }
                ("sha256", _) => return Err(wrong(SHA256_FORM)),
                ("requests-per-minute", _) => {
                    let limit = whole_number(&value, 1);
                    let limit =
                        limit.ok_or_else(|| wrong("must be a whole number of at least 1"))?;
                    key.requests_per_minute = Some(limit);
                }
                ("tokens-per-minute", _) => {
                    let limit = whole_number(&value, 1);
                    let limit =
                        limit.ok_or_else(|| wrong("must be a whole number of at least 1"))?;
                    key.tokens_per_minute = Some(limit);
                }
                ("models", _) => {
                    let models = texts(&value).filter(|models| !models.is_empty());
                    let models = models.ok_or_else(|| wrong("must be a list of names"))?;
                    key.models = Some(models);
                }
                ("priority", _) => {
                    let priority = whole_number(&value, i32::MIN);
                    let priority = priority.ok_or_else(|| wrong("must be a whole number"))?;
                    key.priority = Some(priority);
                }
                ("admin", DeValue::Boolean(is_admin)) => key.is_admin = *is_admin,
                ("admin", _) => return Err(wrong("must be true or false")),
                _ => {
                    // The unknown name may be a misplaced key, so the error shows only the known name that is close to
                    // it.
                    let near = nearest_name(field.get_ref(), FIELDS);
                    let near =
                        near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
                    let reason = format!(
                        "a key has name, key or sha256, requests-per-minute, tokens-per-minute, \
                         models, priority and admin, and nothing else{near}"
                    );
                    return Err(self.wrong(line, &reason));
                }
            }
        }
        key.name = name.ok_or_else(|| self.wrong(line, "this key has no `name`"))?;
        key.secret = secret.ok_or_else(|| self.wrong(line, "this key has no `key` or `sha256`"))?;
        Ok(key)
    }

    fn line(&self, offset: usize) -> usize {
        let before = self.text.get(..offset).unwrap_or(self.text);
        1 + before.matches('\n').count()
    }

    fn wrong(&self, line: usize, what: &str) -> String {
        format!("--api-keys {}, line {line}: {what}", self.shown)
    }
}

const FIELDS: [&str; 8] = [
    "name",
    "key",
    "sha256",
    "requests-per-minute",
    "tokens-per-minute",
    "models",
    "priority",
    "admin",
];

const SHA256_FORM: &str = "is 64 hexadecimal digits, as `printf %s KEY | sha256sum` writes them";

/// Returns whether a text can be a key's name, which is a label of metrics and a word of log lines.
fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    (1..=64).contains(&text.len()) && text.bytes().all(is_plain)
}

/// Returns whether a header can carry the key, and the key is not trivially short.
fn is_key(text: &str) -> bool {
    text.len() >= 16 && text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn whole_number<T: TryFrom<i128> + PartialOrd>(value: &Spanned<DeValue>, least: T) -> Option<T> {
    let DeValue::Integer(number) = value.get_ref() else {
        return None;
    };
    let number = i128::from_str_radix(number.as_str(), number.radix()).ok()?;
    T::try_from(number).ok().filter(|number| *number >= least)
}

fn texts(value: &Spanned<DeValue>) -> Option<Vec<String>> {
    let DeValue::Array(values) = value.get_ref() else {
        return None;
    };
    let text = |value: &Spanned<DeValue>| match value.get_ref() {
        DeValue::String(text) => Some(text.to_string()),
        _ => None,
    };
    values.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Result<Vec<ApiKey>, String> {
        let shown = "keys.toml".to_owned();
        KeyFile { shown, text }.keys()
    }

    #[test]
    fn each_field_is_read() {
        let text = r#"
[[key]]
name = "web"
key = "sk-0123456789abcdef"
requests-per-minute = 60
tokens-per-minute = 100_000
models = ["org/model", "sql"]
priority = -3

[[key]]
name = "ops"
# The digest of "abc" from FIPS 180-2.
sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
admin = true
"#;
        let web = ApiKey {
            name: "web".to_owned(),
            secret: KeyDigest::of(b"sk-0123456789abcdef"),
            requests_per_minute: Some(60),
            tokens_per_minute: Some(100_000),
            models: Some(vec!["org/model".to_owned(), "sql".to_owned()]),
            priority: Some(-3),
            is_admin: false,
        };
        assert_eq!(keys(text), Ok(vec![web, ApiKey::unlimited("ops", "abc")]));
    }

    #[test]
    fn errors_name_the_line_and_never_what_it_says() {
        let secret = "sk-0123456789abcdef";
        let good = format!("[[key]]\nname = \"a\"\nkey = \"{secret}\"\n");
        for (text, line, reason) in [
            (format!("key = {secret}"), 1, "not valid TOML"),
            (format!("key = \"{secret}\""), 1, "[[key]]"),
            (format!("[[keys]]\nkey = \"{secret}\""), 1, "[[key]]"),
            (format!("[[key]]\nkey = \"{secret}\""), 1, "no `name`"),
            ("[[key]]\nname = \"a\"".to_owned(), 1, "no `key`"),
            (
                format!("[[key]]\nname = \"{secret} \""),
                2,
                "`name` must be 1",
            ),
            ("[[key]]\nkey = \"short\"".to_owned(), 2, "at least 16"),
            (format!("[[key]]\nsha256 = \"{secret}\""), 2, "64 hex"),
            (
                format!("{good}sha256 = \"{secret}\""),
                4,
                "give either `key` or `sha256`",
            ),
            (
                format!("{good}requests-per-minute = \"{secret}\""),
                4,
                "at least 1",
            ),
            (format!("{good}tokens-per-minute = 0"), 4, "at least 1"),
            (format!("{good}models = \"{secret}\""), 4, "a list"),
            (format!("{good}priority = 0.5"), 4, "a whole number"),
            (format!("{good}admin = 1"), 4, "true or false"),
            (format!("{good}{secret} = 1"), 4, "nothing else"),
            (
                format!("{good}request-per-minute = 60"),
                4,
                "did you mean `requests-per-minute`?",
            ),
            (
                format!("{good}tokens_per_minute = 60"),
                4,
                "did you mean `tokens-per-minute`?",
            ),
            (
                format!("[[kye]]\nkey = \"{secret}\""),
                1,
                "did you mean [[key]]?",
            ),
            (
                format!("{good}{good}"),
                4,
                "this name is also that of line 1",
            ),
            (
                format!("{good}{}", good.replace("\"a\"", "\"b\"")),
                4,
                "this key is also that of line 1",
            ),
        ] {
            let error = keys(&text).expect_err(&text);
            let place = format!("--api-keys keys.toml, line {line}: ");
            assert!(error.starts_with(&place), "{error} for {text}");
            assert!(error.contains(reason), "{error} for {text}");
            assert!(!error.contains("0123456789"), "{error}");
        }
        let empty = keys("").expect_err("there is no key");
        assert_eq!(empty, "--api-keys keys.toml has no [[key]]");
    }
}
