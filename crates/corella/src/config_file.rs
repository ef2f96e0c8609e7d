//! Options from a TOML file and from the environment, by the names that they have on the command line.
//!
//! They become arguments in front of the typed ones, so that every option has the same checks wherever
//! it comes from.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::environment::{self, Environment};
use crate::foreign_key;
use crate::nearest_name::nearest_name;
use crate::option_value::{self, OptionValue};

/// The arguments of the process, of its environment and of its file.
#[derive(Debug)]
pub struct Arguments {
    pub words: Vec<OsString>,
    /// One sentence for each flag of another server that the file sets.
    pub warnings: Vec<String>,
    /// Where each option was found that was not typed.
    origins: Vec<Origin>,
}

#[derive(Debug)]
struct Origin {
    /// With its dashes.
    option: String,
    /// The file and the line, or the variable.
    place: String,
}

/// Adds the options that `variables` and the file set which is named, if one is.
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
    let mut given: HashSet<&str> = { command.get_arguments() }
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
        // clap reads some variables itself.
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
        let text = std::fs::read_to_string(&path)
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
    /// The reason why clap refused the arguments, if that is an option of the file.
    pub fn explain(&self, error: &clap::Error) -> Option<String> {
        let refused = match error.get(ContextKind::InvalidArg)? {
            ContextValue::String(refused) => refused.clone(),
            ContextValue::Strings(refused) => refused.first()?.clone(),
            _ => return None,
        };
        let option = refused.split([' ', '=']).next()?;
        let origin = self.origins.iter().find(|origin| origin.option == option)?;
        let message = error.render().to_string();
        let message = message.trim_start_matches("error: ");
        // Behind the first paragraph clap repeats the usage.
        let message = message.split("\n\n").next()?;
        let lines: Vec<&str> = message.lines().map(str::trim).collect();
        Some(format!("{}: {}", origin.place, lines.join(" ")))
    }

    /// Says where the option stands that an error names, if that is in the file.
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

/// The subcommand, if it takes a file, and the arguments behind it.
fn configurable_command<'a>(
    program: &'a Command,
    words: &[OsString],
) -> Option<(&'a Command, ArgMatches)> {
    // Required options may be in the file, and other mistakes are reported when both are known.
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
    /// As it is written.
    name: String,
    value: OptionValue,
    line: usize,
}

impl<'a> ConfigFile<'a> {
    /// The options that concern this command. Those in the command's own table win.
    fn settings(&self, warnings: &mut Vec<String>) -> Result<Vec<Setting<'a>>, String> {
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
        let mut shared = Vec::new();
        let mut own = Vec::new();
        for (name, value) in table.into_inner() {
            let line = self.line(name.span().start);
            match value.into_inner() {
                DeValue::Table(table) if **name.get_ref() == *self.command.get_name() => {
                    for (name, value) in table {
                        own.extend(self.setting(name, value.into_inner(), &[], warnings)?);
                    }
                }
                DeValue::Table(_) if !foreign_key::is_known(name.get_ref()) => {
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

    /// An option may have several names, and only one of them counts.
    fn check_once(&self, settings: &[Setting]) -> Result<(), String> {
        for (index, setting) in settings.iter().enumerate() {
            let same = |other: &&Setting| {
                other.arg.get_id() == setting.arg.get_id() && other.line != setting.line
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

    /// The commands that read such a file.
    fn configurable(&self) -> impl Iterator<Item = &'a Command> {
        self.program
            .get_subcommands()
            .filter(|command| takes_file(command))
    }

    /// None if the option is not one of this command, but of one of `others`. A flag of another server may become
    /// several options.
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
                value: option_value(&value),
                line,
            }]);
        }
        if others.iter().any(|other| find(other, &name).is_some()) {
            return Ok(Vec::new());
        }
        if is_setting(&name) && foreign_key::is_known(&name) {
            let command = self.command.get_name();
            let translated = foreign_key::translate(self.program, command, &name, &value)
                .map_err(|reason| format!("{}: {reason}", self.place(line)))?;
            let told = translated.warnings.into_iter();
            warnings.extend(told.map(|warning| format!("{}: {warning}", self.place(line))));
            let settings = translated.options.into_iter().filter_map(|(long, value)| {
                let arg = find(self.command, &long)?;
                let name = name.clone();
                Some(Setting {
                    arg,
                    name,
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

    /// The option as arguments; none if it was given otherwise too, or something that excludes it.
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

/// Whether `given` has the id of the option, or of one that excludes it.
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

/// The option of a command that a file may set by this name. As on the command line, `_` stands for `-`.
fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let name = name.replace('_', "-");
    option_value::find(command, &name).filter(|_| is_setting(&name))
}

fn is_setting(name: &str) -> bool {
    !matches!(name, "help" | "version" | ID)
}

fn option_value(value: &DeValue) -> OptionValue {
    match value {
        DeValue::Boolean(switch) => OptionValue::Switch(*switch),
        DeValue::String(text) => OptionValue::Text(text.clone().into_owned()),
        DeValue::Integer(number) => match i128::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => OptionValue::Text(number.to_string()),
            Err(_) => OptionValue::Other,
        },
        DeValue::Float(number) => OptionValue::Text(number.as_str().to_owned()),
        DeValue::Array(values) => {
            let values = values.iter();
            OptionValue::List(values.map(|value| option_value(value.get_ref())).collect())
        }
        DeValue::Datetime(_) | DeValue::Table(_) => OptionValue::Other,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    struct TestFile(PathBuf);

    impl TestFile {
        fn new(name: &str, text: &str) -> Self {
            let name = format!("corella-config-{}-{name}.toml", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, text).unwrap();
            Self(path)
        }
    }

    impl Drop for TestFile {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn program() -> Command {
        Cli::command()
    }

    fn expand_file(name: &str, text: &str, typed: &str) -> Result<Arguments, String> {
        let file = TestFile::new(name, text);
        let words = typed.split(' ').map(OsString::from);
        let path = OsString::from(format!("--config={}", file.0.display()));
        expand(&program(), words.chain([path]).collect(), [])
    }

    /// The words between the command and what was typed behind it.
    fn added(name: &str, text: &str, typed: &str) -> Vec<String> {
        let arguments = expand_file(name, text, typed).unwrap();
        let num_typed = typed.split(' ').count() - 2 + 1;
        let words = &arguments.words[2..arguments.words.len() - num_typed];
        words
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn every_kind_of_option_has_its_value() {
        let text = "
            model = \"models/x\"
            port = 8_080
            pin_threads = true
            allow-unknown-fields = false
            enable-prefix-caching = false
            kv-cache-memory = \"1G\"
            max-pinned-share = 0.5
            served-model-name = [\"a\", \"b\"]
            chunked-prefill-size = 0x100 # another name of --max-prefill-tokens
        ";
        let mut words = added("kinds", text, "corella serve");
        words.sort();
        let mut expected = [
            "--model=models/x",
            "--port=8080",
            "--pin-threads",
            "--no-enable-prefix-caching",
            "--kv-cache-memory=1G",
            "--max-pinned-share=0.5",
            "--served-model-name=a",
            "--served-model-name=b",
            "--max-prefill-tokens=256",
        ];
        expected.sort();
        assert_eq!(words, expected);
    }

    #[test]
    fn what_is_typed_wins() {
        let text = "port = 1\nmodel = \"x\"\nserved-model-name = [\"a\"]\nthreads = 2";
        let typed = "corella serve other-model --port=2 --served-model-name b";
        assert_eq!(added("typed", text, typed), ["--threads=2"]);
        // A prompt that is typed excludes one that is not.
        let text = "prompt-tokens = 5\nmax-tokens = 3";
        let typed = "corella generate -p hello";
        assert_eq!(added("excluded", text, typed), ["--max-tokens=3"]);
    }

    #[test]
    fn commands_share_a_file() {
        let text = "port = 1\nthreads = 2\n[generate]\nthreads = 1\n[serve]\nport = 3";
        assert_eq!(
            added("generate", text, "corella generate -p x"),
            ["--threads=1"]
        );
        let mut words = added("serve", text, "corella serve");
        words.sort();
        assert_eq!(words, ["--port=3", "--threads=2"]);
    }

    #[test]
    fn mistakes_are_found_in_their_line() {
        for (text, line, reason) in [
            (
                "port = 1\nprot = 2",
                2,
                "has no option `prot`; did you mean `port`?",
            ),
            ("max_num_seq = 2", 1, "did you mean `max-num-seqs`?"),
            ("\n\nwarp-drive = true", 3, "has no option `warp-drive`"),
            ("[serve]\nprompt = \"x\"", 2, "has no option `prompt`"),
            (
                "[sreve]\nport = 1",
                1,
                "there is no table [sreve]; there are [serve]",
            ),
            ("port = 1\nport = 2", 2, "duplicate key"),
            ("port = 1\nhost = ", 2, ""),
            ("pin-threads = 3", 1, "`pin-threads` must be true or false"),
            ("port = [1, 2]", 1, "`port` takes one value"),
            ("port = true", 1, "`port` takes a text or a number"),
            ("config = \"other.toml\"", 1, "has no option `config`"),
            (
                "block-size = 16\npage-size = 16",
                2,
                "the same option as `block-size`",
            ),
            (
                "port = 1\nmiddleware = \"x\"",
                2,
                "there is no option --middleware: code of others is not loaded",
            ),
            (
                "tensor-parallel-size = 2",
                1,
                "--tensor-parallel-size 2: matrices are not split",
            ),
            (
                "max-model-len = 5\n\nctx-size = 6",
                3,
                "`ctx-size` is the same option as `max-model-len` in line 1",
            ),
            (
                "[speculative-config]\nmethod = \"eagle\"",
                1,
                "the method eagle is not there",
            ),
        ] {
            let error = expand_file("mistake", text, "corella serve").unwrap_err();
            let place = format!("mistake.toml, line {line}: ");
            assert!(
                error.contains(&place) && error.contains(reason),
                "{text}: {error}"
            );
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    /// They mean the same as on the command line.
    #[test]
    fn flags_of_other_servers_are_keys_too() {
        let text = "
            trust-remote-code = true
            enforce_eager = false
            ctx-size = 4096
            gpu-layers = 99
            allowed-origins = [\"https://a\", \"https://b\"]
            enable-chunked-prefill = false
            tensor-parallel-size = 1
            cudagraph-capture-sizes = [1, 2]
            speculative-config = { method = \"ngram\", num_speculative_tokens = 4 }
            [serve]
            parallel = 3
        ";
        let arguments = expand_file("foreign", text, "corella serve x --port=1").unwrap();
        let mut words = arguments.words.clone();
        words.truncate(words.len() - 3);
        words.sort();
        let mut expected = [
            "corella",
            "serve",
            "--max-model-len=4096",
            "--cors-allow-origin=https://a",
            "--cors-allow-origin=https://b",
            "--no-chunked-prefill",
            "--speculate=ngram",
            "--draft-tokens=4",
            "--max-num-seqs=3",
        ];
        expected.sort();
        assert_eq!(words, expected);
        let warnings = arguments.warnings.join("\n");
        for warning in [
            "foreign.toml, line 2: --trust-remote-code has no effect: ",
            "foreign.toml, line 4: --ctx-size is --max-model-len",
            "foreign.toml, line 5: --gpu-layers has no effect: ",
            "foreign.toml, line 12: --parallel is --max-num-seqs",
        ] {
            assert!(warnings.contains(warning), "{warnings}");
        }
        // The command line wins here, too.
        let typed = "corella serve --max-model-len 8192";
        assert_eq!(added("typed-foreign", "ctx-size = 4096", typed), [""; 0]);
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_line() {
        let arguments = expand_file("value", "seed = 1\nport = 70000", "corella serve").unwrap();
        let error = program()
            .try_get_matches_from(&arguments.words)
            .unwrap_err();
        let message = arguments.explain(&error).unwrap();
        assert!(
            message.contains("value.toml, line 2: invalid value '70000'"),
            "{message}"
        );
        let message = arguments.locate("--seed must be even".to_owned());
        assert!(
            message.contains("value.toml, line 1: --seed must"),
            "{message}"
        );
        assert_eq!(arguments.locate("--seeds".to_owned()), "--seeds");
    }

    #[test]
    fn without_a_file_nothing_changes() {
        let words: Vec<OsString> = ["corella", "serve", "--port", "1"]
            .map(OsString::from)
            .into();
        let unchanged = expand(&program(), words.clone(), []).unwrap();
        assert_eq!(unchanged.words, words);
    }

    /// The words that variables add to a command.
    fn from_environment(variables: &[(&str, &str)], typed: &str) -> Result<Arguments, String> {
        let words = typed.split(' ').map(OsString::from);
        let pairs = variables
            .iter()
            .map(|(name, value)| ((*name).into(), (*value).into()));
        expand(&program(), words.collect(), pairs)
    }

    #[test]
    fn every_option_has_a_variable() {
        let variables = [
            ("CORELLA_PORT", "9001"),
            ("CORELLA_MODEL", "models/x"),
            ("CORELLA_SERVED_MODEL_NAME", "a, b"),
            ("CORELLA_PIN_PREFIX", "one, two"),
            ("CORELLA_PIN_THREADS", "1"),
            ("CORELLA_SLO_ADMISSION", "false"),
            ("CORELLA_HOST", ""),
            ("CORELLA_NO_SUCH_OPTION", "1"),
            ("OTHER_SEED", "1"),
        ];
        let arguments = from_environment(&variables, "corella serve --threads 2").unwrap();
        let mut words: Vec<_> = arguments.words[2..].to_vec();
        words.sort();
        let mut expected = [
            "--port=9001",
            "--model=models/x",
            "--served-model-name=a",
            "--served-model-name=b",
            "--pin-prefix=one, two",
            "--pin-threads",
            "--threads",
            "2",
        ];
        expected.sort();
        assert_eq!(words, expected);
    }

    #[test]
    fn what_is_typed_comes_before_variables_and_these_before_the_file() {
        let variables = [
            ("CORELLA_PORT", "2"),
            ("CORELLA_MODEL", "y"),
            ("CORELLA_SEED", "5"),
        ];
        let arguments = from_environment(&variables, "corella serve x --port 1").unwrap();
        assert_eq!(arguments.words[2..], ["--seed=5", "x", "--port", "1"]);

        let file = TestFile::new("behind", "port = 3\nseed = 3\nthreads = 3");
        let path = file.0.display().to_string();
        let variables = [("CORELLA_CONFIG", &*path), ("CORELLA_PORT", "2")];
        let arguments = from_environment(&variables, "corella serve --seed 1").unwrap();
        let words = &arguments.words[2..];
        assert_eq!(words, ["--port=2", "--threads=3", "--seed", "1"]);
    }

    /// Kubernetes describes a service by such variables.
    #[test]
    fn the_address_of_a_service_is_no_port() {
        let variables = [
            ("CORELLA_PORT", "tcp://10.0.171.239:8000"),
            ("CORELLA_SERVICE_HOST", "10.0.171.239"),
            ("CORELLA_PORT_8000_TCP", "tcp://10.0.171.239:8000"),
        ];
        let arguments = from_environment(&variables, "corella serve").unwrap();
        assert_eq!(arguments.words, ["corella", "serve"]);
    }

    #[test]
    fn a_wrong_value_is_refused_with_its_variable() {
        let arguments = from_environment(&[("CORELLA_PORT", "70000")], "corella serve").unwrap();
        let error = program()
            .try_get_matches_from(&arguments.words)
            .unwrap_err();
        let message = arguments.explain(&error).unwrap();
        assert!(
            message.contains("CORELLA_PORT: invalid value '70000'"),
            "{message}"
        );
        let error = from_environment(&[("CORELLA_PIN_THREADS", "maybe")], "corella serve");
        let error = error.unwrap_err();
        assert!(
            error.contains("CORELLA_PIN_THREADS must be true or false"),
            "{error}"
        );
    }
}
