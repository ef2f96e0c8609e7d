//! Options from the environment: `CORELLA_` and the option's name, as in `CORELLA_MAX_NUM_SEQS`.

use std::ffi::OsString;

use clap::{Arg, ArgAction};

use crate::input::option_value::OptionValue;

const PREFIX: &str = "CORELLA_";

/// The process's variables that may be options.
pub struct Environment(Vec<(String, String)>);

impl Environment {
    /// An empty variable counts as unset.
    pub fn new(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let texts = variables.into_iter().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        let options = texts.filter(|(name, value)| {
            name.starts_with(PREFIX) && !value.is_empty() && !is_of_kubernetes(value)
        });
        Self(options.collect())
    }

    /// Returns the variable of an option, and its value if set.
    pub fn get(&self, arg: &Arg) -> Option<(String, &str)> {
        let name = variable(arg)?;
        let found = self.0.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (name, value.as_str()))
    }
}

/// Returns the name of an option's variable.
pub fn variable(arg: &Arg) -> Option<String> {
    let long = arg.get_long()?.replace('-', "_").to_uppercase();
    Some(format!("{PREFIX}{long}"))
}

/// For a service named corella, Kubernetes sets CORELLA_PORT to an address.
fn is_of_kubernetes(value: &str) -> bool {
    ["tcp://", "udp://", "sctp://"]
        .iter()
        .any(|scheme| value.starts_with(scheme))
}

/// Converts the value of a variable to the value of an option.
pub fn option_value(arg: &Arg, text: &str) -> OptionValue {
    if !arg.get_action().takes_values() {
        return match text.to_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => OptionValue::Switch(true),
            "0" | "false" | "no" | "off" => OptionValue::Switch(false),
            _ => OptionValue::Text(text.to_owned()),
        };
    }
    // A text may contain commas.
    let is_text = arg
        .get_value_names()
        .unwrap_or_default()
        .iter()
        .any(|name| name == "TEXT");
    let parts = match arg.get_action() {
        ArgAction::Append if !is_text => text.split(',').collect(),
        _ => vec![text],
    };
    let parts = parts
        .into_iter()
        .map(|part| OptionValue::Text(part.trim().to_owned()));
    match arg.get_action() {
        ArgAction::Append => OptionValue::List(parts.collect()),
        _ => OptionValue::Text(text.to_owned()),
    }
}
