//! The stages of CI. Each prints its time; the first failure ends the run.

use std::time::{Duration, Instant};

use crate::repository::{Repository, run, succeeds};
use crate::{apt, book, deploy, gpu, isas, kernels, nixl, node, python, tidy, wheel};

pub struct Stage {
    pub name: &'static str,
    pub about: &'static str,
    pub takes_arguments: bool,
    /// Runs the stage with the arguments that follow its name on the command line.
    pub run: fn(&Repository, &[String]) -> Result<(), String>,
}

pub const STAGES: [Stage; 15] = [
    Stage {
        name: "set-up",
        about: "install what the other stages need: Rust components, a Python environment, packages for Node, mdBook, NIXL, kubectl, helm, promtool, etcd, openssl",
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
        about: "unit, property, golden and conformance tests, those for GPUs on a device in host memory; arguments go to cargo test",
        takes_arguments: true,
        run: test,
    },
    Stage {
        name: "isas",
        about: "tests of the executor, goldens and command line with each instruction set of this machine but the best, which stage test uses; arguments go to cargo test",
        takes_arguments: true,
        run: isas::isas,
    },
    Stage {
        name: "tiles",
        about: "the CPU executor's tests held to AMX, which is emulated where it is missing; arguments go to cargo test",
        takes_arguments: true,
        run: isas::tiles,
    },
    Stage {
        name: "kernels",
        about: "kernels for GPUs compile, and take no more registers and shared memory than recorded, or `--update` records it; their host's side works",
        takes_arguments: true,
        run: kernels::kernels,
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
            let python = python::environment(repository)?;
            let mut command = python::pytest(repository, &python, "models/nano");
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
        name: "wheel",
        about: "the Python package is built, installed and tested against the release binary; arguments go to pytest",
        takes_arguments: true,
        run: wheel_tests,
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
pub const TASKS: [Stage; 2] = [
    Stage {
        name: "dist",
        about: "pack the release binary for others, in target/dist: archive, bill of materials, checksums",
        takes_arguments: false,
        run: dist,
    },
    Stage {
        name: "gpu",
        about: "pack tests and benchmarks for a machine with a GPU, in target/gpu; `--run --results FOLDER` runs them here",
        takes_arguments: true,
        run: gpu::gpu,
    },
];

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
    let package = python::package_environment(repository)?;
    println!("environment of the Python package: {}", package.display());
    let packages = node::packages(repository, &python)?;
    println!("packages for Node: {}", packages.display());
    for nvrtc in python::nvrtc(repository)? {
        println!("NVRTC: {}", nvrtc.display());
    }
    let llama_index = python::llama_index(repository)?;
    println!("LlamaIndex: {}", llama_index.display());
    let suite = python::schema_suite(repository)?;
    println!("JSON-Schema-Test-Suite: {}", suite.display());
    let mdbook = book::mdbook(repository)?;
    println!("mdBook: {}", mdbook.display());
    let nixl = nixl::library(repository)?;
    println!("NIXL: {}", nixl.display());
    let programs = deploy::programs(repository)?;
    println!("kubectl, helm, promtool: {}", programs.display());
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
    let mut command = repository.cargo(&["test", "--no-fail-fast", "--locked", "--workspace"]);
    command.args(WITH_EMULATED_GPU).args(arguments);
    run(&mut command, "tests failed, above")
}

/// With this the tests of corella-cuda run on a device in host memory. Stages that share what they build
/// have the same features.
pub const WITH_EMULATED_GPU: [&str; 2] = [
    "--features",
    "corella-cuda/emulated-device,corella-cuda/speed",
];

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
    // The Python package is named, too, so that it finds what both are made of with the same features.
    let packages = ["--package", "corella", "--package", "corella-python"];
    let mut command = repository.cargo(&["build", "--release", "--locked", "--bins"]);
    run(command.args(packages), "the release build failed, above")
}

fn wheel_tests(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    if !repository.has_own_binary() {
        build(repository, &[])?;
    }
    wheel::test(repository, arguments)
}

fn e2e(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let python = python::environment(repository)?;
    let mut command = python::pytest(repository, &python, "tests/client");
    let packages = node::packages(repository, &python)?;
    command.env("CORELLA_NODE_PACKAGES", packages);
    command.env("CORELLA_LLAMA_INDEX", python::llama_index(repository)?);
    command.env("CORELLA_SCHEMA_SUITE", python::schema_suite(repository)?);
    command.env("PATH", deploy::path(repository)?);
    if !repository.has_own_binary() {
        build(repository, &[])?;
    }
    // Most of these tests wait most of the time. Those of a file share servers.
    command.args(["--numprocesses", "2", "--dist", "loadfile"]);
    command
        .args(arguments)
        .env("CORELLA_BIN", repository.binary());
    run(&mut command, "end-to-end tests failed, above")
}
