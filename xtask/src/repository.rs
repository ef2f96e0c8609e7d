//! The paths of the repository, and how to run commands in it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub struct Repository {
    pub root: PathBuf,
    /// Cargo's target directory.
    pub target: PathBuf,
    cargo: PathBuf,
}

impl Repository {
    pub fn find() -> Result<Self, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .filter(|root| root.join("Cargo.toml").is_file())
            .ok_or("the repository has moved since xtask was built; run `cargo clean -p xtask`")?
            .to_path_buf();
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(folder) => root.join(folder),
            None => root.join("target"),
        };
        let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into()).into();
        Ok(Self {
            root,
            target,
            cargo,
        })
    }

    /// Returns a cargo command. All stages have the same settings, so that they share builds, and no debug information,
    /// which would double the build time.
    pub fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(&self.cargo, arguments);
        command
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        command
    }

    /// Returns the binary that tests from outside run: the one in the variable CORELLA_BIN, or the test profile's,
    /// because no test asserts a speed.
    pub fn binary(&self) -> PathBuf {
        let own = std::env::var_os("CORELLA_BIN").map(PathBuf::from);
        own.unwrap_or_else(|| self.target.join("debug/corella"))
    }

    pub fn release_binary(&self) -> PathBuf {
        self.target.join("release/corella")
    }

    /// Returns whether CORELLA_BIN names the binary, so that no binary is built.
    pub fn has_own_binary(&self) -> bool {
        std::env::var_os("CORELLA_BIN").is_some()
    }

    pub fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.root);
        // Cargo sets these variables for this program's package. Build scripts such as ring's run again when these
        // variables change, and all dependents are compiled again.
        for (name, _) in std::env::vars_os() {
            let is_own = |prefix| name.to_str().is_some_and(|name| name.starts_with(prefix));
            if is_own("CARGO_PKG_") || is_own("CARGO_MANIFEST_") {
                command.env_remove(&name);
            }
        }
        command
    }
}

/// Runs a command and shows its output. `else_say` is the error if it fails.
pub fn run(command: &mut Command, else_say: &str) -> Result<(), String> {
    let status = command
        .status()
        .map_err(|error| format!("{} did not start: {error}", name(command)))?;
    if status.success() {
        return Ok(());
    }
    Err(format!("{else_say} ({} : {status})", name(command)))
}

/// Runs a command and returns its output; its standard error is shown.
pub fn output(command: &mut Command) -> Result<String, String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{} did not start: {error}", name(command)))?;
    if !output.status.success() {
        return Err(format!("{} failed: {}", name(command), output.status));
    }
    String::from_utf8(output.stdout).map_err(|_| format!("{} wrote no text", name(command)))
}

/// Returns whether a command succeeds; its output is not shown.
pub fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn name(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut text = program.file_name().map_or_else(
        || program.display().to_string(),
        |name| name.to_string_lossy().into_owned(),
    );
    for argument in command.get_args() {
        text.push(' ');
        text += &argument.to_string_lossy();
    }
    text
}

/// The target of a relative link in a file. Both paths are relative to the same root.
pub fn resolve_link(from: &str, link: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}
