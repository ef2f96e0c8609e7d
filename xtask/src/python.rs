//! Makes the Python environments of the tests under the target directory. uv installs them, because pip takes minutes
//! where uv takes seconds.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::apt;
use crate::repository::{Repository, run, succeeds};

const UV_VERSION: &str = "0.9.10";
const CLIENT_PACKAGES: &str = "tests/client/requirements.lock";

/// The hand-edited lists of packages. Each has a lock file beside it, which names all versions.
const LISTS: [&str; 6] = [
    "deploy/release/requirements.txt",
    "tests/client/requirements.txt",
    "tests/client/aider/requirements.txt",
    "tests/client/llama_index/requirements.txt",
    "tests/client/routers/requirements.txt",
    "tests/python/requirements.txt",
];

/// The interpreter of the environment of the tests in `tests/client`, except LlamaIndex's.
pub fn environment(repository: &Repository) -> Result<PathBuf, String> {
    interpreter(repository, "ci-venv", CLIENT_PACKAGES)
}

/// The interpreter of the environment that builds and tests the Python package.
pub fn package_environment(repository: &Repository) -> Result<PathBuf, String> {
    interpreter(repository, "ci-python", "tests/python/requirements.lock")
}

/// The interpreter of the environment that builds releases.
pub fn release_environment(repository: &Repository) -> Result<PathBuf, String> {
    interpreter(repository, "ci-release", "deploy/release/requirements.lock")
}

/// Returns a pytest command that writes no files into the work tree.
pub fn pytest(repository: &Repository, python: &Path, folder: &str) -> Command {
    let arguments = ["-m", "pytest", "-p", "no:cacheprovider", folder];
    let mut command = repository.command(python, &arguments);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Returns the interpreter for LlamaIndex, whose pins conflict with other clients'.
pub fn llama_index(repository: &Repository) -> Result<PathBuf, String> {
    let list = "tests/client/llama_index/requirements.lock";
    interpreter(repository, "ci-llama-index", list)
}

/// Returns the interpreter for aider, whose pins conflict with other clients'.
pub fn aider(repository: &Repository) -> Result<PathBuf, String> {
    interpreter(
        repository,
        "ci-aider",
        "tests/client/aider/requirements.lock",
    )
}

/// The interpreter for routers that pair nodes.
pub fn routers(repository: &Repository) -> Result<PathBuf, String> {
    interpreter(
        repository,
        "ci-routers",
        "tests/client/routers/requirements.lock",
    )
}

/// Returns the folder of the environment with NVRTC of CUDA 12.
pub fn nvrtc_12(repository: &Repository) -> Result<PathBuf, String> {
    let list = "crates/corella-cuda/nvrtc-12-requirements.txt";
    interpreter(repository, "ci-nvrtc", list)?;
    Ok(repository.target.join("ci-nvrtc"))
}

/// Returns the folder of the environment with NVRTC of CUDA 13.
pub fn nvrtc_13(repository: &Repository) -> Result<PathBuf, String> {
    let list = "crates/corella-cuda/nvrtc-13-requirements.txt";
    interpreter(repository, "ci-nvrtc-13", list)?;
    Ok(repository.target.join("ci-nvrtc-13"))
}

/// Returns the folder of the source of the package `jsonschema`, which contains the JSON-Schema-Test-Suite, in the
/// installed version.
pub fn schema_suite(repository: &Repository) -> Result<PathBuf, String> {
    let folder = repository.target.join("ci-schema-suite");
    let packages = fs::read_to_string(repository.root.join(CLIENT_PACKAGES))
        .map_err(|error| format!("{CLIENT_PACKAGES}: {error}"))?;
    let is_it = |line: &&str| line.starts_with("jsonschema==");
    let package = packages
        .lines()
        .find(is_it)
        .ok_or_else(|| format!("{CLIENT_PACKAGES} has no jsonschema"))?;
    let source = folder.join(format!("{}.tar.gz", package.replace("==", "-")));
    if !source.is_file() {
        println!("fetching the source of {package}");
        let _ = fs::remove_dir_all(&folder);
        let mut download = repository.command(&uv_environment(repository)?, &["-m", "pip"]);
        download.args(["download", "--quiet", "--disable-pip-version-check"]);
        download.args(["--no-deps", "--no-binary=:all:", "--dest"]);
        run(
            download.arg(&folder).arg(package),
            "pip could not fetch a package's source; it needs a package index",
        )?;
    }
    Ok(folder)
}

/// Installs one package into a folder, without its dependencies, unless the folder has `file` of this package.
pub fn install_file(
    repository: &Repository,
    package: &str,
    folder: &Path,
    file: &str,
) -> Result<PathBuf, String> {
    let path = folder.join(file);
    let stamp = folder.join("package");
    if path.exists() && fs::read(&stamp).is_ok_and(|installed| installed == package.as_bytes()) {
        return Ok(path);
    }
    println!("installing {package}");
    let _ = fs::remove_dir_all(folder);
    install_alone(repository, package, folder)?;
    fs::write(&stamp, package).map_err(|error| format!("{}: {error}", stamp.display()))?;
    Ok(path)
}

/// Installs one package into a folder, without its dependencies.
pub fn install_alone(repository: &Repository, package: &str, folder: &Path) -> Result<(), String> {
    let mut command = uv(repository)?;
    command.args(["pip", "install", "--quiet", "--no-deps", "--target"]);
    run(command.arg(folder).arg(package), &cannot_install(package))
}

/// Installs a locally built wheel into an environment, in place of any earlier one.
pub fn install_wheel(repository: &Repository, python: &Path, wheel: &Path) -> Result<(), String> {
    let mut command = uv(repository)?;
    command.args(["pip", "install", "--quiet", "--no-index", "--no-deps"]);
    command.args(["--reinstall", "--python"]);
    run(
        command.arg(python).arg(wheel),
        "the wheel could not be installed, above",
    )
}

/// Writes the lock files anew, with the latest published versions.
pub fn lock(repository: &Repository) -> Result<(), String> {
    for list in LISTS {
        let mut command = uv(repository)?;
        command.args(["pip", "compile", "--quiet", "--upgrade", "--universal"]);
        command.args(["--no-annotate", "--no-header", "--no-emit-index-url"]);
        command.args(["--python-version", "3.11", list, "--output-file"]);
        run(
            command.arg(list.replace(".txt", ".lock")),
            "uv could not choose versions, above",
        )?;
    }
    Ok(())
}

/// Returns the interpreter of an environment, which is made again whenever its list of packages changes.
fn interpreter(repository: &Repository, name: &str, list: &str) -> Result<PathBuf, String> {
    // Stages and jobs of set-up may need one environment at the same time.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock();
    let folder = repository.target.join(name);
    let python = folder.join("bin/python");
    let stamp = folder.join("packages");
    let packages =
        fs::read(repository.root.join(list)).map_err(|error| format!("{list}: {error}"))?;
    if fs::read(&stamp).is_ok_and(|installed| installed == packages)
        && succeeds(&mut repository.command(&python, &["--version"]))
    {
        return Ok(python);
    }

    println!("making a Python environment for {list}");
    let _ = fs::remove_dir_all(&folder);
    let mut make = uv(repository)?;
    make.args(["venv", "--quiet", "--python", "python3"]);
    run(make.arg(&folder), "uv could not make an environment, above")?;
    let mut install = uv(repository)?;
    install.args(["pip", "install", "--quiet", "--python"]);
    install.arg(&python).args(["--requirement", list]);
    run(&mut install, &cannot_install(list))?;
    fs::write(&stamp, packages).map_err(|error| format!("{}: {error}", stamp.display()))?;
    Ok(python)
}

fn cannot_install(what: &str) -> String {
    format!(
        "uv could not install {what}; it needs a package index (PIP_INDEX_URL names another one than PyPI)"
    )
}

/// Returns a uv command with the package index and the certificates of pip's variables.
fn uv(repository: &Repository) -> Result<Command, String> {
    let program = uv_environment(repository)?.with_file_name("uv");
    let mut command = repository.command(&program, &[]);
    command.env("UV_SYSTEM_CERTS", "1");
    for (of_pip, of_uv) in [
        ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"),
        ("PIP_CERT", "SSL_CERT_FILE"),
    ] {
        if let Some(value) = env::var_os(of_pip) {
            command.env(of_uv, value);
        }
    }
    Ok(command)
}

/// Returns the interpreter of the environment with uv and pip.
fn uv_environment(repository: &Repository) -> Result<PathBuf, String> {
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock();
    let folder = repository.target.join("ci-uv");
    let python = folder.join("bin/python");
    let stamp = folder.join("version");
    if fs::read_to_string(&stamp).is_ok_and(|version| version == UV_VERSION)
        && succeeds(&mut repository.command(&folder.join("bin/uv"), &["--version"]))
    {
        return Ok(python);
    }
    println!("installing uv {UV_VERSION}");
    let _ = fs::remove_dir_all(&folder);
    make(repository, &folder)?;
    let mut install = repository.command(&python, &["-m", "pip", "install", "--quiet"]);
    install.args(["--disable-pip-version-check", &format!("uv=={UV_VERSION}")]);
    run(
        &mut install,
        "pip could not install uv; it needs a package index (PIP_INDEX_URL names another one than PyPI)",
    )?;
    fs::write(&stamp, UV_VERSION).map_err(|error| format!("{}: {error}", stamp.display()))?;
    Ok(python)
}

fn make(repository: &Repository, folder: &Path) -> Result<(), String> {
    let python = Path::new("python3");
    let folder_name = folder.to_string_lossy();
    let arguments = ["-m", "venv", folder_name.as_ref()];
    let modern = "import sys; sys.exit(sys.version_info < (3, 11))";
    if succeeds(&mut repository.command(python, &arguments)) {
        return if succeeds(&mut repository.command(python, &["-c", modern])) {
            Ok(())
        } else {
            Err("the client tests need Python 3.11 or later as `python3`".into())
        };
    }
    // Debian ships Python without venv.
    let install = "install Python 3.11 or later with venv \
                   (on Debian: `sudo apt-get install python3 python3-venv`)";
    println!("python3 -m venv does not work; trying apt-get");
    apt::install(repository, &["python3", "python3-venv"], install)?;
    let _ = fs::remove_dir_all(folder);
    run(&mut repository.command(python, &arguments), install)
}
