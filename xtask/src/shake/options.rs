//! The command line of `cargo xtask shake`.

use super::mode::Mode;

const DEFAULT_NUM_RUNS: usize = 20;

/// The packages whose tests depend most on other threads and nodes.
const DEFAULT_PACKAGES: [&str; 3] = ["corella-cluster", "corella-server", "corella-engine"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// A part of the tests' names; for pytest, an expression of its option `-k`.
    pub pattern: Option<String>,
    /// Empty for all packages.
    pub packages: Vec<String>,
    pub is_client: bool,
    pub num_runs: usize,
    /// The modes that runs take in turn.
    pub modes: Vec<Mode>,
}

impl Options {
    pub fn parse(arguments: &[String]) -> Result<Self, String> {
        let mut options = Self {
            pattern: None,
            packages: Vec::new(),
            is_client: false,
            num_runs: DEFAULT_NUM_RUNS,
            modes: Vec::new(),
        };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value = || {
                let value = arguments.next();
                value.ok_or_else(|| format!("shake: {argument} needs a value"))
            };
            match argument.as_str() {
                "-k" => options.pattern = Some(value()?.clone()),
                "-p" => options.packages.push(value()?.clone()),
                "--client" => options.is_client = true,
                "--runs" => {
                    let value = value()?;
                    let number = value.parse();
                    options.num_runs = number
                        .map_err(|_| format!("shake: --runs takes a number, not {value:?}"))?;
                }
                other => match Mode::ALL.into_iter().find(|mode| mode.option() == other) {
                    Some(mode) => options.modes.push(mode),
                    None => return Err(format!("shake has no option {other:?}; {USAGE}")),
                },
            }
        }
        if options.num_runs == 0 {
            return Err("shake: --runs is at least 1".into());
        }
        if options.is_client && !options.packages.is_empty() {
            return Err(
                "shake: --client runs tests/client, and -p those of a crate; name one".into(),
            );
        }
        if options.modes.is_empty() {
            options.modes = Mode::ALL.to_vec();
        }
        if !options.is_client && options.packages.is_empty() && options.pattern.is_none() {
            options.packages = DEFAULT_PACKAGES.map(str::to_owned).to_vec();
        }
        Ok(options)
    }
}

const USAGE: &str = "usage: cargo xtask shake [-k PATTERN] [-p CRATE]… [--client] [--runs N] [--plain] [--one-core] \
                     [--pauses]";

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options, String> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words)
    }

    #[test]
    fn without_arguments_three_crates_run_20_times_in_all_modes() {
        let options = parse("").unwrap();
        assert_eq!(options.packages, DEFAULT_PACKAGES);
        assert_eq!((options.num_runs, options.modes), (20, Mode::ALL.to_vec()));
        assert!(parse("-k name").unwrap().packages.is_empty());
        assert!(parse("--client").unwrap().packages.is_empty());
    }

    #[test]
    fn arguments_are_read() {
        let options = parse("-p a -p b -k c --pauses --runs 3").unwrap();
        assert_eq!(options.packages, ["a", "b"]);
        assert_eq!(options.pattern.as_deref(), Some("c"));
        assert_eq!((options.num_runs, options.modes), (3, vec![Mode::Pauses]));
        assert!(parse("--client").unwrap().is_client);
    }

    #[test]
    fn wrong_arguments_are_refused() {
        for text in [
            "name",
            "--fast",
            "-k",
            "--runs x",
            "--runs 0",
            "--client -p a",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
