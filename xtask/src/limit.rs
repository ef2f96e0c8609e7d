//! Bounds of time and size for every change. Times are for two cores; they are printed beside their bounds and fail
//! nothing, because a busy machine is no defect of a change. An excess of size fails.

use std::fs;
use std::time::Duration;

use crate::repository::Repository;
use crate::stage::minutes;

/// `cargo xtask test` on a fresh clone.
pub const TEST: Duration = Duration::from_secs(12 * 60);
/// `cargo xtask test` and then `cargo xtask ci`, after set-up.
pub const CHECK: Duration = Duration::from_secs(25 * 60);
/// A part of the night that CI may draw.
pub const NIGHT_PART: Duration = Duration::from_secs(10 * 60);
/// `cargo run --release -- serve` from an empty target, with downloaded dependencies.
pub const FIRST_BUILD: Duration = Duration::from_secs(4 * 60);
/// The release binary with the built-in model.
pub const BINARY_BYTES: u64 = 48_000_000;

/// Prints a time beside its bound.
pub fn print_time(what: &str, time: Duration, bound: Duration) {
    let verdict = if time <= bound { "" } else { ": TOO LONG" };
    println!(
        "limit: {what} took {} of at most {}{verdict}",
        minutes(time),
        minutes(bound)
    );
}

/// Prints the size of the release binary beside its bound, if it is built. Returns an error if the binary is too large.
pub fn check_binary(repository: &Repository) -> Result<(), String> {
    let binary = repository.release_binary();
    let Ok(metadata) = fs::metadata(&binary) else {
        println!("limit: there is no release binary whose size could be checked");
        return Ok(());
    };
    let size = |num_bytes: u64| format!("{:.1} MB", num_bytes as f64 / 1e6);
    println!(
        "limit: the release binary has {} of at most {}",
        size(metadata.len()),
        size(BINARY_BYTES)
    );
    if metadata.len() > BINARY_BYTES {
        return Err(format!(
            "{} is too large; `cargo llvm-lines` says what is generated",
            binary.display()
        ));
    }
    Ok(())
}
