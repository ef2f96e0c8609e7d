//! Installs the dependencies of the stages of `ci` and `night`, in the target directory if possible. Downloads run
//! concurrently with each other and with a first compile.

use std::process::Command;
use std::thread;

use crate::repository::{Repository, run, succeeds};
use crate::{apt, book, deploy, nixl, node, python};

/// System programs: the option for their version, their Debian package, and their users.
const PROGRAMS: [(&str, &str, &str, &str); 4] = [
    ("etcd", "--version", "etcd-server", "tests of the registry"),
    ("openssl", "version", "openssl", "tests of TLS"),
    ("chromium", "--version", "chromium", "tests of the page"),
    ("rpmbuild", "--version", "rpm", "tests of releases"),
];

/// Installs the dependencies of `ci`.
pub fn for_ci(repository: &Repository) -> Result<(), String> {
    together(&[
        &|| rust_components(repository),
        &|| {
            PROGRAMS
                .iter()
                .try_for_each(|program| install(repository, *program))
        },
        &|| {
            let python = python::environment(repository)?;
            println!("Python environment: {}", python.display());
            let packages = node::packages(repository, &python)?;
            println!("packages for Node: {}", packages.display());
            let package = python::package_environment(repository)?;
            println!("environment of the Python package: {}", package.display());
            let mdbook = book::mdbook(repository)?;
            println!("mdBook: {}", mdbook.display());
            let nixl = nixl::library(repository)?;
            println!("NIXL: {}", nixl.display());
            Ok(())
        },
    ])
}

/// Installs the dependencies of the night's client tests.
pub fn for_night_clients(repository: &Repository) -> Result<(), String> {
    together(&[
        &|| {
            let llama_index = python::llama_index(repository)?;
            println!("LlamaIndex: {}", llama_index.display());
            let suite = python::schema_suite(repository)?;
            println!("JSON-Schema-Test-Suite: {}", suite.display());
            let aider = python::aider(repository)?;
            println!("aider: {}", aider.display());
            let routers = python::routers(repository)?;
            println!("routers: {}", routers.display());
            let agents = node::agents(repository, &python::environment(repository)?)?;
            println!("coding agents: {}", agents.display());
            Ok(())
        },
        &|| {
            let programs = deploy::programs(repository)?;
            println!("kubectl, helm, promtool: {}", programs.display());
            Ok(())
        },
    ])
}

/// Runs jobs concurrently and returns the first failure.
fn together(jobs: &[&(dyn Fn() -> Result<(), String> + Sync)]) -> Result<(), String> {
    thread::scope(|scope| {
        let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(job)).collect();
        let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        for outcome in outcomes {
            outcome.map_err(|_| "a job of set-up panicked, above")??;
        }
        Ok(())
    })
}

fn rust_components(repository: &Repository) -> Result<(), String> {
    for (component, check) in [("rustfmt", "fmt"), ("clippy", "clippy")] {
        if succeeds(&mut repository.cargo(&[check, "--version"])) {
            continue;
        }
        println!("installing {component}");
        run(
            &mut repository.command("rustup".as_ref(), &["component", "add", component]),
            &format!("cargo {check} is missing; install Rust's {component} component"),
        )?;
    }
    Ok(())
}

fn install(
    repository: &Repository,
    (program, version, package, user): (&str, &str, &str, &str),
) -> Result<(), String> {
    let tell_version = || -> Command { repository.command(program.as_ref(), &[version]) };
    if !succeeds(&mut tell_version()) {
        println!("installing {program}");
        let install =
            format!("install {program}, in PATH (on Debian: `sudo apt-get install {package}`)");
        apt::install(repository, &[package], &install)?;
    }
    run(
        &mut tell_version(),
        &format!("{program} does not start; {user} need it"),
    )
}
