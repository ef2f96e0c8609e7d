//! Packages of Debian that tests need.

use std::path::Path;

use crate::repository::{Repository, run, succeeds};

/// `else_say` tells somebody on another system, or without the right to install, what to do.
pub fn install(repository: &Repository, packages: &[&str], else_say: &str) -> Result<(), String> {
    let apt = |arguments: &[&str]| repository.command(Path::new("apt-get"), arguments);
    // A stale package list is the usual reason for an install to fail; an update that
    // fails is told by the install.
    succeeds(&mut apt(&["update"]));
    let mut command = apt(&["install", "--yes", "--quiet", "--no-install-recommends"]);
    run(
        command
            .args(packages)
            .env("DEBIAN_FRONTEND", "noninteractive"),
        else_say,
    )
}
