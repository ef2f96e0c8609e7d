//! The tables of other servers' flags and their meaning in Corella. They lie in `flags` and are part of the program.

use std::collections::HashMap;
use std::sync::OnceLock;

use serde_json::Value;
use toml::de::{DeTable, DeValue};

use crate::foreign::foreign_value::ValueForm;

/// Names and kinds of the flags, from their own sources.
const PUBLISHED: &str = include_str!("../../flags/published.json");

/// The servers whose flags are known, with their tables.
pub const ENGINES: [Engine; 3] = [
    Engine {
        key: Some("vllm"),
        table: include_str!("../../flags/vllm.toml"),
    },
    Engine {
        key: Some("llama_server"),
        table: include_str!("../../flags/llama_server.toml"),
    },
    Engine {
        key: None,
        table: OTHERS,
    },
];

/// The flags of vLLM's load generator, which `corella bench serve` takes.
pub const BENCHMARK: Engine = Engine {
    key: None,
    table: include_str!("../../flags/vllm_bench.toml"),
};

/// Why `--no-x` has no effect if `--x` is refused.
pub const OFF: &str = "it is off unless it is switched on";

const OTHERS: &str = include_str!("../../flags/others.toml");

const OLLAMA: &str = include_str!("../../flags/ollama.toml");

pub struct Engine {
    /// Its name in the published lists, if it has one.
    pub key: Option<&'static str>,
    table: &'static str,
}

/// A flag of another server.
#[derive(Clone, Debug)]
pub struct Flag {
    /// All its names, with their dashes. The table has the first one.
    pub names: Vec<String>,
    /// Whether a value follows it.
    pub takes_value: bool,
    pub treatment: Treatment,
}

/// The treatment of a flag.
#[derive(Clone, Debug, PartialEq)]
pub enum Treatment {
    /// It is also an option of Corella. The value is an example for the option.
    Same { example: String },
    /// It is an option of Corella under another name.
    OtherName(OtherName),
    /// It changes nothing.
    NoOp(NoOp),
    /// Leaving it out would make a difference, which the text explains.
    Refused(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct OtherName {
    /// With its dashes.
    pub option: String,
    /// A value that both accept.
    pub example: Option<String>,
    /// Whether values have the same form, so that the flag can replace the option.
    pub is_taken: bool,
    /// The form of all values, if it differs.
    pub form: Option<ValueForm>,
    /// Values of a different form, with Corella's.
    pub values: Vec<(String, String)>,
    /// The treatment by a command that lacks the option.
    pub elsewhere: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NoOp {
    pub why: String,
    /// The only values that change nothing, if not all do.
    pub values: Option<Vec<String>>,
    /// The largest number that changes nothing.
    pub most: Option<f64>,
    /// Why other values are refused.
    pub otherwise: String,
    /// Whether the flag may lack its value.
    pub may_be_bare: bool,
}

impl Treatment {
    fn strictness(&self) -> u8 {
        match self {
            Self::Same { .. } => 0,
            Self::OtherName(_) => 1,
            Self::NoOp(no_op) if no_op.otherwise.is_empty() => 2,
            Self::NoOp(_) => 3,
            Self::Refused(_) => 4,
        }
    }
}

impl NoOp {
    fn of(why: &str) -> Self {
        Self {
            why: why.to_owned(),
            values: None,
            most: None,
            otherwise: String::new(),
            may_be_bare: false,
        }
    }

    pub fn allows(&self, value: &str) -> bool {
        let is_listed = |values: &Vec<String>| values.iter().any(|known| known == value);
        let is_small = |most: f64| value.parse::<f64>().is_ok_and(|number| number <= most);
        self.values.as_ref().is_none_or(is_listed) && self.most.is_none_or(is_small)
    }

    /// Whether an allowed value asks for what Corella does, so that no warning is needed.
    pub fn is_done_anyway(&self) -> bool {
        self.values.is_some() && !self.may_be_bare
    }
}

impl Engine {
    /// Returns all flags, in the order of their names.
    pub fn flags(&self) -> Vec<Flag> {
        let table = toml_value(self.table);
        let mut treatments = treatments(&table);
        let mut flags = Vec::new();
        let published = self.key.map(|key| published()[key]["flags"].clone());
        for flag in published
            .as_ref()
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let takes_value = flag["takes_value"] == true;
            let mut add = |names: Vec<String>, default: Option<Treatment>| {
                let key = names.iter().find(|name| treatments.contains_key(*name));
                let treatment = match key.cloned() {
                    Some(key) => treatments.remove_entry(&key),
                    None => default
                        .zip(names.first().cloned())
                        .map(|(one, name)| (name, one)),
                };
                let (key, treatment) = treatment?;
                let others = names.into_iter().filter(|name| *name != key);
                let names: Vec<String> = [key.clone()].into_iter().chain(others).collect();
                flags.push(Flag {
                    names,
                    takes_value,
                    treatment: treatment.clone(),
                });
                Some(treatment)
            };
            let treatment = add(texts(&flag["names"]), None);
            let negations = texts(&flag["negations"]);
            if !negations.is_empty() {
                let default = match treatment {
                    Some(Treatment::NoOp(no_op)) => NoOp::of(&no_op.why),
                    _ => NoOp::of(OFF),
                };
                add(negations, Some(Treatment::NoOp(default)));
            }
        }
        flags.extend(unlisted(&table));
        flags
    }

    /// Returns the version of these flags.
    #[cfg(test)]
    pub fn version(&self) -> Option<String> {
        let version = published()[self.key?]["version"].as_str()?;
        Some(version.to_owned())
    }
}

/// Returns the flag with a name, if another server has one. If several have, the most readily accepted one is chosen.
pub fn find(name: &str) -> Option<&'static Flag> {
    static FLAGS: OnceLock<Vec<Flag>> = OnceLock::new();
    find_among(
        FLAGS.get_or_init(|| ENGINES.iter().flat_map(Engine::flags).collect()),
        name,
    )
}

/// Returns the flag of vLLM's load generator with a name.
pub fn find_of_benchmark(name: &str) -> Option<&'static Flag> {
    static FLAGS: OnceLock<Vec<Flag>> = OnceLock::new();
    find_among(FLAGS.get_or_init(|| BENCHMARK.flags()), name)
}

fn find_among<'a>(flags: &'a [Flag], name: &str) -> Option<&'a Flag> {
    // `--compilation-config.level 3` sets a field of the flag's value.
    let plain = match name.starts_with("--") {
        true => name.split('.').next().unwrap_or(name),
        false => name,
    };
    let named = |wanted: &str| {
        let found = flags
            .iter()
            .filter(|flag| flag.names.iter().any(|name| name == wanted));
        found.min_by_key(|flag| flag.treatment.strictness())
    };
    named(name).or_else(|| named(plain))
}

/// A verb of Ollama: a command of Corella with the same effect, or the reason why there is none.
#[derive(Clone, Debug, PartialEq)]
pub enum Verb {
    Same(String),
    Command { command: String, why: String },
    Refused(String),
}

pub fn verbs() -> Vec<(String, Verb)> {
    let table = toml_value(OLLAMA);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut verbs = Vec::new();
    for (name, why) in entries(&table["same_verbs"]) {
        verbs.push((name, Verb::Same(text(&why))));
    }
    for (name, entry) in entries(&table["other_verbs"]) {
        let command = text(&entry["command"]);
        let why = text(&entry["why"]);
        verbs.push((name, Verb::Command { command, why }));
    }
    for (name, why) in entries(&table["refused_verbs"]) {
        verbs.push((name, Verb::Refused(text(&why))));
    }
    verbs
}

/// Returns verbs of programs without a published list, and their counterparts.
pub fn unlisted_verbs() -> Vec<(String, Verb)> {
    let refused = entries(&toml_value(OTHERS)["refused_verbs"]).into_iter();
    refused
        .map(|(name, why)| {
            (
                name,
                Verb::Refused(why.as_str().unwrap_or_default().to_owned()),
            )
        })
        .collect()
}

/// A variable of another server, which Corella does not read.
#[derive(Clone, Debug, PartialEq)]
pub struct Variable {
    pub name: String,
    /// The option with the same effect.
    pub option: Option<String>,
    /// A further word.
    pub why: String,
}

/// The variables of Ollama.
pub fn ollama_variables() -> Vec<Variable> {
    variables(&toml_value(OLLAMA))
}

/// The variables of vLLM that are often set.
pub fn vllm_variables() -> Vec<Variable> {
    variables(&toml_value(ENGINES[0].table))
}

fn variables(table: &Value) -> Vec<Variable> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let variables = entries(&table["variables"]).into_iter();
    variables
        .map(|(name, entry)| Variable {
            name,
            option: text(&entry["option"]),
            why: text(&entry["why"]).unwrap_or_default(),
        })
        .collect()
}

pub fn published() -> &'static Value {
    static LISTS: OnceLock<Value> = OnceLock::new();
    LISTS.get_or_init(|| serde_json::from_str(PUBLISHED).unwrap_or_default())
}

/// Returns the treatments of a table, by flag.
fn treatments(table: &Value) -> HashMap<String, Treatment> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut all = HashMap::new();
    for (name, example) in entries(&table["same"]) {
        let example = text(&example);
        all.insert(name, Treatment::Same { example });
    }
    for (name, entry) in entries(&table["other_name"]) {
        all.insert(name, Treatment::OtherName(other_name(&entry)));
    }
    for group in table["no_op"].as_array().into_iter().flatten() {
        let no_op = no_op(group, &text(&group["why"]));
        for name in texts(&group["flags"]) {
            all.insert(name, Treatment::NoOp(no_op.clone()));
        }
    }
    for group in table["refused"].as_array().into_iter().flatten() {
        for name in texts(&group["flags"]) {
            all.insert(name, Treatment::Refused(text(&group["why"])));
        }
    }
    all
}

fn no_op(entry: &Value, why: &str) -> NoOp {
    NoOp {
        values: entry["values"].is_array().then(|| texts(&entry["values"])),
        most: entry["most"].as_f64(),
        otherwise: entry["otherwise"].as_str().unwrap_or_default().to_owned(),
        may_be_bare: entry["bare"] == true,
        ..NoOp::of(why)
    }
}

fn other_name(entry: &Value) -> OtherName {
    let text = |name: &str| entry[name].as_str().map(str::to_owned);
    OtherName {
        option: text("option").unwrap_or_default(),
        example: text("value"),
        is_taken: entry["taken"] != false,
        form: entry["form"].as_str().and_then(ValueForm::named),
        values: { entries(&entry["values"]).into_iter() }
            .filter_map(|(theirs, own)| Some((theirs, own.as_str()?.to_owned())))
            .collect(),
        elsewhere: text("elsewhere"),
    }
}

/// Returns flags that the published lists lack, for example from earlier versions.
fn unlisted(table: &Value) -> Vec<Flag> {
    let entries = table["unlisted"].as_array().into_iter().flatten();
    entries
        .map(|entry| Flag {
            names: texts(&entry["names"]),
            takes_value: entry["takes_value"] == true,
            treatment: match (entry["no_op"].as_str(), entry["refused"].as_str()) {
                (Some(why), _) => Treatment::NoOp(no_op(entry, why)),
                (None, Some(why)) => Treatment::Refused(why.to_owned()),
                (None, None) => Treatment::OtherName(other_name(entry)),
            },
        })
        .collect()
}

pub fn entries(table: &Value) -> Vec<(String, Value)> {
    let entries = table.as_object().into_iter().flatten();
    let mut entries: Vec<_> = entries
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    entries.sort_by(|(a, _), (b, _)| a.cmp(b));
    entries
}

pub fn texts(list: &Value) -> Vec<String> {
    let texts = list.as_array().into_iter().flatten();
    texts
        .filter_map(|text| text.as_str().map(str::to_owned))
        .collect()
}

/// Parses a table of the program. A test parses all of them, so this cannot fail.
pub fn toml_value(text: &str) -> Value {
    let table = DeTable::parse(text).map(|table| table.into_inner());
    table.map_or(Value::Null, |table| json(&DeValue::Table(table)))
}

/// A value of TOML in JSON.
pub fn json(value: &DeValue) -> Value {
    match value {
        DeValue::Table(table) => {
            let entries = table.iter();
            let entries =
                entries.map(|(name, value)| (name.get_ref().to_string(), json(value.get_ref())));
            Value::Object(entries.collect())
        }
        DeValue::Array(values) => values.iter().map(|value| json(value.get_ref())).collect(),
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Boolean(switch) => Value::from(*switch),
        DeValue::Integer(number) => {
            Value::from(i64::from_str_radix(number.as_str(), number.radix()).unwrap_or(0))
        }
        DeValue::Float(number) => Value::from(number.as_str().parse::<f64>().unwrap_or(0.0)),
        DeValue::Datetime(_) => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::LazyLock;

    use clap::error::ErrorKind;
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::arguments::args::Cli;
    use crate::foreign::foreign_flag::{Translation, translate};
    use crate::input::option_value;

    /// `command` is the name of a command, or two with a space between them.
    fn translated(command: &str, words: &[String]) -> Result<Translation, Vec<String>> {
        static PROGRAM: LazyLock<clap::Command> = LazyLock::new(|| {
            let mut program = Cli::command();
            program.build();
            program
        });
        let command = ["corella"].into_iter().chain(command.split(' '));
        let words = command.map(str::to_owned).chain(words.iter().cloned());
        translate(&PROGRAM, words.map(Into::into).collect())
    }

    /// Asserts that the real parser accepts the translated words. A missing second option is not an error here.
    #[track_caller]
    fn assert_parsed(command: &str, words: &[String]) {
        let translation =
            translated(command, words).unwrap_or_else(|reasons| panic!("{words:?}: {reasons:?}"));
        if let Err(error) = Cli::try_parse_from(&translation.words) {
            let is_fine = matches!(
                error.kind(),
                ErrorKind::DisplayHelp
                    | ErrorKind::DisplayVersion
                    | ErrorKind::MissingRequiredArgument
            );
            assert!(is_fine, "{words:?}: {error}");
        }
    }

    fn has_option(command: &str, option: &str) -> bool {
        let program = Cli::command();
        let command = command.split(' ').fold(&program, |command, name| {
            command.find_subcommand(name).expect("it is a command")
        });
        option_value::find(command, option.trim_start_matches('-')).is_some()
    }

    /// Each published flag is in its table once, and the table has no unused names.
    #[test]
    fn the_tables_have_every_flag() {
        for engine in &ENGINES {
            let Some(key) = engine.key else { continue };
            let table = toml_value(engine.table);
            assert!(table.is_object(), "{} is not TOML", key);
            let mut rows: HashSet<String> = treatments(&table).into_keys().collect();
            let published = published()[key]["flags"]
                .as_array()
                .expect("there is a list");
            assert!(published.len() > 200, "{}", key);
            for flag in published {
                let names = texts(&flag["names"]);
                let num_rows = names.iter().filter(|name| rows.remove(*name)).count();
                assert_eq!(num_rows, 1, "{names:?}");
                for name in texts(&flag["negations"]) {
                    rows.remove(&name);
                }
            }
            assert_eq!(rows, HashSet::new(), "{} has no such flags", key);
        }
        let ollama = toml_value(OLLAMA);
        let published = &published()["ollama"];
        let known: HashSet<_> = verbs().into_iter().map(|(name, _)| name).collect();
        let verbs = published["verbs"].as_array().into_iter().flatten();
        assert_eq!(known, verbs.flat_map(texts).collect());
        let known: HashSet<_> = entries(&ollama["variables"])
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(known, texts(&published["variables"]).into_iter().collect());
    }

    #[test]
    fn every_row_is_what_the_parser_does() {
        let mut shadowed = Vec::new();
        for flag in ENGINES.iter().flat_map(Engine::flags) {
            for name in &flag.names {
                if find(name).is_some_and(|found| found.names != flag.names) {
                    shadowed.push(name.clone());
                    continue;
                }
                check_row("serve", name, &flag);
            }
        }
        for flag in BENCHMARK.flags() {
            for name in &flag.names {
                assert!(!has_option("bench serve", name), "{name} is an option");
                check_row("bench serve", name, &flag);
            }
        }
        // A name with different meanings for two servers has one meaning here.
        shadowed.sort();
        assert_eq!(shadowed, SHADOWED);
    }

    const SHADOWED: &[&str] = &[
        "--hf-token",
        "--model",
        "--seed",
        "--ubatch-size",
        "-n",
        "-r",
    ];

    #[track_caller]
    fn check_row(command: &str, name: &str, flag: &Flag) {
        let serve = |words: &[String]| translated(command, words);
        let with = |value: &str| match flag.takes_value {
            true => vec![name.to_owned(), value.to_owned()],
            false => vec![name.to_owned()],
        };
        match &flag.treatment {
            Treatment::Same { example } => assert_parsed(command, &with(example)),
            Treatment::OtherName(other) => {
                let commands = [command, "generate", "chat"];
                let is_there = commands
                    .iter()
                    .any(|command| has_option(command, &other.option));
                assert!(is_there, "{name}: no command has {}", other.option);
                match (other.is_taken, has_option(command, &other.option)) {
                    (true, true) => {
                        assert_parsed(command, &with(other.example.as_deref().unwrap_or("1")));
                    }
                    _ => {
                        for (theirs, _) in &other.values {
                            assert_parsed(command, &with(theirs));
                        }
                        let reasons = serve(&with("1")).unwrap_err();
                        assert_eq!(reasons.len(), 1, "{reasons:?}");
                        let advice = other.elsewhere.as_ref().unwrap_or(&other.option);
                        let advice = match &other.example {
                            Some(example) => advice.replace(example.as_str(), "1"),
                            None => advice.clone(),
                        };
                        assert!(reasons[0].contains(&advice), "{reasons:?}");
                    }
                }
            }
            Treatment::NoOp(no_op) => {
                assert!(!no_op.why.is_empty(), "{name}");
                let value = no_op
                    .values
                    .as_ref()
                    .map_or("1", |values| values[0].as_str());
                assert_parsed(command, &with(value));
                let warnings = serve(&with(value)).expect("it is taken").warnings;
                match no_op.is_done_anyway() {
                    true => assert!(warnings.is_empty(), "{warnings:?}"),
                    false => assert!(warnings[0].contains(&no_op.why), "{warnings:?}"),
                }
                if (no_op.values.is_some() || no_op.most.is_some()) && !no_op.may_be_bare {
                    let reasons = serve(&with("987654321")).unwrap_err();
                    assert!(reasons[0].contains(&no_op.otherwise), "{reasons:?}");
                    assert!(!no_op.otherwise.is_empty(), "{name}");
                }
            }
            Treatment::Refused(why) => {
                assert!(!why.is_empty(), "{name}");
                let reasons = serve(&with("x")).unwrap_err();
                assert_eq!(reasons, [format!("there is no option {name}: {why}")]);
            }
        }
    }

    /// Advice names options and commands that exist.
    #[test]
    fn advice_can_be_followed() {
        let program = Cli::command();
        let bench = program.find_subcommand("bench").expect("it is a command");
        let is_option = |word: &str| {
            let long = word.trim_start_matches('-');
            program
                .get_subcommands()
                .chain(bench.get_subcommands())
                .any(|command| option_value::find(command, long).is_some())
                || BENCHMARK
                    .flags()
                    .iter()
                    .any(|flag| flag.names.contains(&word.to_owned()))
        };
        for flag in ENGINES.iter().chain([&BENCHMARK]).flat_map(Engine::flags) {
            let texts = match flag.treatment {
                Treatment::Same { .. } => vec![],
                Treatment::OtherName(other) => other.elsewhere.into_iter().collect(),
                Treatment::NoOp(no_op) => vec![no_op.why, no_op.otherwise],
                Treatment::Refused(why) => vec![why],
            };
            for word in texts
                .iter()
                .flat_map(|text| text.split([' ', ',', ';', '`', '.', ':']))
            {
                if word.starts_with("--") {
                    assert!(is_option(word), "{word} of {:?}", flag.names);
                }
            }
        }
        let variables = ollama_variables().into_iter().chain(vllm_variables());
        for Variable { name, option, why } in variables {
            let is_there = |option: &String| has_option("serve", option);
            assert!(option.as_ref().is_none_or(is_there), "{name}");
            assert!(option.is_some() || !why.is_empty(), "{name}");
        }
        for (name, verb) in verbs() {
            if let Verb::Command { command, .. } = verb {
                assert!(program.find_subcommand(&command).is_some(), "{name}");
            }
        }
    }
}
