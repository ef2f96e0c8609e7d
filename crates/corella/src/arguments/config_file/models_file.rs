//! The models of `corella serve --models FILE`: a TOML table for each, with options under their names on the command
//! line.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgMatches, Args, Command, Parser};
use toml::de::{DeTable, DeValue};

use super::{
    Arguments, ConfigFile, Origin, Setting, configurable_command, find, is_setting, reason,
};
use crate::arguments::args::{
    AdapterArgs, Cli, Command as Verb, EngineArgs, ListedModel, ModelArgs, RequestArgs, ServeArgs,
};
use crate::foreign::foreign_setting;
use crate::input::nearest_name::nearest_name;
use crate::input::option_file;
use crate::input::option_value::OptionValue;

/// Returns the models of a file in their order. The options in `words`, the command line, hold for a model whose table
/// does not set them.
pub fn read(
    program: &Command,
    words: &[OsString],
    path: &Path,
    warnings: &mut Vec<String>,
) -> Result<Vec<ListedModel>, String> {
    let shown = path.display().to_string();
    let text = option_file::read_text(path)
        .map_err(|error| format!("--models cannot read {shown}: {error}"))?;
    let command = program.find_subcommand("serve");
    let file = ModelsFile {
        file: ConfigFile {
            program,
            command: command.expect("there is this command"),
            shown,
            text: &text,
        },
        own: options_of_a_model(),
        words,
    };
    file.models(warnings)
}

/// The key of a table that is no option.
const PINNED: &str = "pinned";
/// The id of `--model`.
const MODEL: &str = "model_option";

struct ModelsFile<'a> {
    file: ConfigFile<'a>,
    /// The ids of the options that a table may have.
    own: HashSet<String>,
    words: &'a [OsString],
}

/// Returns the ids of the options that models of one server may have different values for.
fn options_of_a_model() -> HashSet<String> {
    let command = RequestArgs::augment_args(ModelArgs::augment_args(Command::new("model")));
    let command = EngineArgs::augment_args(command);
    let ids = command.get_arguments().map(|arg| arg.get_id().to_string());
    let ids = ids.filter(|id| id != "allow_unknown_fields");
    let further = ["keep_alive", "lora_modules", "max_lora_rank"];
    ids.chain(further.map(str::to_owned)).collect()
}

impl<'a> ModelsFile<'a> {
    fn models(&self, warnings: &mut Vec<String>) -> Result<Vec<ListedModel>, String> {
        let file = &self.file;
        let mut models = Vec::new();
        for (name, value) in file.parse()? {
            let line = file.line(name.span().start);
            let tables = match (&**name.get_ref(), value.into_inner()) {
                ("models", DeValue::Table(tables)) => tables,
                (name, DeValue::Table(_)) => {
                    return Err(format!(
                        "{}: there is no table [{name}]; that of a model is [models.{name}]",
                        file.place(line)
                    ));
                }
                (name, _) => {
                    return Err(format!(
                        "{}: `{name}` is in no model's table: the tables are [models.NAME], and options of the server \
                         stay on the command line",
                        file.place(line)
                    ));
                }
            };
            for (name, value) in tables {
                let line = file.line(name.span().start);
                let name = name.into_inner().into_owned();
                let DeValue::Table(table) = value.into_inner() else {
                    let place = file.place(line);
                    return Err(format!("{place}: [models.{name}] must be a table"));
                };
                models.push((line, self.model(name, line, table, warnings)?));
            }
        }
        // A table of TOML has no order of its own.
        models.sort_by_key(|(line, _)| *line);
        match models.is_empty() {
            true => Err(format!("{}: it has no table [models.NAME]", file.shown)),
            false => Ok(models.into_iter().map(|(_, model)| model).collect()),
        }
    }

    fn model(
        &self,
        name: String,
        line: usize,
        table: DeTable<'a>,
        warnings: &mut Vec<String>,
    ) -> Result<ListedModel, String> {
        let file = &self.file;
        let place = file.place(line);
        let mut is_pinned = false;
        let mut settings: Vec<Setting> = Vec::new();
        for (key, value) in table {
            let place = file.place(file.line(key.span().start));
            match (&**key.get_ref(), value.into_inner()) {
                (PINNED, DeValue::Boolean(value)) => is_pinned = value,
                (PINNED, _) => return Err(format!("{place}: `{PINNED}` must be true or false")),
                (text, value) => {
                    self.check_key(text, &place)?;
                    // A flag of another server may be several options, or one of the server.
                    for setting in file.setting(key.clone(), value, &[], warnings)? {
                        if !self.is_own(setting.arg) {
                            return Err(not_of_a_model(setting.arg, text, &place));
                        }
                        settings.push(setting);
                    }
                }
            }
        }
        file.check_once(&settings)?;
        let mut all = settings.iter();
        let given = all.position(|setting| setting.arg.get_id() == MODEL);
        let Some(given) = given.map(|at| settings.remove(at)) else {
            return Err(format!(
                "{place}: [models.{name}] has no `model`, which is a folder, a GGUF file, or the name of a model on \
                 the hub"
            ));
        };
        let model_place = file.place(given.line);
        let OptionValue::Text(model) = given.value else {
            return Err(format!("{model_place}: `{}` takes a text", given.name));
        };
        let mut args = self.args(&settings, &place)?;
        args.model.model = Some(PathBuf::from(model));
        args.model.model_option = None;
        // A table has as many adapters as it lists.
        args.adapter.max_loras = usize::MAX;
        let names = &mut args.request.served_model_name;
        names.retain(|other| *other != name);
        names.insert(0, name.clone());
        Ok(ListedModel {
            name,
            place,
            model_place,
            is_pinned,
            args,
        })
    }

    fn is_own(&self, arg: &Arg) -> bool {
        self.own.contains(arg.get_id().as_str())
    }

    /// Refuses the name of no option, and that of an option of the server.
    fn check_key(&self, key: &str, place: &str) -> Result<(), String> {
        let command = self.file.command;
        match find(command, key) {
            Some(arg) if self.is_own(arg) => Ok(()),
            Some(arg) => Err(not_of_a_model(arg, key, place)),
            None if is_setting(key) && foreign_setting::is_known(key) => Ok(()),
            None => {
                let known = command.get_arguments().filter(|arg| self.is_own(arg));
                let known = known.filter_map(Arg::get_long).chain([PINNED]);
                let near = nearest_name(key, known);
                let near =
                    near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
                Err(format!("{place}: a model has no option `{key}`{near}"))
            }
        }
    }

    /// Returns the command line with the options of a table behind the typed ones, so that they win.
    fn args(&self, settings: &[Setting], place: &str) -> Result<Box<ServeArgs>, String> {
        let typed = configurable_command(self.file.program, self.words);
        let mut words = self.words.to_vec();
        let end = words.iter().position(|word| word == "--");
        let end = end.unwrap_or(words.len());
        let mut added = Vec::new();
        let mut origins = Vec::new();
        for setting in settings {
            let arguments = self.file.arguments(setting, &HashSet::new())?;
            // `false` without an opposite leaves a switch as it is.
            let is_on = |(_, matches): &(&Command, ArgMatches)| {
                let switch = matches.try_get_one::<bool>(setting.arg.get_id().as_str());
                matches!(switch, Ok(Some(true)))
            };
            if matches!(setting.value, OptionValue::Switch(false))
                && arguments.is_empty()
                && typed.as_ref().is_some_and(is_on)
            {
                return Err(format!(
                    "{}: `{}` is switched on by the command line, and a table cannot switch it off: leave it out \
                     there, and set it in the tables of other models",
                    self.file.place(setting.line),
                    setting.name
                ));
            }
            added.extend(arguments);
            origins.push(Origin {
                option: format!("--{}", setting.arg.get_long().unwrap_or_default()),
                place: self.file.place(setting.line),
            });
        }
        words.splice(end..end, added);
        let arguments = Arguments {
            words,
            warnings: Vec::new(),
            origins,
        };
        match Cli::try_parse_from(&arguments.words) {
            Ok(Cli {
                command: Verb::Serve(args),
            }) => Ok(args),
            Ok(_) => unreachable!("the words are those of a server"),
            Err(error) => {
                let told = arguments.explain(&error);
                Err(told.unwrap_or_else(|| format!("{place}: {}", reason(&error))))
            }
        }
    }
}

/// Returns why a model's table may not have this option.
fn not_of_a_model(arg: &Arg, key: &str, place: &str) -> String {
    let adapters = AdapterArgs::augment_args(Command::new("adapters"));
    let mut adapters = adapters.get_arguments();
    match adapters.any(|other| other.get_id() == arg.get_id()) {
        true => format!(
            "{place}: `{key}` is for a server whose model stays loaded so far: the adapters of a table are those of its \
             `lora-modules`"
        ),
        false => format!(
            "{place}: `{key}` is an option of the server, not of a model: it stays on the command line"
        ),
    }
}

#[cfg(test)]
mod tests;
