//! `cargo xtask dist`: builds the binary and the Python package for other machines, and packs them as a release.

use std::env;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::repository::{Repository, output, run, succeeds};
use crate::{apt, python};

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// The target for zig, which has the symbols of each version of glibc.
const LINKED_FOR: &str = "x86_64-linux-gnu.2.17";
const IS_FOR_THIS_MACHINE: bool = cfg!(all(
    target_os = "linux",
    target_arch = "x86_64",
    target_env = "gnu"
));

pub fn dist(repository: &Repository, _: &[String]) -> Result<(), String> {
    if !IS_FOR_THIS_MACHINE {
        return Err(format!("a release is built for {TARGET}, on it"));
    }
    if !succeeds(&mut repository.command("rpmbuild".as_ref(), &["--version"])) {
        let install = "install rpmbuild, in PATH (on Debian: `sudo apt-get install rpm`)";
        apt::install(repository, &["rpm"], install)?;
    }
    let python = python::release_environment(repository)?;
    // The paths of downloaded crates are known only after the download.
    run(
        &mut repository.cargo(&["fetch", "--locked", "--target", TARGET]),
        "dependencies could not be fetched, above",
    )?;
    let build = Build::new(repository, &python)?;
    let mut binary = repository.cargo(&["build", "--release", "--locked", "--target", TARGET]);
    // Both packages are named, so that the wheel's crates have the same features and are compiled once.
    binary.args(["-p", "corella", "-p", "corella-python", "--bin", "corella"]);
    run(build.set(&mut binary), "the release build failed, above")?;

    let packages = build.folder.join("python");
    let _ = fs::remove_dir_all(&packages);
    let manifest = ["--manifest-path", "crates/corella-python/Cargo.toml"];
    let maturin = |arguments: &[&str]| {
        let mut command = repository.command(&python, &["-m", "maturin"]);
        command.args(arguments).args(manifest);
        command.arg("--out").arg(&packages);
        run(
            build.set(&mut command),
            "the Python package could not be built, above",
        )
    };
    maturin(&[
        "build",
        "--quiet",
        "--release",
        "--locked",
        "--target",
        TARGET,
        "--compatibility",
        "manylinux2014",
    ])?;
    maturin(&["sdist"])?;

    let mut pack = repository.command(&python, &["-B", "deploy/release/make_release.py"]);
    pack.arg("--binary")
        .arg(repository.target.join(TARGET).join("release/corella"))
        .arg("--python")
        .arg(packages)
        .arg("--output")
        .arg(repository.target.join("dist"));
    run(&mut pack, "nothing could be packed, above")
}

/// Builds a release, and installs, uses and removes each of its files on a system of Debian's packages.
pub fn try_install(repository: &Repository) -> Result<(), String> {
    if !succeeds(&mut repository.command("mmdebstrap".as_ref(), &["--version"])) {
        let install = "install mmdebstrap, in PATH (on Debian: `sudo apt-get install mmdebstrap`)";
        apt::install(repository, &["mmdebstrap"], install)?;
    }
    dist(repository, &[])?;
    let python = python::release_environment(repository)?;
    let mut command = repository.command(&python, &["-B", "deploy/release/try_install.py"]);
    command.arg(repository.target.join("dist"));
    run(&mut command, "a file of the release failed, above")
}

/// The settings with which built code runs on old systems and names no folder of this machine.
struct Build {
    folder: PathBuf,
    compiler: PathBuf,
    flags: String,
    seconds: String,
    target: PathBuf,
}

impl Build {
    fn new(repository: &Repository, python: &Path) -> Result<Self, String> {
        let folder = repository.target.join("ci-release-build");
        let compiler = folder.join("cc");
        let failed = |error| format!("{}: {error}", compiler.display());
        let programs = python.parent().unwrap_or(python).display();
        let script = format!(
            "#!/bin/sh\nPATH={programs}:$PATH exec cargo-zigbuild zig cc -- -target {LINKED_FOR} \"$@\"\n"
        );
        fs::create_dir_all(&folder).map_err(failed)?;
        // An unchanged file is not written again, because crates in C would be compiled again.
        if !fs::read(&compiler).is_ok_and(|existing| existing == script.as_bytes()) {
            fs::write(&compiler, script).map_err(failed)?;
        }
        fs::set_permissions(&compiler, Permissions::from_mode(0o755)).map_err(failed)?;
        let commit_time = ["log", "-1", "--format=%ct"];
        let seconds = match env::var("SOURCE_DATE_EPOCH") {
            Ok(seconds) => seconds,
            Err(_) => output(&mut repository.command("git".as_ref(), &commit_time))?,
        };
        Ok(Self {
            compiler,
            flags: renamed_paths(repository)?,
            seconds: seconds.trim().to_string(),
            target: repository.target.clone(),
            folder,
        })
    }

    fn set<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("CARGO_INCREMENTAL", "0")
            .env("CARGO_TARGET_DIR", &self.target)
            .env(
                "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER",
                &self.compiler,
            )
            .env("CC_x86_64_unknown_linux_gnu", &self.compiler)
            .env("CARGO_ENCODED_RUSTFLAGS", &self.flags)
            .env("SOURCE_DATE_EPOCH", &self.seconds)
    }
}

/// Returns rustc's flags that give folders of this machine the same names on all machines. A later flag takes
/// precedence.
fn renamed_paths(repository: &Repository) -> Result<String, String> {
    let mut names = vec![
        (repository.root.clone(), "/corella"),
        (repository.target.clone(), "/target"),
    ];
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home
        .or_else(|| Some(env::home_dir()?.join(".cargo")))
        .ok_or("the folder of cargo is unknown; set CARGO_HOME")?;
    let sources = home.join("registry/src");
    let failed = |error| format!("{}: {error}", sources.display());
    for registry in fs::read_dir(&sources).map_err(failed)? {
        names.push((registry.map_err(failed)?.path(), "/crates"));
    }
    let mut compiler = repository.command("rustc".as_ref(), &["--print", "sysroot"]);
    let sysroot = PathBuf::from(output(&mut compiler)?.trim());
    names.push((sysroot, "/rust"));
    let flag = |(folder, name): (PathBuf, &str)| {
        format!("--remap-path-prefix={}={name}", folder.display())
    };
    // Cargo separates flags by this character.
    Ok(names
        .into_iter()
        .map(flag)
        .collect::<Vec<_>>()
        .join("\u{1f}"))
}
