//! The prompt of `corella generate`: typed, piped or generated.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;

use crate::Error;

pub enum Prompt {
    Chat {
        system: Option<String>,
        message: String,
    },
    Raw(String),
    MadeUp {
        num_tokens: usize,
    },
}

/// More than any context holds.
const MAX_INPUT_BYTES: u64 = 16 << 20;

/// Returns the text of a prompt. `-` or no text reads standard input; with `with_input`, piped input comes before the
/// typed text.
pub fn text(typed: Option<String>, with_input: bool) -> Result<String, Error> {
    match typed.as_deref() {
        None if io::stdin().is_terminal() => {
            let reason = "there is no prompt: give one with -p TEXT, or pipe it in";
            Err(Error::Config(reason.to_owned()))
        }
        None | Some("-") => match read(&mut io::stdin().lock())? {
            text if text.trim().is_empty() => {
                let reason = "there is no prompt: standard input is empty";
                Err(Error::Config(reason.to_owned()))
            }
            text => Ok(text),
        },
        Some(typed) if with_input && is_piped() => {
            Ok(joined(&read(&mut io::stdin().lock())?, typed))
        }
        Some(typed) => Ok(typed.to_owned()),
    }
}

/// Returns whether standard input is a pipe or a file. A program without input usually has /dev/null, which is neither.
fn is_piped() -> bool {
    let file = io::stdin().as_fd().try_clone_to_owned().map(File::from);
    let kind = file
        .and_then(|file| file.metadata())
        .map(|metadata| metadata.file_type());
    kind.is_ok_and(|kind| kind.is_fifo() || kind.is_file())
}

fn read(input: &mut impl Read) -> Result<String, Error> {
    let mut bytes = Vec::new();
    let num_bytes = input.take(MAX_INPUT_BYTES + 1).read_to_end(&mut bytes);
    let num_bytes = num_bytes.map_err(|error| Error::Io("standard input".to_owned(), error))?;
    if num_bytes as u64 > MAX_INPUT_BYTES {
        let most = MAX_INPUT_BYTES >> 20;
        return Err(Error::Config(format!(
            "standard input has more than {most} MiB, which no context holds"
        )));
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok(text.trim_end_matches('\n').to_owned()),
        Err(_) => Err(Error::Config("standard input is not UTF-8".to_owned())),
    }
}

fn joined(input: &str, typed: &str) -> String {
    match input.is_empty() {
        true => typed.to_owned(),
        false => format!("{input}\n\n{typed}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_piped_in_comes_first() {
        let input = read(&mut "An article.\n\n".as_bytes()).ok().unwrap();
        assert_eq!(joined(&input, "Summarise"), "An article.\n\nSummarise");
        assert_eq!(joined("", "Summarise"), "Summarise");
        let error = read(&mut &[0xff_u8][..]).err().unwrap().to_string();
        assert_eq!(error, "standard input is not UTF-8");
        let error = read(&mut io::repeat(b'x')).err().unwrap().to_string();
        assert!(error.contains("more than 16 MiB"), "{error}");
    }
}
