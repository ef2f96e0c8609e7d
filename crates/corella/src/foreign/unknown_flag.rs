//! Explains an unknown flag by the nearest option.

use clap::Command;
use clap::error::ErrorKind;

use crate::input::nearest_name::nearest_name;
use crate::input::option_value;

/// Returns the message for an unknown option. It names the nearest of `known`, which have no dashes.
pub fn refusal<'a>(long: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let near = nearest_name(long, known);
    let near = near.map_or_else(String::new, |near| format!("; did you mean --{near}?"));
    format!("there is no option --{long}{near}")
}

/// Returns the option of `command` nearest to the typed one. A suggestion must not be refused itself.
pub fn nearest_option<'a>(
    command: &'a Command,
    typed: &str,
    value: Option<&str>,
) -> Option<&'a str> {
    let known = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let known = known.flat_map(|arg| {
        let aliases = arg.get_visible_aliases().unwrap_or_default();
        arg.get_long().into_iter().chain(aliases)
    });
    let near = nearest_name(typed.strip_prefix("--")?, known)?;
    takes(command, near, value).then_some(near)
}

/// Returns whether the option `long` accepts the value that was typed after the mistyped name, or takes no value.
fn takes(command: &Command, long: &str, value: Option<&str>) -> bool {
    let Some(arg) = option_value::find(command, long) else {
        return false;
    };
    // After a switch, the word may also be a positional argument.
    let Some(value) = value.filter(|_| arg.get_action().takes_values()) else {
        return true;
    };
    let command = command.clone().no_binary_name(true);
    let result = command.try_get_matches_from([format!("--{long}={value}")]);
    !result.is_err_and(|error| {
        matches!(
            error.kind(),
            ErrorKind::InvalidValue | ErrorKind::ValueValidation
        )
    })
}
