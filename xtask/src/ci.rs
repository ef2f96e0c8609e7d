//! CI's checks after `cargo xtask test`, whose builds they use.

use crate::repository::{Repository, run};
use crate::stage::{self, Stage};
use crate::{book, deploy, limit, night, node, python, set_up, test, tidy, wheel};

pub const STAGES: [Stage; 12] = [
    Stage {
        name: "set-up",
        about: "install what the other stages need: Rust components, Python environments, packages for Node, mdBook, NIXL, etcd, openssl, Chromium, rpmbuild",
        takes_arguments: false,
        run: |repository, _| set_up::for_ci(repository),
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
            let mut command = repository.cargo(&["clippy", "--workspace", "--all-targets"]);
            command.args(["--all-features", "--locked", "--", "-D", "warnings"]);
            run(&mut command, "clippy has warnings, above")
        },
    },
    Stage {
        name: "tidy",
        about: "layers, file headers, comments and the other rules of this repository",
        takes_arguments: false,
        run: |repository, _| tidy::run(repository),
    },
    Stage {
        name: "programs",
        about: "tests in Rust that need etcd, openssl or NIXL",
        takes_arguments: false,
        run: |repository, _| test::programs(repository),
    },
    Stage {
        name: "sim",
        about: "simulated runs of one node, of pairs and of fleets, with faults, in virtual time: `--seeds N`, or `--seed N` to repeat one, of pairs with `--pairs`, of fleets with `--fleets`, of fleets of prefill and decode nodes with `--roles`",
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
        name: "e2e",
        about: "official clients and the commands of the book against the program as tests build it; arguments go to pytest",
        takes_arguments: true,
        run: |repository, arguments| clients(repository, "not night", arguments),
    },
    Stage {
        name: "wheel",
        about: "the Python package is built, installed and tested; arguments go to pytest",
        takes_arguments: true,
        run: wheel::test,
    },
    Stage {
        name: "docs",
        about: "rustdoc has no warnings, and examples in documentation work",
        takes_arguments: false,
        run: |repository, _| {
            let mut command = repository.cargo(&["doc", "--workspace", "--all-features"]);
            command.args(["--no-deps", "--locked"]);
            run(
                command.env("RUSTDOCFLAGS", "-D warnings"),
                "rustdoc has warnings, above",
            )?;
            test::documentation(repository)
        },
    },
    Stage {
        name: "book",
        about: "the book in docs builds, and its links lead to existing pages",
        takes_arguments: false,
        run: |repository, _| book::build(repository),
    },
    Stage {
        name: "night-part",
        about: "one part of the night, drawn by the commit",
        takes_arguments: false,
        run: |repository, _| night::run_drawn(repository),
    },
];

pub fn run_all(repository: &Repository) -> Result<(), String> {
    let stages: Vec<&Stage> = STAGES.iter().collect();
    let time = stage::run_all(repository, "ci", &stages)?;
    if let Some(test_time) = test::recorded_time(repository) {
        let what = "cargo xtask test and then cargo xtask ci";
        limit::print_time(what, time + test_time, limit::CHECK);
    }
    Ok(())
}

/// Plays simulated runs. By default it plays 2,000 runs each of one node, of pairs and of fleets, and 500 runs of
/// fleets with roles.
pub fn sim(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    if !arguments.is_empty() {
        return play(repository, arguments);
    }
    let play_first = |kind: &[&str], num_seeds: &str| {
        let arguments = [kind, &["--seeds", num_seeds]].concat();
        let arguments: Vec<_> = arguments.into_iter().map(String::from).collect();
        play(repository, &arguments)
    };
    play_first(&[], "2000")?;
    play_first(&["--pairs"], "2000")?;
    play_first(&["--fleets"], "2000")?;
    play_first(&["--roles"], "500")
}

/// Plays simulated runs with these arguments of the simulator.
pub fn play(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    // `cargo build` would build the simulator again: without tests, its dependencies have other features.
    test::binaries(repository)?;
    let program = repository.target.join("debug/corella-sim");
    let mut command = repository.command(&program, &[]);
    run(
        command.args(arguments),
        "a simulated run broke a rule, above",
    )
}

/// Runs the tests of `tests/client` with a marker, against the binary of the test profile.
pub fn clients(repository: &Repository, marker: &str, arguments: &[String]) -> Result<(), String> {
    let python = python::environment(repository)?;
    let mut command = python::pytest(repository, &python, "tests/client");
    let packages = node::packages(repository, &python)?;
    command.env("CORELLA_NODE_PACKAGES", packages);
    command.env("PATH", deploy::path(repository)?);
    if marker == "night" {
        command.env("CORELLA_LLAMA_INDEX", python::llama_index(repository)?);
        command.env("CORELLA_SCHEMA_SUITE", python::schema_suite(repository)?);
        command.env("CORELLA_AGENTS", node::agents(repository, &python)?);
        command.env("CORELLA_AIDER", python::aider(repository)?);
        command.env("CORELLA_ROUTERS", python::routers(repository)?);
    }
    if !repository.has_own_binary() {
        test::binaries(repository)?;
    }
    // Most of these tests wait most of the time, so there are more processes than cores. The tests of a file share
    // servers.
    command.args(["--numprocesses", "4", "--dist", "loadfile", "-m", marker]);
    command.args(["--durations", "20"]);
    command
        .args(arguments)
        .env("CORELLA_BIN", repository.binary());
    run(&mut command, "end-to-end tests failed, above")
}
