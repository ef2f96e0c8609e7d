//! Options from a TOML file and from the environment, under their names on the command line.
//!
//! These options become arguments in front of the typed ones, so that the same checks apply to all sources.

pub mod models_file;

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::foreign::flag_table::json;
use crate::foreign::foreign_setting;
use crate::input::environment::{self, Environment};
use crate::input::nearest_name::nearest_name;
use crate::input::option_file;
use crate::input::option_value::{self, OptionValue};

/// The arguments of the process, of its environment and of its file.
#[derive(Debug)]
pub struct Arguments {
    pub words: Vec<OsString>,
    /// One sentence for each flag of another server that the file sets, and for each mistyped variable.
    pub warnings: Vec<String>,
    /// The source of each option that was not typed.
    origins: Vec<Origin>,
}

#[derive(Debug)]
struct Origin {
    /// The option, with its dashes.
    option: String,
    /// The file and the line, or the variable.
    place: String,
}

/// Adds the options set by `variables` and by the named file, if any.
pub fn expand(
    program: &Command,
    mut words: Vec<OsString>,
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Arguments, String> {
    let mut origins = Vec::new();
    let mut warnings = Vec::new();
    let Some((command, matches)) = configurable_command(program, &words) else {
        return Ok(Arguments {
            words,
            warnings,
            origins,
        });
    };
    let environment = Environment::new(variables);
    warnings.extend(environment.slips(program));
    let mut given: HashSet<&str> = command
        .get_arguments()
        .map(|arg| arg.get_id().as_str())
        .filter(|id| {
            let source = matches.value_source(id);
            !matches!(source, None | Some(ValueSource::DefaultValue))
        })
        .collect();
    let mut file = matches.get_one::<PathBuf>(ID).cloned();
    let mut added = Vec::new();
    for arg in command.get_arguments() {
        let Some((variable, value)) = environment.get(arg) else {
            continue;
        };
        if arg.get_id() == ID {
            file.get_or_insert_with(|| value.into());
        }
        // clap itself reads the variables that an option declares.
        let is_read = arg.get_env().is_some_and(|name| *name == *variable);
        if is_read || !arg.get_long().is_some_and(is_setting) || is_given(command, arg, &given) {
            continue;
        }
        let arguments = environment::option_value(arg, value).arguments(command, arg);
        let arguments = arguments.map_err(|what| format!("{variable} {what}"))?;
        origins.push(Origin {
            option: format!("--{}", arg.get_long().unwrap_or_default()),
            place: variable,
        });
        given.insert(arg.get_id().as_str());
        added.extend(arguments);
    }
    if let Some(path) = file {
        let shown = path.display().to_string();
        let text = option_file::read_text(&path)
            .map_err(|error| format!("--config cannot read {shown}: {error}"))?;
        let file = ConfigFile {
            program,
            command,
            shown,
            text: &text,
        };
        for setting in file.settings(&mut warnings)? {
            let arguments = file.arguments(&setting, &given)?;
            origins.extend(arguments.first().map(|_| Origin {
                option: format!("--{}", setting.arg.get_long().unwrap_or_default()),
                place: file.place(setting.line),
            }));
            added.extend(arguments);
        }
    }
    let name = words.iter().position(|word| *word == *command.get_name());
    let behind = name.map_or(words.len(), |at| at + 1);
    words.splice(behind..behind, added);
    Ok(Arguments {
        words,
        warnings,
        origins,
    })
}

impl Arguments {
    /// Returns clap's reason for refusing the arguments, with its place, if it concerns an option from the file or the
    /// environment.
    pub fn explain(&self, error: &clap::Error) -> Option<String> {
        let refused = match error.get(ContextKind::InvalidArg)? {
            ContextValue::String(refused) => refused.clone(),
            ContextValue::Strings(refused) => refused.first()?.clone(),
            _ => return None,
        };
        let option = refused.split([' ', '=']).next()?;
        let origin = self.origins.iter().find(|origin| origin.option == option)?;
        Some(format!("{}: {}", origin.place, reason(error)))
    }

    /// Adds to an error the place of the option that it names, if the option is from the file or the environment.
    pub fn locate(&self, message: String) -> String {
        let is_named = |origin: &&Origin| {
            message.match_indices(&origin.option).any(|(at, option)| {
                let behind = message[at + option.len()..].chars().next();
                behind.is_none_or(|next| !(next.is_ascii_alphanumeric() || next == '-'))
            })
        };
        match self.origins.iter().find(is_named) {
            Some(origin) => format!("{}: {message}", origin.place),
            None => message,
        }
    }
}

fn reason(error: &clap::Error) -> String {
    let message = error.render().to_string();
    let message = message.trim_start_matches("error: ");
    // After the first paragraph clap repeats the usage.
    let message = message.split("\n\n").next().unwrap_or_default();
    let lines: Vec<&str> = message.lines().map(str::trim).collect();
    lines.join(" ")
}

/// Returns the subcommand, if it reads a file, and the arguments after it.
fn configurable_command<'a>(
    program: &'a Command,
    words: &[OsString],
) -> Option<(&'a Command, ArgMatches)> {
    // Errors are ignored here: the file may have the required options. All arguments are parsed again once the file's
    // options are among them.
    let typed = program.clone().ignore_errors(true);
    let mut matches = typed.try_get_matches_from(words).ok()?;
    let (name, matches) = matches.remove_subcommand()?;
    let command = program.find_subcommand(&name)?;
    takes_file(command).then_some((command, matches))
}

/// The name of the option that names the file.
const ID: &str = "config";

fn takes_file(command: &Command) -> bool {
    command.get_arguments().any(|arg| arg.get_id() == ID)
}

struct ConfigFile<'a> {
    program: &'a Command,
    command: &'a Command,
    /// The path, for errors.
    shown: String,
    text: &'a str,
}

/// An option of the file.
struct Setting<'a> {
    arg: &'a Arg,
    /// The option's name as written in the file.
    name: String,
    value: OptionValue,
    line: usize,
}

impl<'a> ConfigFile<'a> {
    fn parse(&self) -> Result<DeTable<'a>, String> {
        let table = DeTable::parse(self.text).map_err(|error| {
            let message = error.message().replace('\n', " ");
            let hint = match self.shown.ends_with(".yaml") || self.shown.ends_with(".yml") {
                true => {
                    ". The file is read as TOML, whose lines are `port = 8080`, and not as YAML"
                }
                false => "",
            };
            match error.span() {
                Some(span) => format!("{}: {message}{hint}", self.place(self.line(span.start))),
                None => format!("{}: {message}{hint}", self.shown),
            }
        })?;
        Ok(table.into_inner())
    }

    /// Returns the options for this command. Options in the command's own table take precedence.
    fn settings(&self, warnings: &mut Vec<String>) -> Result<Vec<Setting<'a>>, String> {
        let mut shared = Vec::new();
        let mut own = Vec::new();
        for (name, value) in self.parse()? {
            let line = self.line(name.span().start);
            match value.into_inner() {
                DeValue::Table(table) if **name.get_ref() == *self.command.get_name() => {
                    for (name, value) in table {
                        own.extend(self.setting(name, value.into_inner(), &[], warnings)?);
                    }
                }
                DeValue::Table(_) if !foreign_setting::is_known(name.get_ref()) => {
                    let known = self.program.find_subcommand(name.get_ref().as_ref());
                    if !known.is_some_and(takes_file) {
                        let tables = self.configurable().map(|command| command.get_name());
                        let tables: Vec<_> = tables.map(|name| format!("[{name}]")).collect();
                        return Err(format!(
                            "{}: there is no table [{}]; there are {}",
                            self.place(line),
                            name.get_ref(),
                            tables.join(", ")
                        ));
                    }
                }
                value => {
                    let others: Vec<_> = self.configurable().collect();
                    shared.extend(self.setting(name, value, &others, warnings)?);
                }
            }
        }
        self.check_once(&own)?;
        self.check_once(&shared)?;
        let is_replaced = |shared: &Setting| {
            own.iter()
                .any(|own| own.arg.get_id() == shared.arg.get_id())
        };
        shared.retain(|setting| !is_replaced(setting));
        shared.extend(own);
        Ok(shared)
    }

    /// Refuses a file that sets one option by two of its names.
    fn check_once(&self, settings: &[Setting]) -> Result<(), String> {
        for (index, setting) in settings.iter().enumerate() {
            let same = |other: &&Setting| {
                other.arg.get_id() == setting.arg.get_id()
                    && (other.line, &other.name) != (setting.line, &setting.name)
            };
            if let Some(other) = settings[..index].iter().find(same) {
                let (first, second) = match other.line < setting.line {
                    true => (other, setting),
                    false => (setting, other),
                };
                return Err(format!(
                    "{}: `{}` is the same option as `{}` in line {}",
                    self.place(second.line),
                    second.name,
                    first.name,
                    first.line
                ));
            }
        }
        Ok(())
    }

    /// Returns the commands that read such a file.
    fn configurable(&self) -> impl Iterator<Item = &'a Command> {
        self.program
            .get_subcommands()
            .filter(|command| takes_file(command))
    }

    /// Returns `None` if the option belongs to one of `others` instead of this command. A flag of another server may
    /// become several options.
    fn setting(
        &self,
        name: Spanned<std::borrow::Cow<'a, str>>,
        value: DeValue<'a>,
        others: &[&Command],
        warnings: &mut Vec<String>,
    ) -> Result<Vec<Setting<'a>>, String> {
        let line = self.line(name.span().start);
        let name = name.into_inner().into_owned();
        if let Some(arg) = find(self.command, &name) {
            return Ok(vec![Setting {
                arg,
                name,
                value: OptionValue::from(&json(&value)),
                line,
            }]);
        }
        if others.iter().any(|other| find(other, &name).is_some()) {
            return Ok(Vec::new());
        }
        if is_setting(&name) && foreign_setting::is_known(&name) {
            let mut program = self.program.clone();
            program.build();
            let command = self.command.get_name();
            let own = foreign_setting::translate(&program, Some(command), &name, &json(&value))
                .map_err(|reason| format!("{}: {reason}", self.place(line)))?;
            let told = own.notes.into_iter().chain(own.warnings);
            warnings.extend(told.map(|warning| format!("{}: {warning}", self.place(line))));
            let settings = own.words.iter().filter_map(|word| {
                let text = word.to_str()?.strip_prefix("--")?;
                let (long, value) = match text.split_once('=') {
                    Some((long, value)) => (long, OptionValue::Text(value.to_owned())),
                    None => (text, OptionValue::Switch(true)),
                };
                Some(Setting {
                    arg: find(self.command, long)?,
                    name: name.clone(),
                    value,
                    line,
                })
            });
            return Ok(settings.collect());
        }
        let known = self.command.get_arguments().filter_map(Arg::get_long);
        let near = nearest_name(&name, known.filter(|known| is_setting(known)));
        let near = near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
        let command = self.command.get_name();
        Err(format!(
            "{}: `corella {command}` has no option `{name}`{near}",
            self.place(line)
        ))
    }

    /// Returns the option's arguments; no arguments if the option, or one that conflicts with it, was given elsewhere.
    fn arguments(&self, setting: &Setting, given: &HashSet<&str>) -> Result<Vec<OsString>, String> {
        let Setting {
            arg,
            name,
            value,
            line,
        } = setting;
        if is_given(self.command, arg, given) {
            return Ok(Vec::new());
        }
        let arguments = value.arguments(self.command, arg);
        arguments.map_err(|what| format!("{}: `{name}` {what}", self.place(*line)))
    }

    fn line(&self, offset: usize) -> usize {
        1 + self.text[..offset].matches('\n').count()
    }

    fn place(&self, line: usize) -> String {
        format!("{}, line {line}", self.shown)
    }
}

/// Returns whether `given` has the id of the option, or of one that conflicts with it.
fn is_given(command: &Command, arg: &Arg, given: &HashSet<&str>) -> bool {
    let excludes = |one: &Arg, another: &Arg| {
        let excluded = command.get_arg_conflicts_with(one);
        excluded
            .iter()
            .any(|excluded| excluded.get_id() == another.get_id())
    };
    command.get_arguments().any(|other| {
        given.contains(other.get_id().as_str())
            && (other.get_id() == arg.get_id() || excludes(arg, other) || excludes(other, arg))
    })
}

/// Returns the option of a command that a file may set by this name. As on the command line, `_` equals `-`.
fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let name = name.replace('_', "-");
    option_value::find(command, &name).filter(|_| is_setting(&name))
}

fn is_setting(name: &str) -> bool {
    !matches!(name, "help" | "version" | ID)
}

#[cfg(test)]
mod tests;
