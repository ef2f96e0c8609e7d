//! Installs NIXL, which moves KV rows in tests, under the target directory.

use std::path::PathBuf;

use crate::python;
use crate::repository::Repository;

/// NIXL's package. It is built for CUDA 12, but its libraries also work without CUDA.
const PACKAGE: &str = "nixl-cu12==1.5.1";
/// The library's path in the package.
const LIBRARY: &str = ".nixl_cu12.mesonpy.libs/libnixl_capi.so";

/// Returns the path at which tests look for the library. Installs the package if it is missing or has another version.
pub fn library(repository: &Repository) -> Result<PathBuf, String> {
    let folder = repository.target.join("nixl");
    // The package's Python part, which is not used here, would bring gigabytes.
    python::install_file(repository, PACKAGE, &folder, LIBRARY)
}
