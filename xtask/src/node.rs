//! Installs the packages for Node that the client tests need, under the target directory. Node itself comes
//! with the Python environment.

use std::fs;
use std::path::{Path, PathBuf};

use crate::repository::{Repository, run};

const FOLDER: &str = "tests/client/node";

/// The folder of the packages, which are installed again whenever the lock file changes. `python` is the
/// interpreter of the environment.
pub fn packages(repository: &Repository, python: &Path) -> Result<PathBuf, String> {
    let folder = repository.target.join("ci-node");
    let source = |name: &str| repository.root.join(FOLDER).join(name);
    let stamp = folder.join("installed.json");
    let lock = fs::read(source("package-lock.json"))
        .map_err(|error| format!("{FOLDER}/package-lock.json: {error}"))?;
    if fs::read(&stamp).is_ok_and(|installed| installed == lock) {
        return Ok(folder);
    }

    println!("installing the packages of {FOLDER}");
    let failed = |error| format!("{}: {error}", folder.display());
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(failed)?;
    for name in ["package.json", "package-lock.json"] {
        fs::copy(source(name), folder.join(name)).map_err(failed)?;
    }
    let npm = python.with_file_name("npm");
    let arguments = [
        "ci",
        "--ignore-scripts",
        "--omit=optional",
        "--no-audit",
        "--no-fund",
    ];
    run(
        repository.command(&npm, &arguments).current_dir(&folder),
        "npm could not install the clients for Node; it needs a package registry \
         (npm_config_registry names another one than npm's own)",
    )?;
    fs::write(&stamp, lock).map_err(failed)?;
    Ok(folder)
}
