//! Runs stages in order, and prints each one's time.

use std::time::{Duration, Instant};

use crate::repository::Repository;

pub struct Stage {
    pub name: &'static str,
    pub about: &'static str,
    pub takes_arguments: bool,
    /// Runs the stage with the arguments after its name on the command line.
    pub run: fn(&Repository, &[String]) -> Result<(), String>,
}

/// Runs stages in order, prints their times and returns the sum. The first failure ends the run.
pub fn run_all(repository: &Repository, task: &str, stages: &[&Stage]) -> Result<Duration, String> {
    let start = Instant::now();
    let mut times = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        println!(
            "\n==> {}/{} {}: {}",
            index + 1,
            stages.len(),
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
    println!("{task}: all stages passed in {}", minutes(start.elapsed()));
    Ok(start.elapsed())
}

fn print_times(times: &[(&str, Duration)], failed: Option<&str>) {
    println!();
    for (name, time) in times {
        let outcome = if failed == Some(*name) {
            "FAILED"
        } else {
            "ok"
        };
        println!("{name:<13} {:>8}  {outcome}", minutes(*time));
    }
}

pub fn minutes(time: Duration) -> String {
    let seconds = time.as_secs();
    format!(
        "{}:{:02}.{}",
        seconds / 60,
        seconds % 60,
        time.subsec_millis() / 100
    )
}
