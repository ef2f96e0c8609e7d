//! Replaces verbs of other servers, such as `run` and `ls` of Ollama.

use std::ffi::{OsStr, OsString};

use crate::flag_table::{self, Verb};

/// Replaces a verb of another server.
pub fn translate_verb(
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

/// `ollama run MODEL PROMPT` answers once, without measurements. The prompt may be several words, and includes piped
/// input.
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
