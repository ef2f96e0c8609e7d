//! Options from the environment: `CORELLA_` and the option's name, as in `CORELLA_MAX_NUM_SEQS`.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};

use crate::input::nearest_name::nearest_name;
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

    /// Returns a warning for each variable whose name is close to that of an option of any command.
    pub fn slips(&self, program: &Command) -> Vec<String> {
        let mut known = Vec::new();
        add_names(program, &mut known);
        let slips = self.0.iter().filter_map(|(name, _)| {
            let written = name.strip_prefix(PREFIX)?;
            let near = nearest_name(written, known.iter().copied())?;
            if is_name_of_kubernetes(written) {
                return None;
            }
            let near = variable_of(near);
            (near != *name).then(|| format!("{name} is not read; did you mean {near}?"))
        });
        slips.collect()
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
    arg.get_long().map(variable_of)
}

fn variable_of(long: &str) -> String {
    format!("{PREFIX}{}", long.replace('-', "_").to_uppercase())
}

/// Adds the names of all options of a command and of its subcommands.
fn add_names<'a>(command: &'a Command, names: &mut Vec<&'a str>) {
    let options = command.get_arguments().filter(|arg| !arg.is_hide_set());
    names.extend(options.filter_map(Arg::get_long));
    for subcommand in command.get_subcommands() {
        add_names(subcommand, names);
    }
}

/// For a service whose name begins with corella, Kubernetes sets such variables to numbers and hosts.
fn is_name_of_kubernetes(name: &str) -> bool {
    let parts = ["SERVICE_HOST", "SERVICE_PORT", "_TCP", "_UDP", "_SCTP"];
    parts.iter().any(|part| name.contains(part))
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
    // A text, or a folder with a size, may contain commas.
    let is_text = arg
        .get_value_names()
        .unwrap_or_default()
        .iter()
        .any(|name| name == "TEXT" || name.contains(','));
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
