//! Flags of other servers as keys of a configuration file. They are translated like typed ones.

use std::ffi::OsString;

use clap::Command;
use toml::de::DeValue;

use crate::foreign::flag_table;
use crate::foreign::foreign_flag;
use crate::input::option_value::OptionValue;

/// A key in terms of Corella.
pub struct Translated {
    /// Options without their dashes, and their values.
    pub options: Vec<(String, OptionValue)>,
    pub warnings: Vec<String>,
}

/// Returns whether another server has a flag of this name.
pub fn is_known(key: &str) -> bool {
    flag_table::find(&flag(key)).is_some()
}

/// Translates a key of a `command`. The error is the reason for a refusal.
pub fn translate(
    program: &Command,
    command: &str,
    key: &str,
    value: &DeValue,
) -> Result<Translated, String> {
    let mut program = program.clone();
    program.build();
    let name = flag(key);
    let switched_off = flag_table::find(&name.replacen("--", "--no-", 1));
    let word = match value {
        DeValue::Boolean(true) => name,
        DeValue::Boolean(false) if switched_off.is_some() => name.replacen("--", "--no-", 1),
        // Other switches are off by default.
        DeValue::Boolean(false) => {
            return Ok(Translated {
                options: Vec::new(),
                warnings: Vec::new(),
            });
        }
        value => format!("{name}={}", typed(value)),
    };
    let words = ["corella", command, &word].map(OsString::from);
    let translation = foreign_flag::translate(&program, words.into());
    let translation = translation.map_err(|reasons| reasons.join("; "))?;
    let options = translation.words.iter().skip(2).filter_map(|word| {
        let text = word.to_str()?.strip_prefix("--")?;
        Some(match text.split_once('=') {
            Some((long, value)) => (long.to_owned(), OptionValue::Text(value.to_owned())),
            None => (text.to_owned(), OptionValue::Switch(true)),
        })
    });
    Ok(Translated {
        options: options.collect(),
        warnings: [translation.notes, translation.warnings].concat(),
    })
}

fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

/// Returns a value as typed. Lists and tables are typed in JSON.
fn typed(value: &DeValue) -> String {
    let json = flag_table::json(value);
    json.as_str()
        .map_or_else(|| json.to_string(), str::to_owned)
}
