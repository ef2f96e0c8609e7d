//! `corella inspect`: prints a model's properties.

mod json;
mod shape;
mod text;

use std::io::{self, Write};

use crate::Error;
use crate::arguments::config::Inspect;

pub fn run(config: Inspect) -> Result<(), Error> {
    let inspection = crate::inspect(&config.source, &config.options)?;
    let printed = match config.prints_json {
        true => format!("{:#}\n", json::render(&inspection)),
        false => text::render(&inspection),
    };
    // A reader that closes the pipe wants no more.
    let _ = io::stdout().write_all(printed.as_bytes());
    match inspection.refusals.is_empty() {
        true => Ok(()),
        false => Err(Error::Config(format!(
            "`corella serve` would refuse this model; {} says why",
            match config.prints_json {
                true => "\"refused\" above",
                false => "\"problem\" above",
            }
        ))),
    }
}
