//! Finds the faults of a batch's input file before anything is computed for it.

use std::collections::HashSet;
use std::path::Path;

use crate::store::batch_file::{BatchFileError, Lines};

use crate::store::batch_record::{BatchError, disk_failure, failure};

/// Limits the lines of a batch, as in OpenAI's API.
const MAX_NUM_LINES: usize = 50_000;
/// Limits the ids of lines, which are kept in memory.
const MAX_ID_BYTES: usize = 512;
/// Limits the reported mistakes of an input file.
const MAX_NUM_ERRORS: usize = 20;

/// Returns the ids of all lines, or the first faults.
pub fn check_lines(
    input: &Path,
    endpoint: &str,
    max_line_bytes: usize,
) -> Result<HashSet<String>, Vec<BatchError>> {
    let mut lines = Lines::open(input, max_line_bytes).map_err(disk_failure)?;
    let mut ids = HashSet::new();
    let mut errors = Vec::new();
    while errors.len() < MAX_NUM_ERRORS {
        let request = match lines.next_request() {
            Ok(None) => break,
            Ok(Some(request)) => request,
            Err(BatchFileError::Line { number, reason, .. }) => {
                errors.push(BatchError::new("invalid_line", reason, None, Some(number)));
                continue;
            }
            Err(error) => return Err(disk_failure(error)),
        };
        let mut refuse = |code: &str, message: String, param: &str| {
            let line = Some(lines.number());
            errors.push(BatchError::new(code, message, Some(param), line));
        };
        if request.url != endpoint {
            let message = format!("`url` must be {endpoint}, the endpoint of the batch");
            refuse("mismatched_endpoint", message, "url");
        }
        if request.custom_id.len() > MAX_ID_BYTES {
            let message = format!("`custom_id` must have at most {MAX_ID_BYTES} bytes");
            refuse("invalid_line", message, "custom_id");
        } else if let Some(repeated) = ids.replace(request.custom_id) {
            let message = format!("an earlier line has the `custom_id` `{repeated}` too");
            refuse("duplicate_custom_id", message, "custom_id");
        }
        if ids.len() > MAX_NUM_LINES {
            let message = format!("a batch has at most {MAX_NUM_LINES} requests");
            refuse("too_many_requests", message, "input_file_id");
            break;
        }
    }
    match (errors.is_empty(), ids.is_empty()) {
        (true, false) => Ok(ids),
        (true, true) => Err(failure("empty_file", "The input file has no requests.")),
        (false, _) => Err(errors),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message must not repeat megabytes of a file's content, nor keep them in memory.
    #[test]
    fn messages_are_short_whatever_is_wrong() {
        let long = "x".repeat(100_000);
        let line = |id: &str, method: &str, url: &str, body: &str| {
            format!(r#"{{"custom_id":"{id}","method":"{method}","url":"{url}","body":{body}}}"#)
        };
        let url = "/v1/completions";
        let lines = [
            line(&long, "POST", url, "{}"),
            line(&long, "POST", url, "{}"),
            line("a", &long, url, "{}"),
            line("b", "POST", &format!("/{long}"), "{}"),
            line("c", "POST", url, &format!("\"{long}\"")),
            line(
                "d",
                "POST",
                url,
                &format!("{{\"prompt\":\"{long}{long}{long}\"}}"),
            ),
            line("e", "POST", "/v1/score", "{}"),
            line("f", "POST", url, "{}"),
        ];
        let name = format!("corella-input-check-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, lines.join("\n")).expect("it can be written");
        let errors = check_lines(&path, url, 250_000).expect_err("much is wrong");
        std::fs::remove_file(&path).expect("it is there");
        let found: Vec<_> = errors
            .iter()
            .map(|error| (error.code.as_str(), error.line))
            .collect();
        let mut expected: Vec<_> = (1..=6).map(|line| ("invalid_line", Some(line))).collect();
        expected.push(("mismatched_endpoint", Some(7)));
        assert_eq!(found, expected);
        for error in errors {
            assert!(
                error.message.chars().count() <= 601,
                "{}",
                error.message.len()
            );
        }
    }
}
