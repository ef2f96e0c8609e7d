//! Lines typed in a terminal, with readline's editing and a history that later conversations share.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{CompletionType, Config, Context, Editor, Helper};

use super::entry::completions;
use super::input::{Line, LineSource, too_long};

pub struct LineEditor {
    editor: Editor<Commands, FileHistory>,
    /// The file of the history, if it is kept.
    history: Option<PathBuf>,
    was_interrupted: bool,
}

/// Limits the entries of the history, in memory and in its file.
const MAX_ENTRIES: usize = 1000;
/// Limits an entry of the history, and with it the whole history to 16 MiB.
const MAX_KEPT_BYTES: usize = 16 << 10;

impl LineEditor {
    pub fn new(history: Option<PathBuf>) -> io::Result<Self> {
        let config = Config::builder()
            .max_history_size(MAX_ENTRIES)
            .map_err(as_io)?
            .completion_type(CompletionType::List)
            .build();
        let mut editor = Editor::with_config(config).map_err(as_io)?;
        editor.set_helper(Some(Commands));
        let mut lines = Self {
            editor,
            history,
            was_interrupted: false,
        };
        if let Some(path) = &lines.history {
            match lines.editor.load_history(path).map_err(as_io) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    lines.forgo_history(&error)
                }
                _ => {}
            }
        }
        Ok(lines)
    }

    /// Keeps the history in memory only. An unreadable file stays unchanged.
    fn forgo_history(&mut self, error: &io::Error) {
        if let Some(path) = self.history.take() {
            eprintln!("the input history is not kept: {}: {error}", path.display());
        }
    }

    /// Adds the newest entry to the file, so that nothing is lost however the program ends.
    fn append_to(&mut self, path: &Path) -> io::Result<()> {
        if let Some(folder) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)?;
        }
        // The file gets mode 600, even if it had another mode.
        self.editor.append_history(path).map_err(as_io)
    }
}

impl LineSource for LineEditor {
    fn next_line(&mut self, prompt: &str, max_bytes: usize) -> io::Result<Line> {
        let read = self.editor.readline(prompt);
        let was_interrupted = std::mem::take(&mut self.was_interrupted);
        match read {
            Ok(text) if text.len() > max_bytes => {
                eprintln!("{}", too_long());
                Ok(Line::Dropped)
            }
            Ok(text) => Ok(Line::Text(text)),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(ReadlineError::Interrupted) => {
                // The first Ctrl-C may be meant for an answer that has just ended, so it does not end the conversation.
                if was_interrupted {
                    eprintln!("Ctrl-D or /exit leaves");
                }
                self.was_interrupted = true;
                Ok(Line::Dropped)
            }
            // The window changed its size within a key sequence.
            Err(ReadlineError::Signal(_)) => Ok(Line::Dropped),
            Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                eprintln!("the line was dropped: it is not UTF-8");
                Ok(Line::Dropped)
            }
            Err(error) => Err(as_io(error)),
        }
    }

    fn remember(&mut self, entry: &str) {
        let entry = entry.trim();
        if entry.is_empty() || entry.len() > MAX_KEPT_BYTES {
            return;
        }
        let added = self.editor.add_history_entry(entry).map_err(as_io);
        let Some(path) = self.history.clone() else {
            return;
        };
        if let Err(error) = added.and_then(|_| self.append_to(&path)) {
            self.forgo_history(&error);
        }
    }
}

fn as_io(error: ReadlineError) -> io::Error {
    match error {
        ReadlineError::Io(error) => error,
        ReadlineError::Errno(errno) => errno.into(),
        other => io::Error::other(other),
    }
}

/// Tab completes commands and `/set`'s names.
struct Commands;

impl Completer for Commands {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(completions(&line[..position]))
    }
}

impl Hinter for Commands {
    type Hint = String;
}
impl Highlighter for Commands {}
impl Validator for Commands {}
impl Helper for Commands {}
