//! The value of an option from a file, a variable or a keyword, converted to the form on the command line.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};
use serde_json::Value;

/// A value in a file or in another language.
pub enum OptionValue {
    Switch(bool),
    /// A text, or a number as written.
    Text(String),
    List(Vec<OptionValue>),
    /// A value that cannot be typed.
    Other,
}

impl OptionValue {
    /// Returns the arguments that give this value to an option of `command`. `false` leaves a switch off, or sets its
    /// opposite if one exists.
    ///
    /// The error names the values that the option takes.
    pub fn arguments(&self, command: &Command, arg: &Arg) -> Result<Vec<OsString>, &'static str> {
        let long = arg.get_long().unwrap_or_default();
        if !arg.get_action().takes_values() {
            return match self {
                Self::Switch(true) => Ok(vec![format!("--{long}").into()]),
                Self::Switch(false) => {
                    let opposite = format!("no-{long}");
                    let is_there = find(command, &opposite).is_some();
                    Ok(Vec::from_iter(
                        is_there.then(|| format!("--{opposite}").into()),
                    ))
                }
                _ => Err("must be true or false"),
            };
        }
        let takes_many =
            matches!(arg.get_action(), ArgAction::Append) || arg.get_value_delimiter().is_some();
        let values = match self {
            Self::List(values) if takes_many => values.as_slice(),
            Self::List(_) => return Err("takes one value, not a list"),
            value => std::slice::from_ref(value),
        };
        let argument = |value: &Self| match value {
            Self::Text(text) => Ok(format!("--{long}={text}").into()),
            _ => Err("takes a text or a number"),
        };
        values.iter().map(argument).collect()
    }
}

impl From<&Value> for OptionValue {
    fn from(value: &Value) -> Self {
        match value {
            Value::Bool(switch) => Self::Switch(*switch),
            Value::Number(number) => Self::Text(number.to_string()),
            Value::String(text) => Self::Text(text.clone()),
            Value::Array(values) => Self::List(values.iter().map(Self::from).collect()),
            Value::Null | Value::Object(_) => Self::Other,
        }
    }
}

/// Returns the option of a command with this name or alias.
pub fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let mut args = command.get_arguments();
    args.find(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(name) || aliases.contains(&name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(name: &str, value: OptionValue) -> Result<Vec<OsString>, &'static str> {
        let switch = |name: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue);
        let command = Command::new("x")
            .arg(switch("cache"))
            .arg(switch("no-cache"))
            .arg(switch("pin"))
            .arg(Arg::new("size").long("size"))
            .arg(Arg::new("name").long("name").action(ArgAction::Append));
        let arg = find(&command, name).expect("it is one of these");
        value.arguments(&command, arg)
    }

    #[test]
    fn false_switches_off_what_can_be_switched_off() {
        let switch = |name, on| typed(name, OptionValue::Switch(on)).unwrap();
        assert_eq!(switch("cache", true), ["--cache"]);
        assert_eq!(switch("cache", false), ["--no-cache"]);
        assert!(switch("no-cache", false).is_empty());
        assert!(switch("pin", false).is_empty());
    }

    #[test]
    fn values_are_typed_one_by_one() {
        let text = |text: &str| OptionValue::Text(text.to_owned());
        let list = |texts: &[&str]| OptionValue::List(texts.iter().map(|one| text(one)).collect());
        assert_eq!(typed("size", text("-1")).unwrap(), ["--size=-1"]);
        assert_eq!(
            typed("name", list(&["a", "b"])).unwrap(),
            ["--name=a", "--name=b"]
        );
        assert_eq!(typed("name", text("a")).unwrap(), ["--name=a"]);
        assert!(typed("size", list(&["a"])).is_err());
        assert!(typed("size", OptionValue::Switch(true)).is_err());
        assert!(typed("pin", text("true")).is_err());
        assert!(typed("name", OptionValue::List(vec![OptionValue::Other])).is_err());
    }
}
