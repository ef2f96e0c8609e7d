//! Builds the Python package as a wheel, installs it, and runs its tests.

use std::fs;
use std::path::PathBuf;

use crate::python;
use crate::repository::{Repository, run};

/// Tests the package against the test profile's program; `arguments` go to pytest.
pub fn test(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let python = python::package_environment(repository)?;
    let wheel = build(repository)?;
    python::install_wheel(repository, &python, &wheel)?;
    let mut command = python::pytest(repository, &python, "tests/python");
    command
        .args(arguments)
        .env("CORELLA_BIN", repository.binary())
        .env("CORELLA_WHEEL", wheel);
    run(&mut command, "tests of the Python package failed, above")
}

/// Builds the wheel like the tests, so that both share dependencies.
pub fn build(repository: &Repository) -> Result<PathBuf, String> {
    let python = python::package_environment(repository)?;
    let folder = repository.target.join("wheel");
    // A wheel of another version would be found beside this one.
    let _ = fs::remove_dir_all(&folder);
    let folder_name = folder.to_string_lossy();
    let arguments = [
        "-m",
        "maturin",
        "build",
        "--quiet",
        "--profile",
        "dev",
        "--locked",
        "--manifest-path",
        "crates/corella-python/Cargo.toml",
        "--out",
        folder_name.as_ref(),
    ];
    let mut command = repository.command(&python, &arguments);
    command
        .env("CARGO_INCREMENTAL", "0")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_TARGET_DIR", &repository.target);
    run(&mut command, "the wheel could not be built, above")?;
    let built = fs::read_dir(&folder).map_err(|error| format!("{folder_name}: {error}"))?;
    let mut paths = built.filter_map(|entry| Some(entry.ok()?.path()));
    paths
        .find(|path| path.extension().is_some_and(|end| end == "whl"))
        .ok_or_else(|| format!("{folder_name} has no wheel"))
}
