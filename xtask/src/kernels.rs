//! Compiles the kernels of the CUDA executor as they are compiled beside a GPU, on machines without one.

use std::path::Path;

use crate::python;
use crate::repository::{Repository, run};

/// Compares what kernels take of a GPU with what is recorded; `--update` records it.
pub fn kernels(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    for environment in python::nvrtc(repository)? {
        compare(repository, &environment, arguments)?;
    }
    Ok(())
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
    // Where the executor itself looks for NVRTC, too.
    command.env("VIRTUAL_ENV", environment).args(arguments);
    run(
        &mut command,
        "kernels do not compile or are worse than before, above",
    )
}
