//! Makes the environments of the tests in Python, under the target directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::apt;
use crate::repository::{Repository, run, succeeds};

const REQUIREMENTS: &str = "tests/client/requirements.txt";

/// The interpreter of the environment of the tests in `tests/client`, except LlamaIndex's.
pub fn environment(repository: &Repository) -> Result<PathBuf, String> {
    interpreter(repository, "ci-venv", REQUIREMENTS)
}

/// The interpreter of the environment that builds and tests the Python package.
pub fn package_environment(repository: &Repository) -> Result<PathBuf, String> {
    interpreter(repository, "ci-python", "tests/python/requirements.txt")
}

/// A pytest command that writes no files into the work tree.
pub fn pytest(repository: &Repository, python: &Path, folder: &str) -> Command {
    let arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-v", folder];
    let mut command = repository.command(python, &arguments);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// The interpreter for LlamaIndex, whose pins do not go with those of other clients.
pub fn llama_index(repository: &Repository) -> Result<PathBuf, String> {
    let list = "tests/client/llama_index/requirements.txt";
    interpreter(repository, "ci-llama-index", list)
}

/// The folders of the environments that have NVRTC, one of CUDA 12 and one of CUDA 13.
pub fn nvrtc(repository: &Repository) -> Result<[PathBuf; 2], String> {
    let environment = |folder: &str, list: &str| {
        interpreter(repository, folder, &format!("crates/corella-cuda/{list}"))?;
        Ok::<_, String>(repository.target.join(folder))
    };
    Ok([
        environment("ci-nvrtc", "nvrtc-12-requirements.txt")?,
        environment("ci-nvrtc-13", "nvrtc-13-requirements.txt")?,
    ])
}

/// The folder of the source of the package `jsonschema`, which has the JSON-Schema-Test-Suite in it. It is of the
/// version that is installed.
pub fn schema_suite(repository: &Repository) -> Result<PathBuf, String> {
    let python = environment(repository)?;
    let folder = repository.target.join("ci-schema-suite");
    let requirements = fs::read_to_string(repository.root.join(REQUIREMENTS))
        .map_err(|error| format!("{REQUIREMENTS}: {error}"))?;
    let is_it = |line: &&str| line.starts_with("jsonschema==");
    let package = { requirements.lines().find(is_it) }
        .ok_or_else(|| format!("{REQUIREMENTS} has no jsonschema"))?;
    let source = folder.join(format!("{}.tar.gz", package.replace("==", "-")));
    if !source.is_file() {
        println!("fetching the source of {package}");
        let _ = fs::remove_dir_all(&folder);
        let destination = folder.to_string_lossy();
        let arguments = [
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-binary=:all:",
            "--dest",
            destination.as_ref(),
            package,
        ];
        run(
            &mut repository.command(&python, &arguments),
            "pip could not fetch a package's source; it needs a package index",
        )?;
    }
    Ok(folder)
}

/// The interpreter of an environment, which is made again whenever its list of requirements changes.
fn interpreter(repository: &Repository, name: &str, list: &str) -> Result<PathBuf, String> {
    let folder = repository.target.join(name);
    let python = folder.join("bin/python");
    let stamp = folder.join("requirements.txt");
    let requirements =
        fs::read(repository.root.join(list)).map_err(|error| format!("{list}: {error}"))?;
    if fs::read(&stamp).is_ok_and(|installed| installed == requirements)
        && succeeds(&mut repository.command(&python, &["--version"]))
    {
        return Ok(python);
    }

    println!("making a Python environment for {list}");
    let _ = fs::remove_dir_all(&folder);
    make(repository, &folder)?;
    run(
        &mut repository.command(
            &python,
            &[
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--requirement",
                list,
            ],
        ),
        "pip could not install the packages; it needs a package index \
         (PIP_INDEX_URL names another one than PyPI)",
    )?;
    fs::write(&stamp, requirements).map_err(|error| format!("{}: {error}", stamp.display()))?;
    Ok(python)
}

fn make(repository: &Repository, folder: &Path) -> Result<(), String> {
    let python = Path::new("python3");
    let folder_name = folder.to_string_lossy();
    let arguments = ["-m", "venv", folder_name.as_ref()];
    let modern = "import sys; sys.exit(sys.version_info < (3, 10))";
    if succeeds(&mut repository.command(python, &arguments)) {
        return if succeeds(&mut repository.command(python, &["-c", modern])) {
            Ok(())
        } else {
            Err("the client tests need Python 3.10 or later as `python3`".into())
        };
    }
    // Debian ships Python without venv.
    let install = "install Python 3.10 or later with venv \
                   (on Debian: `sudo apt-get install python3 python3-venv`)";
    println!("python3 -m venv does not work; trying apt-get");
    apt::install(repository, &["python3", "python3-venv"], install)?;
    let _ = fs::remove_dir_all(folder);
    run(&mut repository.command(python, &arguments), install)
}
