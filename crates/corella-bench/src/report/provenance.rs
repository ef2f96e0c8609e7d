//! The place and time of a benchmark, for judging its results and repeating it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use corella_text::strftime;
use serde_json::{Value, json};

/// Facts about this process and its machine. They describe the server's machine only if the server runs on this one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Provenance {
    /// When the run began, measured from 1970.
    pub began: Duration,
    /// The command line, without secrets.
    pub command: String,
    /// For example "AMD EPYC 9354, 2 CPUs, 23.5 GiB, Linux".
    pub machine: String,
    /// The server's version, if the server reports one.
    pub server_version: Option<String>,
}

impl Provenance {
    pub(crate) fn of_this_process(server_version: Option<String>) -> Self {
        let began = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            began: began.unwrap_or_default(),
            command: command(std::env::args()),
            machine: machine(),
            server_version,
        }
    }

    /// The JSON keys for the results. `date` has the format of `vllm bench serve`, in UTC.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "date": date(self.began),
            "command": self.command,
            "machine": self.machine,
            "version": env!("CARGO_PKG_VERSION"),
            "server_version": self.server_version,
        })
    }
}

/// Options whose values are secrets.
const SECRETS: [&str; 1] = ["--api-key"];

fn command(arguments: impl Iterator<Item = String>) -> String {
    let mut words = Vec::new();
    let mut is_secret = false;
    for (index, argument) in arguments.enumerate() {
        let name = argument.split('=').next().unwrap_or_default();
        let names_secret = SECRETS.contains(&name);
        let word = match argument.rsplit('/').next() {
            // The folder of the program does not matter for the run.
            Some(program) if index == 0 => program.to_owned(),
            _ if is_secret => "…".to_owned(),
            _ if names_secret && argument.contains('=') => format!("{name}=…"),
            _ => quoted(&argument),
        };
        is_secret = names_secret && !argument.contains('=');
        words.push(word);
    }
    words.join(" ")
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let value = |text: &str, key: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        let (_, value) = lines.find(|(name, _)| name.trim() == key)?;
        Some(value.trim().to_owned())
    };
    let mut parts = Vec::new();
    parts.extend(value(&read("/proc/cpuinfo"), "model name"));
    if let Ok(num_cpus) = std::thread::available_parallelism() {
        parts.push(match num_cpus.get() {
            1 => "1 CPU".to_owned(),
            num_cpus => format!("{num_cpus} CPUs"),
        });
    }
    let memory = value(&read("/proc/meminfo"), "MemTotal");
    let kib = memory.and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    parts.extend(kib.map(|kib| format!("{:.1} GiB", kib / f64::from(1 << 20))));
    parts.push(std::env::consts::OS.to_owned());
    parts.join(", ")
}

/// `YYYYMMDD-HHMMSS` in UTC.
fn date(since_1970: Duration) -> String {
    strftime("%Y%m%d-%H%M%S", UNIX_EPOCH + since_1970)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_can_be_repeated_and_tells_no_key() {
        let words = |text: &str| text.split('|').map(str::to_owned).collect::<Vec<_>>();
        for (arguments, expected) in [
            ("/usr/bin/corella|bench|serve", "corella bench serve"),
            (
                "corella|--api-key|secret|--seed|1",
                "corella --api-key … --seed 1",
            ),
            ("corella|--api-key=secret", "corella --api-key=…"),
            (
                "corella|--prompt-phrase|it's ",
                "corella --prompt-phrase 'it'\\''s '",
            ),
            ("corella|", "corella ''"),
        ] {
            assert_eq!(command(words(arguments).into_iter()), expected);
        }
    }

    /// The expected dates come from GNU `date --utc`.
    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "19700101-000000"),
            (951_782_399, "20000228-235959"),
            (951_868_799, "20000229-235959"),
            (1_795_959_514, "20261129-133834"),
            (4_107_542_399, "21000228-235959"),
            (4_107_542_400, "21000301-000000"),
        ] {
            assert_eq!(date(Duration::from_secs(seconds)), expected);
        }
    }
}
