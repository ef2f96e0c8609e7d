//! Replaces verbs of other servers, such as `ls` and `show` of Ollama.

use std::ffi::OsString;

use crate::foreign::flag_table::{self, Verb};

/// Replaces a verb of another server.
pub fn translate_verb(
    mut words: Vec<OsString>,
    notes: &mut Vec<String>,
) -> Result<Vec<OsString>, Vec<String>> {
    let word = |at: usize| {
        let word = words.get(at).and_then(|word| word.to_str());
        word.filter(|word| !word.starts_with('-'))
    };
    let at = match word(1) {
        Some("help") => 2,
        _ => 1,
    };
    let typed = match (word(at), word(at + 1)) {
        (Some("bench"), Some(part)) => format!("bench {part}"),
        (Some(typed), _) => typed.to_owned(),
        (None, _) => return Ok(words),
    };
    let mut verbs = flag_table::verbs()
        .into_iter()
        .chain(flag_table::unlisted_verbs());
    match verbs.find(|(name, _)| *name == typed) {
        None | Some((_, Verb::Same(_))) => Ok(words),
        Some((_, Verb::Refused(why))) => Err(vec![format!("there is no command `{typed}`: {why}")]),
        Some((_, Verb::Command { command, .. })) => {
            notes.push(format!("`corella {typed}` is `corella {command}`"));
            words[at] = command.into();
            Ok(words)
        }
    }
}
