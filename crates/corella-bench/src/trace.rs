//! Request traces: arrival times and lengths of requests.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use crate::BenchError;

/// The latest arrival time: about thirty years, which a clock can still represent.
pub(crate) const LATEST: Duration = Duration::from_secs(1_000_000_000);

/// A request of a trace, with the fields of the Mooncake traces (FAST 2025), which are JSON lines.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct TraceRequest {
    #[serde(rename = "timestamp")]
    pub at_ms: f64,
    #[serde(rename = "input_length")]
    pub num_prompt_tokens: f64,
    #[serde(rename = "output_length")]
    pub num_output_tokens: f64,
    /// The ids of the prompt's blocks of 512 tokens. Equal prefixes have equal ids. Empty if the trace has no ids.
    #[serde(default)]
    pub hash_ids: Vec<u64>,
}

/// The columns of the Azure LLM inference traces (2023).
const COLUMNS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

/// Reads the first requests of a trace, in the trace's order. A `.csv` file has the columns of the Azure traces, any
/// other file has JSON lines. The result is never empty.
pub(crate) fn read(path: &Path, max_requests: usize) -> Result<Vec<TraceRequest>, BenchError> {
    let error = |reason: String| BenchError::File(format!("{}: {reason}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
    let is_csv = path.extension().is_some_and(|extension| extension == "csv");
    let mut requests: Vec<TraceRequest> = Vec::new();
    let lines = text.lines().enumerate().skip(usize::from(is_csv));
    if is_csv && text.lines().next().unwrap_or("").trim() != COLUMNS.join(",") {
        return Err(error(format!(
            "the first line is not {}",
            COLUMNS.join(",")
        )));
    }
    for (index, line) in lines.take(max_requests) {
        let request = match is_csv {
            true => csv_request(line),
            false => serde_json::from_str(line).map_err(|cause| cause.to_string()),
        };
        requests.push(request.map_err(|cause| error(format!("line {}: {cause}", index + 1)))?);
    }
    let first_ms = requests.first().map_or(0.0, |first| first.at_ms);
    for request in &mut requests {
        // Dates are converted to times after the first request.
        request.at_ms -= if is_csv { first_ms } else { 0.0 };
    }
    match requests.is_empty() {
        true => Err(error("no requests in it".into())),
        false => Ok(requests),
    }
}

impl TraceRequest {
    /// When the request arrives, measured from the start of the trace.
    pub fn at(&self, time_scale: f64) -> Result<Duration, BenchError> {
        match Duration::try_from_secs_f64(self.at_ms * time_scale / 1e3) {
            Ok(at) => Ok(at.min(LATEST)),
            Err(cause) => Err(BenchError::File(format!(
                "a request of the trace is {} ms after its start: {cause}",
                self.at_ms
            ))),
        }
    }

    /// The numbers of prompt and output tokens, each at least 1.
    pub fn scaled_lengths(&self, prompt_scale: f64, output_scale: f64) -> (u32, u32) {
        let scaled = |length: f64, scale: f64| (length * scale).round().max(1.0) as u32;
        (
            scaled(self.num_prompt_tokens, prompt_scale),
            scaled(self.num_output_tokens, output_scale),
        )
    }
}

fn csv_request(line: &str) -> Result<TraceRequest, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let &[at, num_prompt_tokens, num_output_tokens] = &fields[..] else {
        return Err(format!("{} fields, not {}", fields.len(), COLUMNS.len()));
    };
    let number = |name: &str, text: &str| {
        let number = text.parse::<u32>().map(f64::from);
        number.map_err(|_| format!("{name} `{text}` is not a number of tokens"))
    };
    Ok(TraceRequest {
        at_ms: date_ms(at).ok_or_else(|| {
            format!("TIMESTAMP `{at}` is not a date and a time, as in 2023-11-16 18:17:03.97996")
        })?,
        num_prompt_tokens: number(COLUMNS[1], num_prompt_tokens)?,
        num_output_tokens: number(COLUMNS[2], num_output_tokens)?,
        hash_ids: Vec::new(),
    })
}

/// Reads `YYYY-MM-DD HH:MM:SS.fraction` as milliseconds since the year 0.
fn date_ms(text: &str) -> Option<f64> {
    let (date, time) = text.split_once(' ')?;
    let date: Vec<i64> = date
        .split('-')
        .map_while(|part| part.parse().ok())
        .collect();
    let time: Vec<f64> = time
        .split(':')
        .map_while(|part| part.parse().ok())
        .collect();
    let (&[year, month, day], &[hour, minute, second]) = (&date[..], &time[..]) else {
        return None;
    };
    if !(1..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years are counted from March, so that the leap day is the last day of a year (Zeller 1882).
    let (year, month) = match month {
        1 | 2 => (year - 1, month + 9),
        _ => (year, month - 3),
    };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    Some(((days as f64 * 24.0 + hour) * 60.0 + minute) * 60e3 + second * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(name: &str, text: &str) -> Result<Vec<TraceRequest>, BenchError> {
        let path = std::env::temp_dir().join(format!("corella-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let requests = read(&path, 3);
        std::fs::remove_file(&path).unwrap();
        requests
    }

    /// 2024 is a leap year, so it is two days from 28 February to 1 March.
    #[test]
    fn dates_become_distances() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
            2024-02-28 23:59:59.5000000,4808,10\r\n\
            2024-03-01 00:00:01.2500000,549,173\r\n";
        let requests = read_text("dates.csv", text).unwrap();
        assert_eq!(requests[0].at(1.0).unwrap(), Duration::ZERO);
        let distance = Duration::from_millis(24 * 3600 * 1000 + 1750);
        assert_eq!(requests[1].at(1.0).unwrap(), distance);
        assert_eq!(requests[1].at(2.0).unwrap(), 2 * distance);
        assert_eq!(requests[0].scaled_lengths(0.1, 2.0), (481, 20));
        assert_eq!(requests[1].scaled_lengths(1.0, 0.001), (549, 1));
    }

    #[test]
    fn as_many_requests_are_read_as_asked_for() {
        let line = "{\"timestamp\": 3000, \"input_length\": 7, \"output_length\": 2}\n";
        let requests = read_text("many.jsonl", &line.repeat(5)).unwrap();
        assert_eq!(requests.len(), 3);
        assert_eq!(requests[2].at(1.0).unwrap(), Duration::from_secs(3));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        let lines = [
            ("2023-11-16 18:17:03,1", "fields"),
            ("yesterday,1,1", "TIMESTAMP `yesterday`"),
            ("2023-11-16 18:17:03,1,-2", "GeneratedTokens `-2`"),
        ];
        for (line, reason) in lines {
            let error = read_text("wrong.csv", &format!("{head}{line}\n")).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains("line 2") && error.contains(reason),
                "{error}"
            );
        }
        let error = read_text("head.csv", "a,b,c\n").unwrap_err().to_string();
        assert!(error.contains("the first line is not TIMESTAMP"), "{error}");
        let error = read_text("none.jsonl", "").unwrap_err().to_string();
        assert!(error.contains("no requests"), "{error}");
    }
}
