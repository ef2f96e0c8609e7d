//! Faults of a configuration, as sentences in which the fields can get the names that they have on the command line.

use alloc::borrow::Cow;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

/// A fault of a configuration, with the fields to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The names of fields, each with the text between it and the next one.
    parts: Vec<(&'static str, Cow<'static, str>)>,
}

impl ConfigError {
    /// The sentence begins with a field.
    pub fn new(field: &'static str, text: impl Into<Cow<'static, str>>) -> Self {
        let parts = vec![(field, text.into())];
        Self { parts }
    }

    pub(crate) fn at_most(field: &'static str, most: u32) -> Self {
        Self::new(field, format!(" can be at most {most}"))
    }

    /// Continues the sentence with a further field.
    pub fn then(mut self, field: &'static str, text: impl Into<Cow<'static, str>>) -> Self {
        self.parts.push((field, text.into()));
        self
    }

    /// Returns the sentence with another name for each field.
    pub fn with_names(&self, name: impl Fn(&'static str) -> String) -> String {
        let parts = self.parts.iter();
        parts.map(|(field, text)| name(field) + text).collect()
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with_names(String::from))
    }
}

impl core::error::Error for ConfigError {}
