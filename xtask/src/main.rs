//! Development tasks. `cargo xtask test` runs the tests in Rust, `cargo xtask ci` checks everything else, and `cargo
//! xtask night` runs the slow parts. Each of their stages is also a command of its own.

mod apt;
mod book;
mod ci;
mod deploy;
mod dist;
mod gpu;
mod isas;
mod kernels;
mod limit;
mod night;
mod nixl;
mod node;
mod python;
mod repository;
mod set_up;
mod shake;
mod stage;
mod test;
mod test_binary;
mod tidy;
mod wheel;

use std::process::ExitCode;

use repository::Repository;
use stage::Stage;

/// Tasks that are not stages of `ci`.
const TASKS: [Stage; 8] = [
    Stage {
        name: "test",
        about: "unit, property, golden and conformance tests, by Rust alone; `-p CRATE` for some crates, other arguments go to the test binaries",
        takes_arguments: true,
        run: test::test,
    },
    Stage {
        name: "ci",
        about: "everything else, in the order of the list below; what `test` built is used",
        takes_arguments: false,
        run: |repository, _| ci::run_all(repository),
    },
    Stage {
        name: "night",
        about: "what is slow by nature; arguments name parts",
        takes_arguments: true,
        run: night::night,
    },
    Stage {
        name: "shake",
        about: "run tests many times on a busy machine: `-k PATTERN`, `-p CRATE`, `--client`, `--runs N`",
        takes_arguments: true,
        run: shake::shake,
    },
    Stage {
        name: "kernels",
        about: "compare kernels for GPUs with what is recorded; `--update` records it",
        takes_arguments: true,
        run: kernels::kernels,
    },
    Stage {
        name: "lock",
        about: "choose the versions of Python packages anew",
        takes_arguments: false,
        run: |repository, _| python::lock(repository),
    },
    Stage {
        name: "dist",
        about: "build a release for others, in target/dist: archive, packages, wheel, image, bill of materials, checksums",
        takes_arguments: false,
        run: dist::dist,
    },
    Stage {
        name: "gpu",
        about: "pack tests and benchmarks for a machine with a GPU, in target/gpu; `--run --results FOLDER` runs them here",
        takes_arguments: true,
        run: gpu::gpu,
    },
];

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    let mut tasks = TASKS.iter().chain(&ci::STAGES);
    let Some(task) = tasks.find(|task| task.name == name) else {
        return refuse(match name.as_str() {
            "" => "name a task".to_string(),
            name => format!("there is no task {name:?}"),
        });
    };
    if !rest.is_empty() && !task.takes_arguments {
        return refuse(format!("{name} takes no arguments, got {rest:?}"));
    }
    match Repository::find().and_then(|repository| (task.run)(&repository, &rest)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("\nxtask: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn refuse(reason: String) -> ExitCode {
    eprintln!("xtask: {reason}\n");
    let line = |task: &Stage| eprintln!("  cargo xtask {:<10} {}", task.name, task.about);
    TASKS.iter().for_each(line);
    eprintln!("\nstages of ci, in this order:\n");
    ci::STAGES.iter().for_each(line);
    eprintln!("\nparts of the night:\n\n{}", night::list());
    ExitCode::from(2)
}
