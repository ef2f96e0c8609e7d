//! Takes flags and verbs of other servers. Those with a meaning here are translated for the parser; the
//! others are refused, all at once.

use std::ffi::{OsStr, OsString};

use clap::error::ErrorKind;
use clap::{Arg, Command};

use crate::flag_table::{self, Flag, NoOp, OtherName, Treatment, Verb};
use crate::nearest_name::nearest_name;
use crate::option_value;

/// A command line in terms of Corella.
#[derive(Debug)]
pub struct Translation {
    pub words: Vec<OsString>,
    /// One sentence for each flag that was taken in another sense.
    pub warnings: Vec<String>,
}

/// Translates a command line, which starts with the program's name. `program` must be built. `Err` has a
/// sentence for each flag that cannot be taken.
pub fn translate(program: &Command, words: Vec<OsString>) -> Result<Translation, Vec<String>> {
    let mut warnings = Vec::new();
    let words = translate_verb(words, &mut warnings)?;
    let (command, begin) = subcommand(program, &words);
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
        warnings,
        refusals: Vec::new(),
    };
    walk.translate(&words[begin.min(words.len())..]);
    match walk.refusals.is_empty() {
        true => Ok(Translation {
            words: walk.translated,
            warnings: walk.warnings,
        }),
        false => Err(walk.refusals),
    }
}

/// The message for an unknown option. It explains the flag of another server, or names the nearest of
/// `known`, which have no dashes.
pub fn refusal<'a>(option: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    match flag_table::find(option).and_then(advice) {
        Some(advice) => format!("there is no option {option}: {advice}"),
        None => {
            let near = nearest_name(option.trim_start_matches('-'), known);
            let near = near.map_or_else(String::new, |near| format!("; did you mean --{near}?"));
            format!("there is no option {option}{near}")
        }
    }
}

/// Advice for a flag that is refused.
pub fn advice(flag: &Flag) -> Option<String> {
    match &flag.treatment {
        Treatment::Same { .. } => None,
        Treatment::OtherName(other) => Some(format!("use {}", other.option)),
        Treatment::NoOp(no_op) if no_op.otherwise.is_empty() => {
            Some(format!("leave it out: {}", no_op.why))
        }
        Treatment::NoOp(no_op) => Some(no_op.otherwise.clone()),
        Treatment::Refused(why) => Some(why.clone()),
    }
}

/// Replaces a verb of another server.
fn translate_verb(
    mut words: Vec<OsString>,
    warnings: &mut Vec<String>,
) -> Result<Vec<OsString>, Vec<String>> {
    let typed = words.get(1).and_then(|word| word.to_str());
    let Some(typed) = typed
        .filter(|word| !word.starts_with('-'))
        .map(str::to_owned)
    else {
        return Ok(words);
    };
    let mut verbs = flag_table::verbs()
        .into_iter()
        .chain(flag_table::unlisted_verbs());
    match verbs.find(|(name, _)| *name == typed) {
        None | Some((_, Verb::Same(_))) => Ok(words),
        Some((_, Verb::Refused(why))) => Err(vec![format!("there is no command `{typed}`: {why}")]),
        Some((_, Verb::Command { mut command, .. })) => {
            if typed == "run" && take_prompt(&mut words) {
                command = "generate".to_owned();
            }
            warnings.push(format!("`corella {typed}` is `corella {command}`"));
            words[1] = command.into();
            Ok(words)
        }
    }
}

/// `ollama run MODEL PROMPT` answers once, without measurements. The prompt may be several words, and what is piped in
/// is part of it.
fn take_prompt(words: &mut Vec<OsString>) -> bool {
    let behind = words.get(3..).unwrap_or_default();
    let num_words = { behind.iter() }
        .take_while(|word| word.to_str().is_some_and(|word| !word.starts_with('-')))
        .count();
    if num_words == 0 {
        return false;
    }
    let prompt = behind[..num_words].join(OsStr::new(" "));
    let mut option = OsString::from("--prompt=");
    option.push(prompt);
    let is_profiled = behind.iter().any(|word| word == "--profile");
    let limits = (!is_profiled).then(|| "--no-limits".into());
    let replacement = [option, "--with-input".into()].into_iter().chain(limits);
    words.splice(3..3 + num_words, replacement);
    true
}

/// The command that is typed, and the number of words until there.
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

struct Walk<'a> {
    command: &'a Command,
    /// The command as it was typed, for errors.
    name: String,
    /// Whether the command runs a model, as other servers do.
    runs_model: bool,
    translated: Vec<OsString>,
    warnings: Vec<String>,
    refusals: Vec<String>,
}

impl<'a> Walk<'a> {
    fn translate(&mut self, words: &[OsString]) {
        let mut at = 0;
        while let Some(word) = words.get(at) {
            at += 1;
            match word.to_str() {
                Some("--") => {
                    self.translated.extend_from_slice(&words[at - 1..]);
                    return;
                }
                Some(text) if is_flag(text) => at += self.flag(text, &words[at..]),
                _ => self.translated.push(word.clone()),
            }
        }
    }

    /// Takes a flag, and returns how many of the words behind it belong to it.
    fn flag(&mut self, word: &str, behind: &[OsString]) -> usize {
        let (typed, inline) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        // vLLM takes `_` for `-`.
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
            let takes_value = arg.get_action().takes_values();
            let mut num_taken = 0;
            if takes_value && inline.is_none() && behind.first().is_some_and(is_value) {
                self.translated.push(behind[0].clone());
                num_taken = 1;
            }
            if name == "--served-model-name" && inline.is_none() {
                num_taken += self.further_names(&behind[num_taken..]);
            }
            return num_taken;
        }
        match flag_table::find(&name).filter(|_| self.runs_model) {
            Some(flag) => self.foreign(typed, flag, inline, behind),
            None if self.is_short_with_more(&name) => {
                self.translated.push(word.into());
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

    /// Leaves out -1, with which llama.cpp and vLLM write that nothing is set, where Corella's option has no such
    /// number. Returns the number of words behind the flag that belong to it.
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
        Some(usize::from(inline.is_none()))
    }

    /// vLLM takes several names behind one `--served-model-name`. A word behind the first one may also be
    /// the model, so that it is a name only if the model was given before.
    fn further_names(&mut self, behind: &[OsString]) -> usize {
        let is_model = |word: &OsString| {
            let text = word.to_string_lossy();
            text == "-m" || text.split('=').next() == Some("--model")
        };
        let begins_with_model = self.translated.get(2).is_some_and(is_value);
        if !begins_with_model && !self.translated.iter().any(is_model) {
            return 0;
        }
        let names: Vec<_> = behind.iter().take_while(|word| is_value(word)).collect();
        for name in &names {
            self.translated.push("--served-model-name".into());
            self.translated.push((*name).clone());
        }
        names.len()
    }

    /// Takes a flag of another server, and returns how many of the words behind it belong to it.
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
                // It is typed by another of its names.
                let own = flag
                    .names
                    .iter()
                    .find(|name| self.option(name).is_some())
                    .cloned();
                match own {
                    Some(own) => self.push(&own, value),
                    None => {
                        let reason = format!("`corella {}` does not need it", self.name);
                        self.refusals.push(refusal(reason));
                    }
                }
            }
            Treatment::OtherName(other) => {
                let has_option = self.option(&other.option).is_some();
                let translated = { other.values.iter() }
                    .find(|(theirs, _)| value.as_ref().is_some_and(|value| *value == **theirs));
                if let Some((theirs, own)) = translated.filter(|_| has_option) {
                    self.warnings
                        .push(format!("{typed} {theirs} is {} {own}", other.option));
                    let word = OsString::from(format!("{}={own}", other.option));
                    // Keys and values have one type, which llama-server sets by two flags.
                    if !self.translated.contains(&word) {
                        self.translated.push(word);
                    }
                } else if has_option && other.is_taken {
                    self.warnings.push(format!("{typed} is {}", other.option));
                    self.push(&other.option, value);
                } else if !has_option
                    && other.is_taken
                    && other.elsewhere.is_none()
                    && !self.serves()
                {
                    // What makes a server faster or smaller changes no answer of another command.
                    self.warnings.push(format!(
                        "{typed} has no effect: it is {}, which `corella {}` does not have",
                        other.option, self.name
                    ));
                } else {
                    let option = &other.option;
                    let reason = match (has_option, &other.elsewhere) {
                        (true, _) => format!("use {option}"),
                        (false, Some(elsewhere)) => with_value(elsewhere, other, value.as_ref()),
                        (false, None) => {
                            format!(
                                "it is {option}, which `corella {}` does not have",
                                self.name
                            )
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
                    None => self
                        .warnings
                        .push(format!("{typed} has no effect: {}", no_op.why)),
                }
                // Some flags of vLLM take lists of numbers.
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

    fn serves(&self) -> bool {
        self.name == "serve"
    }

    fn push(&mut self, option: &str, value: Option<OsString>) {
        let mut word = OsString::from(option);
        if let Some(value) = value {
            word.push("=");
            word.push(value);
        }
        self.translated.push(word);
    }

    /// The command's own option that is written so, with dashes.
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

    /// Whether a word is a short option with its value behind it, or several short switches.
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
            let reason = match typed {
                "-v" => "there is no option -v; did you mean -V?".to_owned(),
                _ => format!(
                    "{typed} stands before a command: write `corella serve`, `corella chat` or `corella generate` \
                     first; `corella --help` names all"
                ),
            };
            // One sentence is enough for all that follow.
            if self.refusals.is_empty() {
                self.refusals.push(reason);
            }
            return;
        }
        let known = self
            .command
            .get_arguments()
            .filter(|arg| !arg.is_hide_set());
        let known = known.flat_map(|arg| {
            let aliases = arg.get_visible_aliases().unwrap_or_default();
            arg.get_long().into_iter().chain(aliases)
        });
        let near = typed
            .strip_prefix("--")
            .and_then(|long| nearest_name(long, known));
        let near = near.filter(|near| self.takes(near, value));
        let meant = near.map_or_else(String::new, |near| format!("did you mean --{near}? "));
        let name = &self.name;
        self.refusals.push(format!(
            "there is no option {typed}; {meant}`corella {name} --help` names all"
        ));
    }

    /// Whether an option takes the value that was written behind another name, or takes none. A suggestion
    /// must not be refused.
    fn takes(&self, long: &str, value: Option<&str>) -> bool {
        let Some(arg) = option_value::find(self.command, long) else {
            return false;
        };
        // Behind a switch, the word may as well be a positional argument.
        let Some(value) = value.filter(|_| arg.get_action().takes_values()) else {
            return true;
        };
        let command = self.command.clone().no_binary_name(true);
        let result = command.try_get_matches_from([format!("--{long}={value}")]);
        !result.is_err_and(|error| {
            matches!(
                error.kind(),
                ErrorKind::InvalidValue | ErrorKind::ValueValidation
            )
        })
    }
}

/// Advice with the value that was typed, in place of the table's example.
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

/// Whether a word behind a flag is its value. Numbers may be negative.
fn is_value(word: &OsString) -> bool {
    let text = word.to_string_lossy();
    !text.starts_with('-') || text.parse::<f64>().is_ok() || text == "-"
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    fn typed(line: &str) -> Result<Translation, Vec<String>> {
        let mut program = Cli::command();
        program.build();
        translate(&program, line.split_whitespace().map(Into::into).collect())
    }

    fn words(line: &str) -> String {
        let words = typed(line).unwrap().words;
        let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        words.join(" ")
    }

    #[test]
    fn flags_of_other_servers_become_options() {
        for (line, expected) in [
            // A flag with a line in the tables of two servers.
            (
                "corella serve meta/llama --trust-remote-code --tensor-parallel-size 1 --max_model_len 8k \
                 --enable-auto-tool-choice --tool-call-parser hermes -O3 --disable-log-requests",
                "corella serve meta/llama --max-model-len 8k --tool-call-parser hermes --no-log-requests",
            ),
            (
                "corella serve -hf owner/model:Q4_K_M -c 8192 -ngl 99 -fa -t 4 -cb -np 2 --mlock --jinja",
                "corella serve --model=owner/model:Q4_K_M --max-model-len=8192 --threads=4 --max-num-seqs=2",
            ),
            ("corella serve -fa on x", "corella serve x"),
            ("corella serve -fa x", "corella serve x"),
            ("corella serve -dev cpu", "corella serve --device=cpu"),
            (
                "corella generate -n 9 -p x --temp 0.5",
                "corella generate --max-tokens=9 -p x --temperature=0.5",
            ),
            (
                "corella serve --cudagraph-capture-sizes 1 2 4",
                "corella serve",
            ),
            (
                "corella serve --compilation-config.level=3 --no-enable-expert-parallel",
                "corella serve",
            ),
            ("corella serve --threads -1", "corella serve --threads -1"),
            ("corella serve -- --mlock", "corella serve -- --mlock"),
            ("corella run some/model", "corella chat some/model"),
            (
                "corella run some/model Hello",
                "corella generate some/model --prompt=Hello --with-input --no-limits",
            ),
            (
                "corella run some/model Tell me more --seed 3",
                "corella generate some/model --prompt=Tell me more --with-input --no-limits --seed 3",
            ),
            ("corella serve --seed -1 -np -1", "corella serve"),
            (
                "corella serve -ctk q8_0 -ctv q8_0",
                "corella serve --kv-cache-dtype=int8",
            ),
            ("corella generate -p x -n -1", "corella generate -p x"),
            (
                "corella chat -m x.gguf -cnv -b 512",
                "corella chat -m x.gguf",
            ),
            ("corella ls", "corella list"),
            ("corella serve -mx", "corella serve -mx"),
        ] {
            assert_eq!(words(line), expected, "{line}");
        }
    }

    /// A word behind the names is the model unless there is one already.
    #[test]
    fn several_names_may_follow_one_option() {
        let several =
            "corella serve --model x --served-model-name a --served-model-name b --port 1";
        assert_eq!(
            words("corella serve --model x --served-model-name a b --port 1"),
            several
        );
        let behind = "corella serve x --served-model-name a --served-model-name b";
        assert_eq!(words("corella serve x --served-model-name a b"), behind);
        let one = "corella serve --served-model-name a x";
        assert_eq!(words(one), one);
    }

    #[test]
    fn all_bad_flags_are_reported_at_once() {
        let line = "corella serve --tensor-parallel-size 2 --max-num-seq 4 --middleware x -sm row -to 5 \
                    --no-such-thing --mlock --hf-token y";
        let reasons = typed(line).unwrap_err();
        let expected = [
            "--tensor-parallel-size 2: matrices are not split",
            "there is no option --max-num-seq; did you mean --max-num-seqs? `corella serve --help`",
            "there is no option --middleware: code of others is not loaded",
            "there is no option --no-such-thing; `corella serve --help` names all",
            "there is no option --hf-token: set HF_TOKEN",
        ];
        assert_eq!(reasons.len(), expected.len(), "{reasons:?}");
        for (reason, expected) in reasons.iter().zip(expected) {
            assert!(reason.starts_with(expected), "{reason}");
        }
    }

    #[test]
    fn advice_has_the_value_that_was_typed() {
        let reasons = typed("corella serve --temp 0.3").unwrap_err();
        assert!(
            reasons[0].ends_with("'{\"temperature\": 0.3}'"),
            "{reasons:?}"
        );
    }

    /// A suggestion must not lead to the next refusal.
    #[test]
    fn suggestions_can_be_followed() {
        for (line, suggestion) in [
            ("corella serve --log-fromat json", Some("--log-format")),
            ("corella serve --log-fromat gguf", None),
            ("corella serve --prot 8080", Some("--port")),
            ("corella serve --prot=tcp", None),
            ("corella serve --temprature 0.5", None),
            ("corella chat --temprature 0.5", Some("--temperature")),
            ("corella serve --pin-thread", Some("--pin-threads")),
        ] {
            let reason = typed(line).unwrap_err().remove(0);
            let (_, rest) = reason.split_once("did you mean ").unzip();
            let found = rest.and_then(|rest| rest.split('?').next());
            assert_eq!(found, suggestion, "{line}: {reason}");
        }
    }

    /// clap would read these as `-h` and other letters.
    #[test]
    fn several_letters_behind_one_dash_are_one_name() {
        for name in ["-hx", "-xm", "-sm2"] {
            let reason = typed(&format!("corella serve {name}"))
                .unwrap_err()
                .remove(0);
            assert!(
                reason.starts_with(&format!("there is no option {name};")),
                "{reason}"
            );
        }
        let reason = typed("corella serve -md").map(|translation| translation.warnings);
        assert_eq!(reason, Ok(vec!["-md is --draft-model".to_owned()]));
        assert_eq!(words("corella serve -hV"), "corella serve -hV");
    }

    #[test]
    fn a_verb_without_a_counterpart_says_what_to_do() {
        for (line, advice) in [
            ("corella stop x", "Ctrl-C"),
            (
                "corella run-batch -i in -o out --model x",
                "`corella batch IN.jsonl MODEL -o OUT.jsonl`",
            ),
            ("corella launch claude", "coding agents"),
            ("corella version", "`corella --version`"),
            ("corella -m x.gguf -p hi", "`corella generate` first"),
            ("corella -v", "did you mean -V?"),
        ] {
            let reasons = typed(line).unwrap_err();
            assert_eq!(reasons.len(), 1, "{reasons:?}");
            assert!(reasons[0].contains(advice), "{reasons:?}");
        }
    }
}
