//! Typed access to the key-value part of a GGUF file, with errors that name the key and its value.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use corella_core::TokenId;

use super::cursor::Cursor;
use crate::{CheckpointError, Storage};

/// The key-value pairs of a file.
pub struct Metadata {
    file: String,
    storage: Arc<Storage>,
    values: HashMap<String, Value>,
}

/// A value. Texts and arrays stay in the file, because a vocabulary is large.
enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Flag(bool),
    Text(Range<usize>),
    Array {
        kind: Kind,
        len: usize,
        range: Range<usize>,
    },
}

/// The type of a value.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

/// The largest number of keys; models have some dozens.
const MAX_KEYS: u64 = 1 << 16;
/// The size of the smallest entry: the length of the key, a key of one byte, a type, and a value of one byte.
const MIN_KEY_BYTES: u64 = 8 + 1 + 4 + 1;
/// The largest depth of nested arrays.
const MAX_DEPTH: usize = 4;
const WHAT: &str = "the metadata";

impl Metadata {
    pub fn parse(
        file: &str,
        storage: &Arc<Storage>,
        cursor: &mut Cursor<'_>,
        num_keys: u64,
    ) -> Result<Self, String> {
        cursor.check_count(num_keys, MIN_KEY_BYTES, "keys")?;
        if num_keys > MAX_KEYS {
            return Err(format!(
                "has {num_keys} keys; no model has more than {MAX_KEYS}"
            ));
        }
        let mut values = HashMap::new();
        for index in 0..num_keys {
            let key = cursor.text(WHAT)?;
            let key = key.map_err(|_| format!("key number {index} is not UTF-8"))?;
            let value = Value::parse(cursor).map_err(|problem| match problem {
                Problem::File(problem) => problem,
                Problem::Value(problem) => format!("{key} {problem}"),
            })?;
            if values.insert(key.to_owned(), value).is_some() {
                return Err(format!("{key} occurs twice"));
            }
        }
        Ok(Self {
            file: file.to_owned(),
            storage: storage.clone(),
            values,
        })
    }

    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    pub fn is_array(&self, key: &str) -> bool {
        matches!(self.values.get(key), Some(Value::Array { .. }))
    }

    /// A positive whole number, or an array of them, one per layer, which must all be equal.
    pub fn try_size(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        // Products of a few sizes must not overflow.
        let valid = |number: i128| (1..=1 << 31).contains(&number).then_some(number as usize);
        if let Some(Value::Array { .. }) = self.values.get(key) {
            let mut numbers = self.integers(key)?;
            let first = numbers.next().and_then(valid);
            return match first {
                Some(size) if numbers.all(|number| number == size as i128) => Ok(Some(size)),
                _ => Err(self.refuse(key, "must be the same positive number for all layers")),
            };
        }
        self.typed(key, "must be a positive whole number", |value| {
            value.integer().and_then(valid)
        })
    }

    pub fn try_number(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.typed(key, "must be a finite number", |value| {
            let number = match *value {
                Value::Float(number) => number,
                ref other => other.integer()? as f64,
            };
            number.is_finite().then_some(number)
        })
    }

    pub fn try_flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(key, "must be true or false", |value| match *value {
            Value::Flag(flag) => Some(flag),
            _ => None,
        })
    }

    pub fn try_token_id(&self, key: &str) -> Result<Option<TokenId>, CheckpointError> {
        self.typed(key, "must be a token id", |value| {
            TokenId::try_from(value.integer()?).ok()
        })
    }

    pub fn text(&self, key: &str) -> Result<&str, CheckpointError> {
        self.try_text(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn try_text(&self, key: &str) -> Result<Option<&str>, CheckpointError> {
        self.typed(key, "must be a string", |value| match value {
            Value::Text(range) => std::str::from_utf8(&self.storage.bytes()[range.clone()]).ok(),
            _ => None,
        })
    }

    /// An array of strings; empty if absent.
    pub fn texts(&self, key: &str) -> Result<Vec<&str>, CheckpointError> {
        let (bytes, len) = match self.values.get(key) {
            None => return Ok(Vec::new()),
            Some(Value::Array {
                kind: Kind::Text,
                len,
                range,
            }) => (&self.storage.bytes()[range.clone()], *len),
            Some(_) => return Err(self.refuse(key, "must be an array of strings")),
        };
        let mut cursor = Cursor::new(bytes);
        let mut texts = Vec::with_capacity(len);
        for index in 0..len {
            match cursor
                .text(WHAT)
                .expect("the array is shorter than when it was parsed")
            {
                Ok(text) => texts.push(text),
                Err(_) => {
                    let problem = format!("{key}[{index}] is not UTF-8");
                    return Err(CheckpointError::new(&self.file, problem));
                }
            }
        }
        Ok(texts)
    }

    /// An array of whole numbers; empty if absent.
    pub fn integers(&self, key: &str) -> Result<impl Iterator<Item = i128>, CheckpointError> {
        let elements = self.elements(key, "must be an array of whole numbers", |kind| {
            !matches!(kind, Kind::F32 | Kind::F64 | Kind::Bool)
        })?;
        Ok(elements.filter_map(|value| value.integer()))
    }

    /// An array of floating-point numbers; empty if absent.
    pub fn numbers(&self, key: &str) -> Result<impl Iterator<Item = f64>, CheckpointError> {
        let elements = self.elements(key, "must be an array of numbers", |kind| {
            matches!(kind, Kind::F32 | Kind::F64)
        })?;
        Ok(elements.filter_map(|value| match value {
            Value::Float(number) => Some(number),
            _ => None,
        }))
    }

    /// An array of flags; empty if absent.
    pub fn flags(&self, key: &str) -> Result<impl Iterator<Item = bool>, CheckpointError> {
        let elements = self.elements(key, "must be an array of true and false", |kind| {
            matches!(kind, Kind::Bool)
        })?;
        Ok(elements.filter_map(|value| match value {
            Value::Flag(flag) => Some(flag),
            _ => None,
        }))
    }

    /// The elements of an array of an accepted type. `must` describes the accepted types in the error message.
    fn elements(
        &self,
        key: &str,
        must: &str,
        accepts: impl Fn(Kind) -> bool,
    ) -> Result<impl Iterator<Item = Value>, CheckpointError> {
        let (kind, bytes) = match self.values.get(key) {
            None => (Kind::U8, &[][..]),
            Some(&Value::Array {
                kind, ref range, ..
            }) if accepts(kind) => (kind, &self.storage.bytes()[range.clone()]),
            Some(_) => return Err(self.refuse(key, must)),
        };
        let Some(num_bytes) = kind.num_bytes() else {
            return Err(self.refuse(key, must));
        };
        let elements = bytes.chunks_exact(num_bytes as usize);
        Ok(elements.map(move |element| kind.value(element)))
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        must: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(value) => match convert(value) {
                Some(converted) => Ok(Some(converted)),
                None => Err(self.refuse(key, must)),
            },
        }
    }

    pub fn missing(&self, key: &str) -> CheckpointError {
        CheckpointError::new(&self.file, format!("{key} is missing"))
    }

    pub fn refuse(&self, key: &str, why: &str) -> CheckpointError {
        let value = match self.values.get(key) {
            Some(Value::Text(range)) => {
                let text = String::from_utf8_lossy(&self.storage.bytes()[range.clone()]);
                let shown: String = text.chars().take(60).collect();
                let dots = if shown.len() < text.len() { "…" } else { "" };
                format!("{shown:?}{dots}")
            }
            Some(value) => value.to_string(),
            None => "missing".into(),
        };
        CheckpointError::new(&self.file, format!("{key} is {value}; {why}"))
    }
}

/// A defect of the file, or of the value of one key.
enum Problem {
    File(String),
    Value(String),
}

impl From<String> for Problem {
    fn from(problem: String) -> Self {
        Self::File(problem)
    }
}

impl Value {
    fn parse(cursor: &mut Cursor<'_>) -> Result<Self, Problem> {
        let kind = Kind::parse(cursor)?;
        Self::of_kind(kind, cursor, 0)
    }

    fn of_kind(kind: Kind, cursor: &mut Cursor<'_>, depth: usize) -> Result<Self, Problem> {
        let start = cursor.position();
        if let Some(num_bytes) = kind.num_bytes() {
            return Ok(kind.value(cursor.take(num_bytes, WHAT)?));
        }
        if kind == Kind::Text {
            let len = cursor.u64(WHAT)?;
            cursor.take(len, WHAT)?;
            return Ok(Self::Text(start + 8..cursor.position()));
        }
        if depth == MAX_DEPTH {
            return Err(Problem::Value("has too many arrays within arrays".into()));
        }
        let kind = Kind::parse(cursor)?;
        let len = cursor.u64(WHAT)?;
        let start = cursor.position();
        // A text takes at least 8 bytes for its length, and an array 12 bytes for a type and a length.
        let min_bytes = kind.num_bytes().unwrap_or(match kind {
            Kind::Text => 8,
            _ => 12,
        });
        cursor.check_count(len, min_bytes, "elements of an array")?;
        match kind.num_bytes() {
            Some(num_bytes) => drop(cursor.take(len * num_bytes, WHAT)?),
            None => {
                for _ in 0..len {
                    Self::of_kind(kind, cursor, depth + 1)?;
                }
            }
        }
        Ok(Self::Array {
            kind,
            len: len as usize,
            range: start..cursor.position(),
        })
    }

    fn integer(&self) -> Option<i128> {
        match *self {
            Self::Unsigned(number) => Some(number.into()),
            Self::Signed(number) => Some(number.into()),
            _ => None,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(number) => number.fmt(f),
            Self::Signed(number) => number.fmt(f),
            Self::Float(number) => number.fmt(f),
            Self::Flag(flag) => flag.fmt(f),
            Self::Text(_) => f.write_str("a string"),
            Self::Array { len, .. } => write!(f, "an array of {len}"),
        }
    }
}

impl Kind {
    fn parse(cursor: &mut Cursor<'_>) -> Result<Self, Problem> {
        const KINDS: [Kind; 13] = [
            Kind::U8,
            Kind::I8,
            Kind::U16,
            Kind::I16,
            Kind::U32,
            Kind::I32,
            Kind::F32,
            Kind::Bool,
            Kind::Text,
            Kind::Array,
            Kind::U64,
            Kind::I64,
            Kind::F64,
        ];
        let id = cursor.u32(WHAT)?;
        KINDS
            .get(id as usize)
            .copied()
            .ok_or_else(|| Problem::Value(format!("has a value of the unknown type {id}")))
    }

    /// The size of a value in bytes; `None` for texts and arrays.
    fn num_bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::Array => None,
        }
    }

    /// Decodes a value of this type from its bytes.
    fn value(self, bytes: &[u8]) -> Value {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        match self {
            Self::I8 => Value::Signed((bits as i8).into()),
            Self::I16 => Value::Signed((bits as i16).into()),
            Self::I32 => Value::Signed((bits as i32).into()),
            Self::I64 => Value::Signed(bits as i64),
            Self::F32 => Value::Float(f32::from_bits(bits as u32).into()),
            Self::F64 => Value::Float(f64::from_bits(bits)),
            Self::Bool => Value::Flag(bits != 0),
            _ => Value::Unsigned(bits),
        }
    }
}
