//! Development tasks: `cargo xtask ci` checks everything; each of its stages is also a
//! command of its own.

mod ci;
mod python;
mod repository;
mod tidy;

use std::process::ExitCode;

use repository::Repository;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    let outcome = Repository::find().and_then(|repository| match command.as_str() {
        "ci" => ci::run_all(&repository),
        name => match ci::STAGES.iter().find(|stage| stage.name == name) {
            Some(stage) => (stage.run)(&repository, &rest),
            None => Err(usage(name)),
        },
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("\nxtask: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn usage(name: &str) -> String {
    let mut text = match name {
        "" => "say what to do".to_string(),
        name => format!("there is no task {name:?}"),
    };
    text += "\n\n  cargo xtask ci        all of these, in this order\n";
    for stage in &ci::STAGES {
        text += &format!("  cargo xtask {:<9} {}\n", stage.name, stage.about);
    }
    text
}
