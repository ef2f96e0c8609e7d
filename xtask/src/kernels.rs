//! Compiles the CUDA executor's kernels on machines without a GPU, in the same way as beside one.

use std::fs;
use std::path::Path;

use crate::python;
use crate::repository::{Repository, run};

/// Compares the kernels' use of a GPU's resources with the record; `--update` writes the record.
pub fn kernels(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    compare(repository, &python::nvrtc_12(repository)?, arguments)?;
    compare(repository, &python::nvrtc_13(repository)?, arguments)
}

/// Compares kernels compiled by NVRTC 12, and tests the host's side with them.
pub fn kernels_12(repository: &Repository) -> Result<(), String> {
    let environment = python::nvrtc_12(repository)?;
    compare(repository, &environment, &[])?;
    test_host(repository, &environment, false)?;
    test_host(repository, &environment, true)
}

/// Compares kernels compiled by NVRTC 13, and tests the host's side with the ones for Hopper GPUs.
pub fn kernels_13(repository: &Repository) -> Result<(), String> {
    let environment = python::nvrtc_13(repository)?;
    compare(repository, &environment, &[])?;
    test_host(repository, &environment, true)
}

/// Runs an executor on a driver that computes nothing, and checks its calls.
fn test_host(repository: &Repository, environment: &Path, uses_wgmma: bool) -> Result<(), String> {
    let folder = repository.target.join("stand-in");
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut compile = repository.command(
        "cc".as_ref(),
        &["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"],
    );
    compile.arg("crates/corella-cuda/tests/stand_in/driver.c");
    compile.arg("-o").arg(folder.join("libcuda.so.1"));
    run(
        &mut compile,
        "the stand-in for the CUDA driver does not compile, above",
    )?;
    let mut command = repository.cargo(&[
        "test",
        "--locked",
        "--package",
        "corella-cuda",
        "--features",
        "kernel-table",
        "--test",
        "driver",
    ]);
    command
        .env("VIRTUAL_ENV", environment)
        .env("LD_LIBRARY_PATH", &folder)
        .env("CORELLA_CUDA_WGMMA", u8::from(uses_wgmma).to_string())
        // Cached kernels would not test the compiler.
        .env("XDG_CACHE_HOME", folder.join("cache"));
    let _ = fs::remove_dir_all(folder.join("cache"));
    run(&mut command, "the host's side of a GPU failed, above")
}

fn compare(
    repository: &Repository,
    environment: &Path,
    arguments: &[String],
) -> Result<(), String> {
    let mut command = repository.cargo(&[
        "run",
        "--quiet",
        "--locked",
        "--package",
        "corella-cuda",
        "--features",
        "kernel-table",
        "--example",
        "kernel_table",
        "--",
    ]);
    // The executor looks for NVRTC there, too.
    command.env("VIRTUAL_ENV", environment).args(arguments);
    run(
        &mut command,
        "kernels do not compile or are worse than before, above",
    )
}
