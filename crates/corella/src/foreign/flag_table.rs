//! The tables of other servers' flags and their meaning in Corella. The tables lie in `flags` and are part of the
//! program.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Number, Value};
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
    /// The server's name in the published lists, if it has one.
    pub key: Option<&'static str>,
    table: &'static str,
}

/// A flag of another server.
#[derive(Clone, Debug)]
pub struct Flag {
    /// All names of the flag, with their dashes. The table has the first name.
    pub names: Vec<String>,
    /// Whether a value follows the flag.
    pub takes_value: bool,
    pub treatment: Treatment,
}

/// The treatment of a flag.
#[derive(Clone, Debug, PartialEq)]
pub enum Treatment {
    /// The flag is also an option of Corella. The value is an example for the option.
    Same { example: String },
    /// The flag is an option of Corella under another name.
    OtherName(OtherName),
    /// The flag changes nothing.
    NoOp(NoOp),
    /// Leaving the flag out would make a difference, which the text explains.
    Refused(String),
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct OtherName {
    /// The option, with its dashes.
    pub option: String,
    /// A value that the flag and the option accept.
    #[serde(rename = "value")]
    pub example: Option<String>,
    /// Whether the option accepts the flag's values, so that the flag is translated instead of refused with advice.
    #[serde(rename = "taken", default = "is_usually_taken")]
    pub is_taken: bool,
    /// The form of all values, if it differs from the option's.
    pub form: Option<ValueForm>,
    /// Values of the flag that have another form, each with the option's value.
    #[serde(default)]
    pub values: BTreeMap<String, String>,
    /// The treatment by a command that lacks the option.
    pub elsewhere: Option<String>,
}

fn is_usually_taken() -> bool {
    true
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct NoOp {
    #[serde(alias = "no_op")]
    pub why: String,
    /// The only values that change nothing, if other values change something.
    pub values: Option<Vec<String>>,
    /// The largest number that changes nothing.
    pub most: Option<f64>,
    /// The member of a value in JSON that must not be true.
    pub unless: Option<String>,
    /// Why other values are refused.
    #[serde(default)]
    pub otherwise: String,
    /// Whether the flag may lack its value.
    #[serde(rename = "bare", default)]
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
            ..Self::default()
        }
    }

    pub fn allows(&self, value: &str) -> bool {
        let is_listed = |values: &Vec<String>| values.iter().any(|known| known == value);
        let is_small = |most: f64| value.parse::<f64>().is_ok_and(|number| number <= most);
        let is_off = |member: &String| {
            let object: Option<Value> = serde_json::from_str(value).ok();
            object.is_none_or(|object| object[member.as_str()] != true)
        };
        self.values.as_ref().is_none_or(is_listed)
            && self.most.is_none_or(is_small)
            && self.unless.as_ref().is_none_or(is_off)
    }

    /// Whether an allowed value asks for what Corella does anyway, so that no warning is needed.
    pub fn is_done_anyway(&self) -> bool {
        self.values.is_some() && !self.may_be_bare
    }
}

impl Engine {
    /// Returns all flags, in the order of their names.
    pub fn flags(&self) -> Vec<Flag> {
        let table: Table = parse(self.table);
        let mut treatments = table.treatments();
        let mut flags = Vec::new();
        for published in self
            .published()
            .map_or(&[][..], |server| server.flags.as_slice())
        {
            let mut add = |names: &[String], default: Option<Treatment>| {
                let listed = { names.iter() }.find_map(|name| treatments.remove_entry(name));
                let (first, treatment) =
                    listed.or_else(|| Some((names.first()?.clone(), default?)))?;
                let others = names.iter().filter(|name| **name != first).cloned();
                flags.push(Flag {
                    names: [first.clone()].into_iter().chain(others).collect(),
                    takes_value: published.takes_value,
                    treatment: treatment.clone(),
                });
                Some(treatment)
            };
            let treatment = add(&published.names, None);
            let why = match &treatment {
                Some(Treatment::NoOp(no_op)) => &no_op.why,
                _ => OFF,
            };
            add(&published.negations, Some(Treatment::NoOp(NoOp::of(why))));
        }
        flags.extend(table.unlisted.into_iter().map(Flag::from));
        flags
    }

    /// Returns the published lists of the server.
    pub fn published(&self) -> Option<&'static Server> {
        published().get(self.key?)
    }
}

/// Returns the flag with a name, if another server has one. If several servers have such a flag, returns the one that
/// is accepted most readily.
pub fn find(name: &str) -> Option<&'static Flag> {
    static FLAGS: LazyLock<Vec<Flag>> =
        LazyLock::new(|| ENGINES.iter().flat_map(Engine::flags).collect());
    find_among(&FLAGS, name)
}

/// Returns the flag of vLLM's load generator with a name.
pub fn find_of_benchmark(name: &str) -> Option<&'static Flag> {
    static FLAGS: LazyLock<Vec<Flag>> = LazyLock::new(|| BENCHMARK.flags());
    find_among(&FLAGS, name)
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

/// Returns the verbs of Ollama.
pub fn verbs() -> Vec<(String, Verb)> {
    parse::<Table>(OLLAMA).verbs()
}

/// Returns verbs of programs without a published list, and their counterparts.
pub fn unlisted_verbs() -> Vec<(String, Verb)> {
    parse::<Table>(OTHERS).verbs()
}

/// A variable of another server, which Corella does not read.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Variable {
    /// The option with the same effect.
    pub option: Option<String>,
    /// A further explanation.
    #[serde(default)]
    pub why: String,
}

/// The variables of Ollama.
pub fn ollama_variables() -> BTreeMap<String, Variable> {
    parse::<Table>(OLLAMA).variables
}

/// The variables of vLLM that are often set.
pub fn vllm_variables() -> BTreeMap<String, Variable> {
    parse::<Table>(ENGINES[0].table).variables
}

/// The lists of a server, from its own sources.
#[derive(Debug, Deserialize)]
pub struct Server {
    #[cfg(test)]
    pub version: String,
    #[serde(default)]
    flags: Vec<PublishedFlag>,
    #[cfg(test)]
    #[serde(default)]
    verbs: Vec<Vec<String>>,
    #[cfg(test)]
    #[serde(default)]
    variables: Vec<String>,
    #[cfg(test)]
    #[serde(default)]
    pub endpoints: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct PublishedFlag {
    names: Vec<String>,
    negations: Vec<String>,
    takes_value: bool,
}

pub fn published() -> &'static HashMap<String, Server> {
    static LISTS: LazyLock<HashMap<String, Server>> =
        LazyLock::new(|| serde_json::from_str(PUBLISHED).expect("the lists are JSON"));
    &LISTS
}

/// A file of `flags`, by flag, verb or variable.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Table {
    same: BTreeMap<String, String>,
    other_name: BTreeMap<String, OtherName>,
    no_op: Vec<NoOpGroup>,
    refused: Vec<RefusedGroup>,
    unlisted: Vec<Unlisted>,
    same_verbs: BTreeMap<String, String>,
    other_verbs: BTreeMap<String, OtherVerb>,
    refused_verbs: BTreeMap<String, String>,
    variables: BTreeMap<String, Variable>,
}

#[derive(Clone, Deserialize)]
struct NoOpGroup {
    flags: Vec<String>,
    #[serde(flatten)]
    no_op: NoOp,
}

#[derive(Clone, Deserialize)]
struct RefusedGroup {
    flags: Vec<String>,
    why: String,
}

/// A flag that the published lists lack, for example from an earlier version.
#[derive(Clone, Deserialize)]
struct Unlisted {
    names: Vec<String>,
    #[serde(default)]
    takes_value: bool,
    #[serde(flatten)]
    treatment: UnlistedTreatment,
}

#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum UnlistedTreatment {
    OtherName(OtherName),
    NoOp(NoOp),
    Refused { refused: String },
}

#[derive(Clone, Deserialize)]
struct OtherVerb {
    command: String,
    why: String,
}

impl Table {
    /// Returns the treatments of published flags, by their names.
    fn treatments(&self) -> HashMap<String, Treatment> {
        let mut all = HashMap::new();
        for (name, example) in self.same.clone() {
            all.insert(name, Treatment::Same { example });
        }
        for (name, other) in self.other_name.clone() {
            all.insert(name, Treatment::OtherName(other));
        }
        for NoOpGroup { flags, no_op } in self.no_op.clone() {
            let no_op = Treatment::NoOp(no_op);
            all.extend(flags.into_iter().map(|name| (name, no_op.clone())));
        }
        for RefusedGroup { flags, why } in self.refused.clone() {
            let refused = Treatment::Refused(why);
            all.extend(flags.into_iter().map(|name| (name, refused.clone())));
        }
        all
    }

    fn verbs(self) -> Vec<(String, Verb)> {
        let same = self.same_verbs.into_iter();
        let same = same.map(|(name, why)| (name, Verb::Same(why)));
        let others = self.other_verbs.into_iter();
        let others =
            others.map(|(name, OtherVerb { command, why })| (name, Verb::Command { command, why }));
        let refused = self.refused_verbs.into_iter();
        let refused = refused.map(|(name, why)| (name, Verb::Refused(why)));
        same.chain(others).chain(refused).collect()
    }
}

impl From<Unlisted> for Flag {
    fn from(unlisted: Unlisted) -> Self {
        Self {
            names: unlisted.names,
            takes_value: unlisted.takes_value,
            treatment: match unlisted.treatment {
                UnlistedTreatment::OtherName(other) => Treatment::OtherName(other),
                UnlistedTreatment::NoOp(no_op) => Treatment::NoOp(no_op),
                UnlistedTreatment::Refused { refused } => Treatment::Refused(refused),
            },
        }
    }
}

/// Parses a table of the program. Tests parse all of them, so this cannot fail.
pub fn parse<T: DeserializeOwned>(text: &str) -> T {
    let table = DeTable::parse(text).expect("a table of the program is TOML");
    let table = json(&DeValue::Table(table.into_inner()));
    serde_json::from_value(table).expect("a table of the program has the right form")
}

/// Converts a value of TOML to JSON. A date or another value without a form in JSON becomes null.
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
        DeValue::Integer(number) => i128::from_str_radix(number.as_str(), number.radix())
            .ok()
            .and_then(Number::from_i128)
            .map_or(Value::Null, Value::Number),
        DeValue::Float(number) => number
            .as_str()
            .parse::<f64>()
            .map_or(Value::Null, Value::from),
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

    /// Asserts that the real parser accepts the translated words. The words may lack another option that the parser
    /// requires beside them.
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

    /// Each published flag is in its server's table once, and the table has no other names.
    #[test]
    fn the_tables_have_every_flag() {
        for engine in &ENGINES {
            let Some(key) = engine.key else { continue };
            let table: Table = parse(engine.table);
            let mut rows: HashSet<String> = table.treatments().into_keys().collect();
            let published = &published()[key].flags;
            assert!(published.len() > 200, "{}", key);
            for flag in published {
                let names = &flag.names;
                let num_rows = names.iter().filter(|name| rows.remove(*name)).count();
                assert_eq!(num_rows, 1, "{names:?}");
                for name in &flag.negations {
                    rows.remove(name);
                }
            }
            assert_eq!(rows, HashSet::new(), "{} has no such flags", key);
        }
        let published = &published()["ollama"];
        let known: HashSet<_> = verbs().into_iter().map(|(name, _)| name).collect();
        assert_eq!(known, published.verbs.iter().flatten().cloned().collect());
        let known: HashSet<_> = ollama_variables().into_keys().collect();
        assert_eq!(known, published.variables.iter().cloned().collect());
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
        // Two servers give some names different meanings. Corella takes one of the meanings, and these are the names.
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
                        for theirs in other.values.keys() {
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
        for (name, Variable { option, why }) in variables {
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
