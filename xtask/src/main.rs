//! Development tasks: `cargo xtask ci` checks everything; each of its stages is also a
//! command of its own.

mod apt;
mod book;
mod ci;
mod deploy;
mod gpu;
mod isas;
mod kernels;
mod nixl;
mod node;
mod python;
mod repository;
mod shake;
mod test_binary;
mod tidy;
mod wheel;

use std::process::ExitCode;

use repository::Repository;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    let mut tasks = ci::STAGES.iter().chain(&ci::TASKS);
    let stage = tasks.find(|stage| stage.name == name);
    if stage.is_none() && name != "ci" {
        return refuse(match name.as_str() {
            "" => "name a task".to_string(),
            name => format!("there is no task {name:?}"),
        });
    }
    if !rest.is_empty() && stage.is_none_or(|stage| !stage.takes_arguments) {
        return refuse(format!("{name} takes no arguments, got {rest:?}"));
    }
    let outcome = Repository::find().and_then(|repository| match stage {
        None => ci::run_all(&repository),
        Some(stage) => (stage.run)(&repository, &rest),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("\nxtask: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn refuse(reason: String) -> ExitCode {
    eprintln!("xtask: {reason}\n\n  cargo xtask ci        run all of these, in this order");
    for stage in &ci::STAGES {
        eprintln!("  cargo xtask {:<9} {}", stage.name, stage.about);
    }
    eprintln!("\nand what is no check:\n");
    for task in &ci::TASKS {
        eprintln!("  cargo xtask {:<9} {}", task.name, task.about);
    }
    ExitCode::from(2)
}
