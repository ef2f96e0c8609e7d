//! Translates flags and verbs of other servers for the parser if they have a meaning here, and refuses the others, all
//! at once.

use std::ffi::OsString;
use std::path::Path;

use clap::{Arg, Command};
use corella_hub::ModelName;

use crate::foreign::flag_table::{self, Flag, NoOp, OtherName, Treatment};
use crate::foreign::foreign_value::ValueForm;
use crate::foreign::foreign_verb::translate_verb;
use crate::foreign::unknown_flag::nearest_option;
use crate::input::option_value;

/// A command line in terms of Corella.
#[derive(Debug, Default)]
pub struct Translation {
    pub words: Vec<OsString>,
    /// One sentence for each flag without effect.
    pub warnings: Vec<String>,
    /// One sentence for each flag or verb that has another name here.
    pub notes: Vec<String>,
}

/// Translates a command line, which starts with the program's name. `program` must be built. The error has a sentence
/// for each refused flag.
pub fn translate(program: &Command, words: Vec<OsString>) -> Result<Translation, Vec<String>> {
    let mut notes = Vec::new();
    let words = translate_verb(words, &mut notes)?;
    let (command, begin) = subcommand(program, &words);
    let is_other_word = |word: &OsString| word.to_str().is_none_or(|word| !is_flag(word));
    if command.has_subcommands() && words.get(begin).is_some_and(is_other_word) {
        // Words after an unknown command belong to it.
        return Ok(Translation {
            words,
            warnings: Vec::new(),
            notes,
        });
    }
    let mut walk = Walk {
        command,
        name: words[..begin.min(words.len())]
            .iter()
            .skip(1)
            .map(|word| word.to_string_lossy().into_owned())
            .collect::<Vec<_>>()
            .join(" "),
        runs_model: command
            .get_arguments()
            .any(|arg| arg.get_id() == "max_model_len"),
        translated: words[..begin.min(words.len())].to_vec(),
        warnings: Vec::new(),
        notes,
        refusals: Vec::new(),
        num_positionals: 0,
        num_behind_key: 0,
        last_name: None,
        translated_values: Vec::new(),
    };
    walk.translate(&words[begin.min(words.len())..]);
    walk.free_model();
    walk.check_key();
    match walk.refusals.is_empty() {
        true => Ok(Translation {
            words: walk.translated,
            warnings: walk.warnings,
            notes: walk.notes,
        }),
        false => Err(walk.refusals),
    }
}

/// Returns the typed command, and the number of words up to it.
fn subcommand<'a>(program: &'a Command, words: &[OsString]) -> (&'a Command, usize) {
    let mut command = program;
    let mut begin = 1;
    while let Some(word) = words.get(begin).and_then(|word| word.to_str())
        && let Some(next) = command.find_subcommand(word)
    {
        command = next;
        begin += 1;
    }
    (command, begin)
}

const NAMES: &str = "--served-model-name";
const KEY: &str = "--api-key";

struct Walk<'a> {
    command: &'a Command,
    /// The command as typed, for errors.
    name: String,
    /// Whether the command runs a model, like other servers.
    runs_model: bool,
    translated: Vec<OsString>,
    warnings: Vec<String>,
    notes: Vec<String>,
    refusals: Vec<String>,
    num_positionals: usize,
    /// The number of words behind a key, which vLLM takes as further keys.
    num_behind_key: usize,
    /// The last of several names after one `--served-model-name`, which may be meant as the model.
    last_name: Option<OsString>,
    /// Flags with a translated value, and the resulting word.
    translated_values: Vec<(String, OsString)>,
}

impl<'a> Walk<'a> {
    fn translate(&mut self, words: &[OsString]) {
        let mut at = 0;
        while let Some(word) = words.get(at) {
            at += 1;
            match word.to_str() {
                Some("--") => {
                    self.num_positionals += words[at..].len();
                    self.translated.extend_from_slice(&words[at - 1..]);
                    return;
                }
                Some(text) if is_flag(text) => at += self.flag(text, &words[at..]),
                _ => {
                    self.num_positionals += 1;
                    self.translated.push(word.clone());
                }
            }
        }
    }

    /// Reads a flag, and returns the number of following words that belong to it.
    fn flag(&mut self, word: &str, behind: &[OsString]) -> usize {
        let (typed, inline) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        // vLLM reads `_` as `-`.
        let name = match typed.strip_prefix("--") {
            Some(long) => format!("--{}", long.replace('_', "-")),
            None => typed.to_owned(),
        };
        if let Some(num_taken) = self.default_number(&name, inline, behind) {
            return num_taken;
        }
        if let Some(arg) = self.option(&name) {
            let replaced = word.replacen(typed, &name, 1);
            self.translated.push(replaced.into());
            if !arg.get_action().takes_values() || inline.is_some() {
                return 0;
            }
            let takes_many = arg
                .get_num_args()
                .is_some_and(|range| range.max_values() > 1);
            let values = behind.iter().take_while(|word| is_value(word));
            let most = match takes_many || name == NAMES {
                true => usize::MAX,
                false => 1,
            };
            let values: Vec<_> = values.take(most).cloned().collect();
            let num_taken = values.len();
            if name == KEY {
                let further = behind[num_taken..].iter();
                self.num_behind_key = further.take_while(|word| is_value(word)).count();
            }
            match name == NAMES {
                true => self.push_names(values),
                false => self.translated.extend(values),
            }
            return num_taken;
        }
        match self.find(&name) {
            Some(flag) => self.foreign(typed, flag, inline, behind),
            None if self.is_short_with_more(&name) => {
                self.translated.push(word.into());
                0
            }
            // Ollama's letter for the version.
            None if self.name.is_empty() && word == "-v" => {
                self.translated.push("-V".into());
                0
            }
            None => {
                let value = inline.map(str::to_owned).or_else(|| {
                    let next = behind.first().filter(|next| is_value(next))?;
                    next.to_str().map(str::to_owned)
                });
                self.refuse_unknown(typed, value.as_deref());
                0
            }
        }
    }

    /// Leaves out -1, by which llama.cpp and vLLM mean "not set", if Corella's option has no such number. Returns the
    /// number of words after the flag that belong to it.
    fn default_number(
        &mut self,
        name: &str,
        inline: Option<&str>,
        behind: &[OsString],
    ) -> Option<usize> {
        let next = behind.first().and_then(|next| next.to_str());
        if inline.or(next) != Some("-1") || !self.runs_model {
            return None;
        }
        let other = flag_table::find(name).and_then(|flag| match &flag.treatment {
            Treatment::OtherName(other) => Some(other.option.as_str()),
            Treatment::Same { .. } => {
                let own = flag.names.iter().find(|name| self.option(name).is_some());
                own.map(String::as_str)
            }
            _ => None,
        });
        let own = match self.option(name) {
            Some(arg) => arg.get_long(),
            None => other.map(|option| option.trim_start_matches('-')),
        };
        let own = own.filter(|own| ["seed", "max-tokens", "max-num-seqs"].contains(own))?;
        self.warnings.push(format!(
            "{name} -1 is left out: the default of --{own} holds"
        ));
        self.forget(own);
        Some(usize::from(inline.is_none()))
    }

    /// Removes an option that was set before.
    fn forget(&mut self, own: &str) {
        let option = format!("--{own}");
        let mut has_its_value_behind = false;
        self.translated.retain(|word| {
            if std::mem::take(&mut has_its_value_behind) {
                return false;
            }
            let text = word.to_string_lossy();
            let (name, value) = match text.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (&*text, None),
            };
            let is_it = name == option;
            has_its_value_behind = is_it && value.is_none();
            !is_it
        });
    }

    /// Adds the names after a `--served-model-name`, which is added already. vLLM accepts several names there, and
    /// Corella needs the option again before each further name.
    fn push_names(&mut self, names: Vec<OsString>) {
        for (index, name) in names.into_iter().enumerate() {
            if index > 0 {
                self.last_name = Some(name.clone());
                self.translated.push(NAMES.into());
            }
            self.translated.push(name);
        }
    }

    /// Makes the last of several names the model, if it can be a model and no other word is the model.
    fn free_model(&mut self) {
        let mut positionals = self.command.get_positionals();
        let Some(before_model) = positionals.position(|arg| arg.get_id() == "model") else {
            return;
        };
        let has_model = self.num_positionals > before_model || self.has_model_option();
        let Some(name) = self.last_name.take().filter(|_| !has_model) else {
            return;
        };
        if !may_be_model(&name) {
            let name = name.display();
            self.note(format!(
                "{name} is one more {NAMES}; a model stands before this option"
            ));
            return;
        }
        let is_last = |pair: &[OsString]| pair[0] == NAMES && pair[1] == name;
        if let Some(at) = self.translated.windows(2).rposition(is_last) {
            self.translated.remove(at);
        }
    }

    fn has_model_option(&self) -> bool {
        self.translated.iter().any(|word| {
            let text = word.to_string_lossy();
            text.starts_with("-m") || text.split('=').next() == Some("--model")
        })
    }

    /// Refuses several keys behind one `--api-key`. One further word may be the model; further models stand elsewhere.
    fn check_key(&mut self) {
        if self.option("--api-keys").is_none() {
            return;
        }
        let num_words = self.num_positionals + usize::from(self.has_model_option());
        if self.num_behind_key > 0 && num_words > 1 {
            let reason = "--api-key takes one key; --api-keys FILE takes a file of several";
            self.refusals.push(reason.to_owned());
        }
    }

    /// Reads a flag of another server, and returns the number of following words that belong to it.
    // Long: one arm for each treatment of a flag.
    fn foreign(
        &mut self,
        typed: &str,
        flag: &Flag,
        inline: Option<&str>,
        behind: &[OsString],
    ) -> usize {
        let mut next = behind
            .first()
            .filter(|next| flag.takes_value && is_value(next));
        if let Treatment::NoOp(NoOp {
            may_be_bare: true,
            values: Some(values),
            ..
        }) = &flag.treatment
        {
            next = next.filter(|next| values.iter().any(|value| **next == **value));
        }
        let next = next.filter(|_| inline.is_none());
        let value = inline.map(OsString::from).or_else(|| next.cloned());
        let mut num_taken = usize::from(next.is_some());
        let refusal = |reason: String| format!("there is no option {typed}: {reason}");
        match &flag.treatment {
            Treatment::Same { .. } => {
                // The user typed another name of the flag.
                let own = flag
                    .names
                    .iter()
                    .find(|name| self.option(name).is_some())
                    .cloned();
                match own {
                    Some(own) => self.push(&own, value),
                    None => {
                        let reason = match self.name.is_empty() {
                            true => "only commands such as `corella serve` have it".to_owned(),
                            false => format!("{} does not need it", self.shown()),
                        };
                        self.refusals.push(refusal(reason));
                    }
                }
            }
            Treatment::OtherName(other) => {
                let has_option = self.option(&other.option).is_some();
                let text = value.as_ref().and_then(|value| value.to_str());
                let translated = text.and_then(|text| other.values.get_key_value(text));
                if let Some(form) = other.form.filter(|_| has_option) {
                    let value = value.map(|value| value.to_string_lossy().into_owned());
                    self.take_form(form, other, typed, &value.unwrap_or_default());
                } else if let Some((theirs, own)) = translated.filter(|_| has_option) {
                    self.note(format!("{typed} {theirs} is {} {own}", other.option));
                    let word = OsString::from(format!("{}={own}", other.option));
                    self.push_translated(typed, &flag.names[0], theirs, word);
                } else if has_option && other.is_taken {
                    self.note(format!("{typed} is {}", other.option));
                    self.push(&other.option, value);
                } else if !has_option
                    && other.is_taken
                    && other.elsewhere.is_none()
                    && !self.serves()
                {
                    // A flag that makes a server faster or smaller changes no answer of another command.
                    self.warnings.push(format!(
                        "{typed} has no effect: it is {}, which {} does not have",
                        other.option,
                        self.shown()
                    ));
                } else {
                    let option = &other.option;
                    let reason = match (has_option, &other.elsewhere) {
                        (true, _) => format!("use {option}"),
                        (false, Some(elsewhere)) => with_value(elsewhere, other, value.as_ref()),
                        (false, None) => {
                            format!("it is {option}, which {} does not have", self.shown())
                        }
                    };
                    self.refusals.push(refusal(reason));
                }
            }
            Treatment::NoOp(no_op) => {
                let text = value
                    .as_ref()
                    .map(|value| value.to_string_lossy().into_owned());
                match text.filter(|text| !no_op.allows(text)) {
                    Some(text) => self
                        .refusals
                        .push(format!("{typed} {text}: {}", no_op.otherwise)),
                    None if no_op.is_done_anyway() => {}
                    None => self
                        .warnings
                        .push(format!("{typed} has no effect: {}", no_op.why)),
                }
                // Some flags of vLLM have lists of numbers.
                let is_number = |word: &&OsString| word.to_string_lossy().parse::<f64>().is_ok();
                let rest = behind[num_taken..].iter();
                num_taken += match flag.takes_value {
                    true => rest.take_while(is_number).count(),
                    false => 0,
                };
            }
            Treatment::Refused(why) if *why == format!("use `corella {}`", self.name) => {
                let what = format!("it is what `corella {}` does", self.name);
                self.warnings.push(format!("{typed} has no effect: {what}"));
            }
            Treatment::Refused(why) => self.refusals.push(refusal(why.clone())),
        }
        num_taken
    }

    /// Adds the option's word for a flag's value that has another name in Corella. llama-server has separate flags for
    /// the types of keys and of values. Corella has one option for both, so their values must agree.
    fn push_translated(&mut self, typed: &str, flag: &str, theirs: &str, word: OsString) {
        let option = |word: &OsString| {
            let text = word.to_string_lossy();
            text.split('=').next().unwrap_or_default().to_owned()
        };
        let differs = |(other, set): &&(String, OsString)| {
            other != flag && *set != word && option(set) == option(&word)
        };
        // As elsewhere, the last of several values of one flag counts.
        self.translated_values.retain(|(other, _)| other != flag);
        if let Some((other, _)) = self.translated_values.iter().find(differs) {
            self.refusals.push(format!(
                "{typed} {theirs}: it is {} as {other} is, which has another value",
                option(&word)
            ));
        }
        self.translated_values.push((flag.to_owned(), word.clone()));
        self.translated.push(word);
    }

    /// Converts a flag's value whose form differs from the option's, and adds the resulting options.
    fn take_form(&mut self, form: ValueForm, other: &OtherName, typed: &str, value: &str) {
        let member = typed.split_once('.').map(|(_, member)| member);
        match form.options(&other.option, member, value) {
            Ok(own) => {
                match own.words.is_empty() {
                    true => self
                        .warnings
                        .push(format!("{typed} has no effect: it names nothing")),
                    false => self.note(format!("{typed} is {}", own.words.join(" "))),
                }
                if !own.ignored.is_empty() {
                    let ignored = own.ignored.join(", ");
                    self.warnings
                        .push(format!("{ignored} of {typed} has no effect"));
                }
                self.translated
                    .extend(own.words.into_iter().map(OsString::from));
            }
            Err(reason) => self.refusals.push(format!("{typed} {value}: {reason}")),
        }
    }

    /// Adds a note, unless the same note is there.
    fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Returns the flag of this name, from the programs that the command replaces.
    fn find(&self, name: &str) -> Option<&'static Flag> {
        match self.name == "bench serve" {
            true => flag_table::find_of_benchmark(name),
            false => flag_table::find(name).filter(|_| self.runs_model),
        }
    }

    /// Returns whether the command may serve requests of clients: it is `serve`, or a model that a program loads by
    /// keyword.
    fn serves(&self) -> bool {
        self.name == "serve" || self.name.is_empty()
    }

    /// Returns the command for messages. Without a name, it is the class of the Python package.
    fn shown(&self) -> String {
        match self.name.is_empty() {
            true => "`LLM`".to_owned(),
            false => format!("`corella {}`", self.name),
        }
    }

    fn push(&mut self, option: &str, value: Option<OsString>) {
        let mut word = OsString::from(option);
        if let Some(value) = value {
            word.push("=");
            word.push(value);
        }
        self.translated.push(word);
    }

    /// Returns the command's own option with this spelling, including dashes.
    fn option(&self, name: &str) -> Option<&'a Arg> {
        let command = self.command;
        match name.strip_prefix("--") {
            Some(long) => option_value::find(command, long),
            None => {
                let mut letters = name.chars().skip(1);
                let letter = letters.next().filter(|_| letters.next().is_none())?;
                command
                    .get_arguments()
                    .find(|arg| arg.get_short() == Some(letter))
            }
        }
    }

    /// Returns whether a word is a short option joined with its value, or several short switches.
    fn is_short_with_more(&self, name: &str) -> bool {
        if name.starts_with("--") {
            return false;
        }
        for letter in name.chars().skip(1) {
            match self.option(&format!("-{letter}")) {
                None => return false,
                Some(arg) if arg.get_action().takes_values() => return true,
                Some(_) => {}
            }
        }
        true
    }

    fn refuse_unknown(&mut self, typed: &str, value: Option<&str>) {
        if self.name.is_empty() {
            let reason = format!(
                "{typed} stands before a command: write `corella serve`, `corella chat` or `corella generate` first; \
                 `corella --help` names all"
            );
            // One sentence is enough for all further words.
            if self.refusals.is_empty() {
                self.refusals.push(reason);
            }
            return;
        }
        let near = nearest_option(self.command, typed, value);
        let meant = near.map_or_else(String::new, |near| format!("did you mean --{near}? "));
        let name = &self.name;
        self.refusals.push(format!(
            "there is no option {typed}; {meant}`corella {name} --help` names all"
        ));
    }
}

/// Whether a word after names may be a path, or a model of the hub.
fn may_be_model(word: &OsString) -> bool {
    let text = word.to_string_lossy();
    text.contains('/')
        || text.ends_with(".gguf")
        || ModelName::has_form(&text)
        || Path::new(word).exists()
}

/// Returns advice with the typed value instead of the table's example.
fn with_value(advice: &str, other: &OtherName, typed: Option<&OsString>) -> String {
    match (&other.example, typed.and_then(|typed| typed.to_str())) {
        (Some(example), Some(typed)) => advice.replace(example.as_str(), typed),
        _ => advice.to_owned(),
    }
}

fn is_flag(word: &str) -> bool {
    let mut letters = word.chars();
    letters.next() == Some('-')
        && letters
            .next()
            .is_some_and(|next| next == '-' || next.is_ascii_alphabetic())
}

/// Returns whether a word after a flag is its value. Numbers may be negative.
fn is_value(word: &OsString) -> bool {
    let text = word.to_string_lossy();
    !text.starts_with('-') || text.parse::<f64>().is_ok() || text == "-"
}

#[cfg(test)]
mod tests;
