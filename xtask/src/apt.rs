//! Debian packages for tests.

use std::fs;
use std::path::Path;

use crate::repository::{Repository, run, succeeds};

/// `else_say` tells users of other systems, or without the right to install, the steps to take.
pub fn install(repository: &Repository, packages: &[&str], else_say: &str) -> Result<(), String> {
    let apt = |arguments: &[&str]| repository.command(Path::new("apt-get"), arguments);
    // An install usually fails because of a stale package list. If the update fails, the install
    // reports it.
    succeeds(&mut apt(&["update"]));
    let mut command = apt(&["install", "--yes", "--quiet", "--no-install-recommends"]);
    run(
        command
            .args(packages)
            .env("DEBIAN_FRONTEND", "noninteractive"),
        else_say,
    )
}

/// Unpacks a package into a folder of its own, without installing it or its dependencies.
pub fn unpack(
    repository: &Repository,
    package: &str,
    folder: &Path,
    else_say: &str,
) -> Result<(), String> {
    let failed = |error| format!("{}: {error}", folder.display());
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).map_err(failed)?;
    let download = || {
        let mut command =
            repository.command(Path::new("apt-get"), &["download", "--quiet", package]);
        command.current_dir(folder);
        command
    };
    if !succeeds(&mut download()) {
        succeeds(&mut repository.command(Path::new("apt-get"), &["update"]));
        run(&mut download(), else_say)?;
    }
    let mut entries = fs::read_dir(folder).map_err(failed)?;
    let archive = entries
        .find_map(|entry| Some(entry.ok()?.path()))
        .ok_or_else(|| format!("apt-get left nothing in {}", folder.display()))?;
    let mut extract = repository.command(Path::new("dpkg-deb"), &["--extract"]);
    run(extract.arg(archive).arg(folder), else_say)
}
