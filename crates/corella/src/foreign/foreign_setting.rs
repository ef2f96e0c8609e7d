//! Flags of other servers as settings with a name and a value: keys of a configuration file, and keywords of a program.
//! They are translated like typed ones.

use std::ffi::OsString;

use clap::Command;
use serde_json::Value;

use crate::foreign::flag_table::{self, Treatment};
use crate::foreign::foreign_flag::{self, Translation};

/// Returns whether another server has a flag of this name.
pub fn is_known(name: &str) -> bool {
    flag_table::find(&flag(name)).is_some()
}

/// Translates a setting of a command, which is a subcommand of `program` or `program` itself. The error is the reason
/// for a refusal.
pub fn translate(
    program: &Command,
    subcommand: Option<&str>,
    name: &str,
    value: &Value,
) -> Result<Translation, String> {
    let Some(word) = typed(name, value) else {
        return Ok(Translation::default());
    };
    let before = ["corella"].into_iter().chain(subcommand);
    let words: Vec<OsString> = before.chain([word.as_str()]).map(OsString::from).collect();
    let num_before = words.len() - 1;
    let translation = foreign_flag::translate(program, words);
    let mut translation = translation.map_err(|reasons| reasons.join("; "))?;
    translation.words.drain(..num_before);
    Ok(translation)
}

/// Returns a setting as it would be typed. `None` if `false` leaves a switch off that is off by default.
fn typed(name: &str, value: &Value) -> Option<String> {
    let flag = flag(name);
    match value {
        Value::Bool(true) => Some(flag),
        Value::Bool(false) => {
            let negation = flag.replacen("--", "--no-", 1);
            let treatment = &flag_table::find(&negation)?.treatment;
            (!matches!(treatment, Treatment::NoOp(_))).then_some(negation)
        }
        Value::String(text) => Some(format!("{flag}={text}")),
        // Lists and tables are typed in JSON.
        value => Some(format!("{flag}={value}")),
    }
}

fn flag(name: &str) -> String {
    format!("--{}", name.replace('_', "-"))
}
