//! The stages of CI. Each prints its time; the first failure ends the run.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::repository::{Repository, run, succeeds};
use crate::{apt, book, isas, nixl, node, python, tidy};

pub struct Stage {
    pub name: &'static str,
    pub about: &'static str,
    pub takes_arguments: bool,
    /// Runs the stage with the arguments that follow its name on the command line.
    pub run: fn(&Repository, &[String]) -> Result<(), String>,
}

pub const STAGES: [Stage; 13] = [
    Stage {
        name: "set-up",
        about: "install what the other stages need: Rust components, a Python environment, packages for Node, mdBook, NIXL, etcd, openssl",
        takes_arguments: false,
        run: set_up,
    },
    Stage {
        name: "fmt",
        about: "the code is formatted as rustfmt does it",
        takes_arguments: false,
        run: |repository, _| {
            run(
                &mut repository.cargo(&["fmt", "--all", "--check"]),
                "format with `cargo fmt --all`",
            )
        },
    },
    Stage {
        name: "clippy",
        about: "clippy has no warnings",
        takes_arguments: false,
        run: |repository, _| {
            run(
                &mut repository.cargo(&[
                    "clippy",
                    "--workspace",
                    "--all-targets",
                    "--all-features",
                    "--locked",
                    "--",
                    "-D",
                    "warnings",
                ]),
                "clippy has warnings, above",
            )
        },
    },
    Stage {
        name: "tidy",
        about: "layers, file headers, comments and the other rules of this repository",
        takes_arguments: false,
        run: |repository, _| tidy::run(repository),
    },
    Stage {
        name: "test",
        about: "unit, property, golden and conformance tests; arguments go to cargo test",
        takes_arguments: true,
        run: test,
    },
    Stage {
        name: "isas",
        about: "tests of the executor, goldens and command line with each instruction set of this machine; arguments go to cargo test",
        takes_arguments: true,
        run: isas::isas,
    },
    Stage {
        name: "tiles",
        about: "the CPU executor's tests with AMX emulated where it is missing; arguments go to cargo test",
        takes_arguments: true,
        run: tiles,
    },
    Stage {
        name: "sim",
        about: "simulated runs of one node and of pairs, with faults, in virtual time: `--seeds N`, or `--seed N` to repeat one, of pairs with `--pairs`",
        takes_arguments: true,
        run: sim,
    },
    Stage {
        name: "corpus",
        about: "properties of the built-in model's training text; arguments go to pytest",
        takes_arguments: true,
        run: |repository, arguments| {
            let mut command = pytest(repository, "models/nano")?;
            run(command.args(arguments), "corpus tests failed, above")
        },
    },
    Stage {
        name: "build",
        about: "build the release binary",
        takes_arguments: false,
        run: build,
    },
    Stage {
        name: "e2e",
        about: "official clients and the commands of the book against the release binary; arguments go to pytest",
        takes_arguments: true,
        run: e2e,
    },
    Stage {
        name: "docs",
        about: "rustdoc has no warnings",
        takes_arguments: false,
        run: |repository, _| {
            run(
                repository
                    .cargo(&["doc", "--workspace", "--no-deps", "--locked"])
                    .env("RUSTDOCFLAGS", "-D warnings"),
                "rustdoc has warnings, above",
            )
        },
    },
    Stage {
        name: "book",
        about: "the book in docs builds, and its links lead to existing pages",
        takes_arguments: false,
        run: |repository, _| book::build(repository),
    },
];

/// What is no check, and so no part of `ci`.
pub const TASKS: [Stage; 1] = [Stage {
    name: "dist",
    about: "pack the release binary for others, in target/dist: archive, bill of materials, checksums",
    takes_arguments: false,
    run: dist,
}];

fn dist(repository: &Repository, _: &[String]) -> Result<(), String> {
    build(repository, &[])?;
    let mut command = repository.command("python3".as_ref(), &["deploy/make_archive.py"]);
    command
        .arg("--binary")
        .arg(repository.target.join("release/corella"))
        .arg("--output")
        .arg(repository.target.join("dist"));
    run(&mut command, "nothing could be packed, above")
}

pub fn run_all(repository: &Repository) -> Result<(), String> {
    let start = Instant::now();
    let mut times = Vec::new();
    for (index, stage) in STAGES.iter().enumerate() {
        println!(
            "\n==> {}/{} {}: {}",
            index + 1,
            STAGES.len(),
            stage.name,
            stage.about
        );
        let stage_start = Instant::now();
        let outcome = (stage.run)(repository, &[]);
        times.push((stage.name, stage_start.elapsed()));
        if let Err(reason) = outcome {
            print_times(&times, Some(stage.name));
            return Err(format!(
                "stage {} failed: {reason}\nonly this stage: `cargo xtask {}`",
                stage.name, stage.name
            ));
        }
        println!(
            "==> {} passed in {}",
            stage.name,
            minutes(stage_start.elapsed())
        );
    }
    print_times(&times, None);
    println!("ci: all stages passed in {}", minutes(start.elapsed()));
    Ok(())
}

fn print_times(times: &[(&str, Duration)], failed: Option<&str>) {
    println!();
    for (name, time) in times {
        let outcome = if failed == Some(*name) {
            "FAILED"
        } else {
            "ok"
        };
        println!("{name:<8} {:>8}  {outcome}", minutes(*time));
    }
}

fn minutes(time: Duration) -> String {
    let seconds = time.as_secs();
    format!(
        "{}:{:02}.{}",
        seconds / 60,
        seconds % 60,
        time.subsec_millis() / 100
    )
}

fn set_up(repository: &Repository, _: &[String]) -> Result<(), String> {
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
    let python = python::environment(repository)?;
    println!("Python environment: {}", python.display());
    let packages = node::packages(repository, &python)?;
    println!("packages for Node: {}", packages.display());
    let llama_index = python::llama_index(repository)?;
    println!("LlamaIndex: {}", llama_index.display());
    let suite = python::schema_suite(repository)?;
    println!("JSON-Schema-Test-Suite: {}", suite.display());
    let mdbook = book::mdbook(repository)?;
    println!("mdBook: {}", mdbook.display());
    let nixl = nixl::library(repository)?;
    println!("NIXL: {}", nixl.display());
    let version = || repository.command("etcd".as_ref(), &["--version"]);
    if !succeeds(&mut version()) {
        println!("installing etcd");
        let install = "install etcd 3.4 or later, in PATH \
                       (on Debian: `sudo apt-get install etcd-server`)";
        apt::install(repository, &["etcd-server"], install)?;
    }
    run(
        &mut version(),
        "etcd does not start; tests of the registry need it",
    )?;
    let version = || repository.command("openssl".as_ref(), &["version"]);
    if !succeeds(&mut version()) {
        println!("installing openssl");
        let install = "install openssl, in PATH (on Debian: `sudo apt-get install openssl`)";
        apt::install(repository, &["openssl"], install)?;
    }
    run(
        &mut version(),
        "openssl does not start; tests of TLS need it",
    )?;
    let version = || repository.command("chromium".as_ref(), &["--version"]);
    if !succeeds(&mut version()) {
        println!("installing Chromium");
        let install =
            "install Chromium as `chromium`, in PATH (on Debian: `sudo apt-get install chromium`)";
        apt::install(repository, &["chromium"], install)?;
    }
    run(
        &mut version(),
        "Chromium does not start; tests of the page need it",
    )
}

fn test(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    cargo_test(repository, &["--workspace"], arguments)
}

fn tiles(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let emulated = ["--package", "corella-cpu", "--features", "emulated-tiles"];
    cargo_test(repository, &emulated, arguments)
}

fn cargo_test(repository: &Repository, what: &[&str], arguments: &[String]) -> Result<(), String> {
    let mut command = repository.cargo(&["test", "--no-fail-fast", "--locked"]);
    run(command.args(what).args(arguments), "tests failed, above")
}

fn sim(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let play = |arguments: &[&str]| {
        let mut command = repository.cargo(&[
            "run",
            "--quiet",
            "--locked",
            "--package",
            "corella-sim",
            "--",
        ]);
        run(
            command.args(arguments),
            "a simulated run broke a rule, above",
        )
    };
    if !arguments.is_empty() {
        return play(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    }
    play(&["--seeds", "2000"])?;
    play(&["--pairs", "--seeds", "2000"])
}

fn build(repository: &Repository, _: &[String]) -> Result<(), String> {
    run(
        &mut repository.cargo(&["build", "--release", "--package", "corella", "--locked"]),
        "the release build failed, above",
    )
}

fn e2e(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let mut command = pytest(repository, "tests/client")?;
    let packages = node::packages(repository, &python::environment(repository)?)?;
    command.env("CORELLA_NODE_PACKAGES", packages);
    command.env("CORELLA_LLAMA_INDEX", python::llama_index(repository)?);
    command.env("CORELLA_SCHEMA_SUITE", python::schema_suite(repository)?);
    let binary = match std::env::var_os("CORELLA_BIN") {
        Some(binary) => binary.into(),
        None => {
            build(repository, &[])?;
            repository.target.join("release/corella")
        }
    };
    command.args(arguments).env("CORELLA_BIN", binary);
    run(&mut command, "end-to-end tests failed, above")
}

/// A pytest command that writes no files into the work tree.
fn pytest(repository: &Repository, folder: &str) -> Result<Command, String> {
    let python = python::environment(repository)?;
    let arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-v", folder];
    let mut command = repository.command(&python, &arguments);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    Ok(command)
}
