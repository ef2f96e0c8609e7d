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
    pub seed: Option<u64>,
    /// The modes that runs take in turn.
    pub modes: Vec<Mode>,
    /// The part of the test files, from 1 on, and the number of parts.
    pub part: (usize, usize),
    pub resumes: bool,
}

impl Options {
    pub fn parse(arguments: &[String]) -> Result<Self, String> {
        let mut options = Self {
            pattern: None,
            packages: Vec::new(),
            is_client: false,
            num_runs: DEFAULT_NUM_RUNS,
            seed: None,
            modes: Vec::new(),
            part: (1, 1),
            resumes: false,
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
                "--runs" => options.num_runs = number(argument, value()?)?,
                "--seed" => options.seed = Some(number(argument, value()?)?),
                "--part" => options.part = part(value()?)?,
                "--resume" => options.resumes = true,
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
        if !options.is_client && options.part != (1, 1) {
            return Err("shake: --part needs --client".into());
        }
        if options.modes.is_empty() {
            options.modes = Mode::ALL.to_vec();
        }
        if !options.is_client && options.packages.is_empty() && options.pattern.is_none() {
            options.packages = DEFAULT_PACKAGES.map(str::to_owned).to_vec();
        }
        Ok(options)
    }

    /// Returns the arguments that determine which results belong together: all but the seed and
    /// `--resume`.
    pub fn what(&self) -> String {
        let mut text = String::new();
        if self.is_client {
            text += " --client";
        }
        for package in &self.packages {
            text += &format!(" -p {package}");
        }
        if let Some(pattern) = &self.pattern {
            text += &format!(" -k {}", quoted(pattern));
        }
        if self.part.1 > 1 {
            text += &format!(" --part {}/{}", self.part.0, self.part.1);
        }
        if self.modes != Mode::ALL {
            for mode in &self.modes {
                text += &format!(" {}", mode.option());
            }
        }
        text += &format!(" --runs {}", self.num_runs);
        text.trim_start().to_string()
    }
}

const USAGE: &str = "usage: cargo xtask shake [-k PATTERN] [-p CRATE]… [--client [--part I/N]] \
                     [--runs N] [--seed N] [--plain] [--one-core] [--pauses] [--resume]";

fn number<T: std::str::FromStr>(option: &str, value: &str) -> Result<T, String> {
    let number = value.parse();
    number.map_err(|_| format!("shake: {option} takes a number, not {value:?}"))
}

fn part(value: &str) -> Result<(usize, usize), String> {
    let parsed = value.split_once('/').and_then(|(index, num)| {
        let part: (usize, usize) = (index.parse().ok()?, num.parse().ok()?);
        (1..=part.1).contains(&part.0).then_some(part)
    });
    parsed.ok_or_else(|| format!("shake: --part takes I/N, such as 1/3, not {value:?}"))
}

/// Quotes a word for a shell.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,=+".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

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
    fn arguments_are_read_and_written() {
        for text in [
            "-p a -p b -k c --pauses --runs 3",
            "--client --part 2/3 --one-core --runs 1",
            "-k a --plain --pauses --runs 20",
        ] {
            let options = parse(&format!("{text} --seed 7 --resume")).unwrap();
            assert_eq!((options.seed, options.resumes), (Some(7), true));
            assert_eq!(options.what(), text);
        }
        let words = ["-k", "a b's"].map(str::to_owned);
        assert_eq!(
            Options::parse(&words).unwrap().what(),
            r"-k 'a b'\''s' --runs 20"
        );
    }

    #[test]
    fn wrong_arguments_are_refused() {
        for text in [
            "name",
            "--fast",
            "-k",
            "--runs x",
            "--runs 0",
            "--seed -1",
            "--part 1/2",
            "--client --part 3/2",
            "--client --part 0/2",
            "--client --part 2",
            "--client -p a",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
