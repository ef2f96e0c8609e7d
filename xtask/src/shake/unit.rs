//! A unit that `shake` runs at once: a Rust test binary, or a file of `tests/client`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::harness::Harness;
use super::options::Options;
use crate::repository::Repository;
use crate::test_binary::TestBinary;
use crate::{deploy, python, test};

const CLIENT_FOLDER: &str = "tests/client/";

pub struct Unit {
    pub name: String,
    pub harness: Harness,
    /// The names of the selected tests, in their harness's form.
    pub tests: Vec<String>,
    pattern: Option<String>,
    runner: Runner,
}

enum Runner {
    Binary(TestBinary),
    /// A command that runs a file, without the pattern.
    Pytest(Command),
}

impl Unit {
    /// A command that runs the unit's tests once. Each run has another order of a binary's tests.
    pub fn command(&self, run: usize, num_threads: usize) -> Command {
        match &self.runner {
            Runner::Binary(binary) => {
                let mut command = binary.command();
                command.args(&self.pattern);
                // A stable libtest accepts `--shuffle-seed` if it is told to allow unstable options.
                command.env("RUSTC_BOOTSTRAP", "1");
                command
                    .args(["-Z", "unstable-options", "--shuffle-seed"])
                    .arg(run.to_string());
                // On one core, as many tests run at once as on all.
                command.env("RUST_TEST_THREADS", num_threads.to_string());
                command
            }
            Runner::Pytest(file) => {
                let mut command = wrapped(file.get_program().to_os_string(), file);
                command.args(file.get_args());
                command.args(self.pattern.iter().flat_map(|pattern| ["-k", pattern]));
                command
            }
        }
    }
}

/// Returns the units with tests of the chosen names.
pub fn find(repository: &Repository, options: &Options) -> Result<Vec<Unit>, String> {
    let units = match options.is_client {
        true => files(repository, options)?,
        false => binaries(repository, options)?,
    };
    match (units.is_empty(), &options.pattern) {
        (false, _) => Ok(units),
        (true, Some(pattern)) => Err(format!("shake: no test has {pattern:?} in its name")),
        (true, None) => Err("shake: there are no tests in what was chosen".into()),
    }
}

fn binaries(repository: &Repository, options: &Options) -> Result<Vec<Unit>, String> {
    // All packages are built, as for `cargo xtask test`: for one package alone, dependencies would have other features
    // and be compiled again.
    let mut binaries = test::binaries(repository)?;
    let is_of = |binary: &TestBinary, package: &String| binary.package == *package;
    for package in &options.packages {
        if !binaries.iter().any(|binary| is_of(binary, package)) {
            return Err(format!("shake: no package {package} has tests"));
        }
    }
    let packages = &options.packages;
    binaries.retain(|binary| {
        packages.is_empty() || packages.iter().any(|package| is_of(binary, package))
    });
    let mut units = Vec::new();
    for binary in binaries {
        let mut list = binary.command();
        let output = list_output(list.arg("--list").args(&options.pattern))?;
        let tests = Harness::Libtest.listed(&output);
        if !tests.is_empty() {
            units.push(Unit {
                name: binary.selection(),
                harness: Harness::Libtest,
                tests,
                pattern: options.pattern.clone(),
                runner: Runner::Binary(binary),
            });
        }
    }
    Ok(units)
}

fn files(repository: &Repository, options: &Options) -> Result<Vec<Unit>, String> {
    let python = python::environment(repository)?;
    let path = deploy::path(repository)?;
    if !repository.binary().is_file() {
        let binary = repository.binary();
        return Err(format!(
            "shake: {} is missing: build it first",
            binary.display()
        ));
    }
    let pytest = |file: &str| {
        let mut command = python::pytest(repository, &python, file);
        command
            .arg("-v")
            .env("PATH", &path)
            .env("CORELLA_BIN", repository.binary());
        command
    };
    let mut collect = pytest(CLIENT_FOLDER);
    // Besides -v, a further -q makes pytest write one test per line.
    collect.args(["--collect-only", "-qq"]);
    collect.args(options.pattern.iter().flat_map(|pattern| ["-k", pattern]));
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for test in Harness::Pytest.listed(&list_output(&mut collect)?) {
        let test = test
            .strip_prefix(CLIENT_FOLDER)
            .unwrap_or(&test)
            .to_string();
        let file = test.split("::").next().unwrap_or_default().to_string();
        files.entry(file).or_default().push(test);
    }
    let unit = |(file, tests): (String, Vec<String>)| Unit {
        runner: Runner::Pytest(pytest(&format!("{CLIENT_FOLDER}{file}"))),
        harness: Harness::Pytest,
        name: file,
        tests,
        pattern: options.pattern.clone(),
    };
    Ok(files.into_iter().map(unit).collect())
}

/// Returns the output of a command that lists tests. Pytest fails if there are no tests, which is no error here.
fn list_output(command: &mut Command) -> Result<String, String> {
    const NO_TESTS: i32 = 5;
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program} did not start: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() || output.status.code() == Some(NO_TESTS) {
        return Ok(text);
    }
    let text = text + &String::from_utf8_lossy(&output.stderr);
    // The error is at the end of the output, after a list that may be long.
    let lines: Vec<&str> = text.lines().collect();
    let end = lines[lines.len().saturating_sub(30)..].join("\n");
    Err(format!(
        "{program} cannot list its tests: {}\n{end}",
        output.status
    ))
}

/// Returns the same command with all threads on one core.
pub fn on_one_core(command: &Command) -> Command {
    let mut held = wrapped("taskset".into(), command);
    held.args(["-c", &first_core()]);
    held.arg(command.get_program()).args(command.get_args());
    held
}

/// Returns another program's command with the folder and the environment of a command.
fn wrapped(program: std::ffi::OsString, command: &Command) -> Command {
    let mut other = Command::new(program);
    if let Some(folder) = command.get_current_dir() {
        other.current_dir(folder);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => other.env(name, value),
            None => other.env_remove(name),
        };
    }
    other
}

/// The first core that this process may use.
fn first_core() -> String {
    let status = fs::read_to_string(PathBuf::from("/proc/self/status")).unwrap_or_default();
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let digits = list.map(str::trim).unwrap_or_default();
    let digits: String = digits.chars().take_while(char::is_ascii_digit).collect();
    if digits.is_empty() {
        "0".into()
    } else {
        digits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_on_one_core_is_the_same_otherwise() {
        let mut command = Command::new("sh");
        let script = "pwd; echo $A $1; grep Cpus_allowed_list /proc/self/status";
        command
            .args(["-c", script, "sh", "b"])
            .env("A", "a")
            .current_dir("/");
        let output = on_one_core(&command).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let expected = format!("/\na b\nCpus_allowed_list:\t{}\n", first_core());
        assert_eq!(text, expected);
    }
}
