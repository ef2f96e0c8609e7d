//! The two files of a batch: the requests, and the existing answers.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::store::batch_line::{EarlierLine, RequestLine};

/// Why a batch's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BatchFileError {
    /// The failed operation and its cause.
    #[error("{0}: {1}")]
    Io(String, io::Error),
    /// A line is invalid.
    #[error("{file}, line {number}: {reason}")]
    Line {
        file: String,
        number: usize,
        reason: String,
    },
}

/// Editors on Windows begin a file with this mark.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads the lines of a file one by one, with their numbers, which count from 1.
pub struct Lines {
    reader: BufReader<File>,
    /// The path as errors show it.
    shown: String,
    number: usize,
    max_line_bytes: usize,
}

pub struct Line {
    pub number: usize,
    /// The line without its line break.
    pub bytes: Vec<u8>,
    /// Whether a line break ends the line.
    is_ended: bool,
}

impl Line {
    fn is_blank(&self) -> bool {
        self.bytes.trim_ascii().is_empty()
    }
}

impl Lines {
    pub fn open(path: &Path, max_line_bytes: usize) -> Result<Self, BatchFileError> {
        let shown = path.display().to_string();
        let file = File::open(path);
        let file =
            file.map_err(|error| BatchFileError::Io(format!("cannot read {shown}"), error))?;
        Ok(Self {
            reader: BufReader::new(file),
            shown,
            number: 0,
            max_line_bytes,
        })
    }

    fn next(&mut self) -> Result<Option<Line>, BatchFileError> {
        self.number += 1;
        let number = self.number;
        let mut bytes = Vec::new();
        let mut limited = (&mut self.reader).take(self.max_line_bytes as u64);
        let read = limited.read_until(b'\n', &mut bytes);
        read.map_err(|error| BatchFileError::Io(format!("cannot read {}", self.shown), error))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let is_ended = bytes.pop_if(|byte| *byte == b'\n').is_some();
        if !is_ended && bytes.len() == self.max_line_bytes {
            // The next call reads the next line, even after an error.
            let skipped = self.reader.skip_until(b'\n');
            skipped.map_err(|error| {
                BatchFileError::Io(format!("cannot read {}", self.shown), error)
            })?;
            let most = self.max_line_bytes >> 20;
            return Err(self.error(number, &format!("has more than {most} MiB")));
        }
        Ok(Some(Line {
            number,
            bytes,
            is_ended,
        }))
    }

    /// Returns the next request. Blank lines are skipped.
    pub fn next_request(&mut self) -> Result<Option<RequestLine>, BatchFileError> {
        while let Some(mut line) = self.next()? {
            if line.number == 1 && line.bytes.starts_with(BYTE_ORDER_MARK) {
                line.bytes.drain(..BYTE_ORDER_MARK.len());
            }
            if line.is_blank() {
                continue;
            }
            let request = RequestLine::parse(&line.bytes);
            return request
                .map(Some)
                .map_err(|reason| self.error(line.number, &reason));
        }
        Ok(None)
    }

    /// Returns the number of the last line read.
    pub fn number(&self) -> usize {
        self.number
    }

    fn error(&self, number: usize, reason: &str) -> BatchFileError {
        BatchFileError::Line {
            file: self.shown.clone(),
            number,
            reason: reason.to_owned(),
        }
    }
}

/// Reads all requests once, so that a file with a mistake costs no computation. Returns the requests' ids.
pub fn check_input(path: &Path, max_line_bytes: usize) -> Result<HashSet<String>, BatchFileError> {
    let mut lines = Lines::open(path, max_line_bytes)?;
    let mut ids = HashSet::new();
    while let Some(request) = lines.next_request()? {
        let number = lines.number;
        request
            .check_endpoint()
            .map_err(|reason| lines.error(number, &reason))?;
        if let Some(repeated) = ids.replace(request.custom_id) {
            let reason = format!("an earlier line has the `custom_id` `{repeated}` too");
            return Err(lines.error(number, &reason));
        }
    }
    Ok(ids)
}

/// A file of answers, open to append more.
pub struct Output {
    pub file: File,
    /// The ids of the requests that the file answers.
    pub answered: HashSet<String>,
}

impl Output {
    /// Opens or creates the file. Whole lines stay. A last line torn by a kill or a full disk is removed. A file with
    /// other content is refused and left unchanged.
    pub fn open(path: &Path, requests: &HashSet<String>) -> Result<Self, BatchFileError> {
        let shown = path.display().to_string();
        let io_error = |error| BatchFileError::Io(format!("cannot write {shown}"), error);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(path).map_err(io_error)?;
        let mut answered = HashSet::new();
        let mut whole_bytes = 0;
        let mut lacks_line_break = false;
        let mut lines = Lines::open(path, usize::MAX)?;
        while let Some(line) = lines.next()? {
            let num_bytes = line.bytes.len() as u64 + u64::from(line.is_ended);
            if line.is_blank() && line.is_ended {
                whole_bytes += num_bytes;
                continue;
            }
            match serde_json::from_slice::<EarlierLine>(&line.bytes) {
                Ok(earlier) if requests.contains(&earlier.custom_id) => {
                    answered.insert(earlier.custom_id);
                }
                Ok(earlier) => {
                    let reason = format!(
                        "answers `{}`, which is no request of this batch; give another file",
                        earlier.custom_id
                    );
                    return Err(lines.error(line.number, &reason));
                }
                // A line is written from its beginning, so a torn line begins like a whole one.
                Err(_) if !line.is_ended && is_beginning(&line.bytes) => break,
                Err(_) => {
                    let reason = "is no answer of a batch; give another file";
                    return Err(lines.error(line.number, reason));
                }
            }
            whole_bytes += num_bytes;
            lacks_line_break = !line.is_ended;
        }
        file.set_len(whole_bytes).map_err(io_error)?;
        file.seek(SeekFrom::End(0)).map_err(io_error)?;
        if lacks_line_break {
            file.write_all(b"\n").map_err(io_error)?;
        }
        Ok(Self { file, answered })
    }
}

fn is_beginning(torn: &[u8]) -> bool {
    const FIRST: &[u8] = br#"{"id":"batch_req_"#;
    torn.starts_with(&FIRST[..FIRST.len().min(torn.len())])
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    struct TestFile(PathBuf);

    impl TestFile {
        fn new(name: &str, content: &str) -> Self {
            let name = format!("corella-batch-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, content).unwrap();
            Self(path)
        }

        fn content(&self) -> String {
            std::fs::read_to_string(&self.0).unwrap()
        }
    }

    impl Drop for TestFile {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn ids(ids: &[&str]) -> HashSet<String> {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    fn answer(id: &str) -> String {
        format!(r#"{{"id":"batch_req_1","custom_id":"{id}","response":null,"error":null}}"#)
    }

    #[test]
    fn a_mistake_is_found_in_its_line() {
        let line = |id: &str| {
            format!(r#"{{"custom_id":"{id}","method":"POST","url":"/v1/completions","body":{{}}}}"#)
        };
        let good = TestFile::new("good", &format!("{}\n\n{}", line("a"), line("b")));
        assert_eq!(check_input(&good.0, 1 << 20).unwrap(), ids(&["a", "b"]));
        let marked = TestFile::new("marked", &format!("\u{feff}{}\n", line("a")));
        assert_eq!(check_input(&marked.0, 1 << 20).unwrap(), ids(&["a"]));
        let twice = TestFile::new("twice", &format!("{}\n\n{}\n", line("a"), line("a")));
        let error = check_input(&twice.0, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("line 3") && error.contains("`a`"), "{error}");
        let mistyped = line("b").replace("/v1/completions", "/v1/completions/");
        let mistyped = TestFile::new("mistyped", &format!("{}\n{mistyped}", line("a")));
        let error = check_input(&mistyped.0, 1 << 20).unwrap_err().to_string();
        assert!(
            error.contains("line 2: `url` must be one of /v1/chat/completions, "),
            "{error}"
        );
        assert!(error.ends_with("not `/v1/completions/`"), "{error}");
        let broken = TestFile::new("broken", &format!("{}\n{{", line("a")));
        let error = check_input(&broken.0, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("line 2: is not JSON"), "{error}");
    }

    /// A kill may cut the last line at any byte; the next run continues after the last whole line.
    #[test]
    fn a_torn_line_goes_wherever_it_was_torn() {
        let (a, b) = (answer("a"), answer("b"));
        for num_bytes in 0..b.len() {
            let file = TestFile::new("torn", &format!("{a}\n{}", &b[..num_bytes]));
            let output = Output::open(&file.0, &ids(&["a", "b"])).unwrap();
            assert_eq!(output.answered, ids(&["a"]), "{num_bytes}");
            assert_eq!(file.content(), format!("{a}\n"), "{num_bytes}");
        }
        let file = TestFile::new("unended", &format!("{a}\n{b}"));
        let output = Output::open(&file.0, &ids(&["a", "b"])).unwrap();
        assert_eq!(output.answered, ids(&["a", "b"]));
        assert_eq!(file.content(), format!("{a}\n{b}\n"));
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_over() {
        let line = |id: &str, prompt: &str| {
            format!(
                r#"{{"custom_id":"{id}","method":"POST","url":"/v1/completions","body":{{"prompt":"{prompt}"}}}}"#
            )
        };
        let (long, short) = (line("a", &"x".repeat(500)), line("b", "y"));
        let file = TestFile::new("long", &format!("{long}\n{short}\n{long}"));
        let mut lines = Lines::open(&file.0, 200).unwrap();
        let error = lines.next_request().unwrap_err().to_string();
        assert!(error.contains("line 1: has more than"), "{error}");
        let next = lines.next_request().unwrap().expect("there is another");
        assert_eq!((next.custom_id.as_str(), lines.number()), ("b", 2));
        let error = lines.next_request().unwrap_err().to_string();
        assert!(error.contains("line 3: has more than"), "{error}");
        assert!(lines.next_request().unwrap().is_none());
    }

    #[test]
    fn other_files_are_not_touched() {
        for content in [
            "my notes",
            "my notes\n",
            &format!("{}\nx\n{}\n", answer("a"), answer("b")),
            &format!("{}\n", answer("of another batch")),
        ] {
            let file = TestFile::new("other", content);
            let opened = Output::open(&file.0, &ids(&["a", "b"]));
            let error = opened.map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("give another file"), "{error}");
            assert_eq!(file.content(), content);
        }
    }
}
