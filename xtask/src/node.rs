//! Installs the Node packages of the client tests under the target directory. Node itself comes with the Python
//! environment.

use std::fs;
use std::path::{Path, PathBuf};

use crate::repository::{Repository, run};

/// Returns the folder of the packages, which are installed again whenever the lock file changes. `python` is the
/// environment's interpreter.
pub fn packages(repository: &Repository, python: &Path) -> Result<PathBuf, String> {
    let arguments = ["--omit=optional"];
    install(
        repository,
        python,
        "tests/client/node",
        "ci-node",
        &arguments,
    )
}

/// Returns the folder of the coding agents. Their programs are optional packages, one for each platform. The lock file
/// leaves out the optional packages of qwen-code, which works without them.
pub fn agents(repository: &Repository, python: &Path) -> Result<PathBuf, String> {
    install(repository, python, "tests/client/agents", "ci-agents", &[])
}

fn install(
    repository: &Repository,
    python: &Path,
    list: &str,
    name: &str,
    arguments: &[&str],
) -> Result<PathBuf, String> {
    let folder = repository.target.join(name);
    let source = |name: &str| repository.root.join(list).join(name);
    let stamp = folder.join("installed.json");
    let lock = fs::read(source("package-lock.json"))
        .map_err(|error| format!("{list}/package-lock.json: {error}"))?;
    if fs::read(&stamp).is_ok_and(|installed| installed == lock) {
        return Ok(folder);
    }

    println!("installing the packages of {list}");
    let failed = |error| format!("{}: {error}", folder.display());
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(failed)?;
    for name in ["package.json", "package-lock.json"] {
        fs::copy(source(name), folder.join(name)).map_err(failed)?;
    }
    let npm = python.with_file_name("npm");
    let mut command = repository.command(&npm, &["ci", "--ignore-scripts"]);
    command.args(["--no-audit", "--no-fund"]).args(arguments);
    run(
        command.current_dir(&folder),
        "npm could not install the clients for Node; it needs a package registry \
         (npm_config_registry names another one than npm's own)",
    )?;
    fs::write(&stamp, lock).map_err(failed)?;
    Ok(folder)
}
