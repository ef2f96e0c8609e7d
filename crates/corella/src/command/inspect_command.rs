//! `corella inspect`: prints a model's properties, or the content of folders of `--kv-disk`.

mod json;
mod kv_disk;
mod shape;
mod text;

use crate::Error;
use crate::arguments::config::Inspect;
use crate::terminal::output::print_text;

pub fn run(config: Inspect) -> Result<(), Error> {
    if !config.kv_disk.is_empty() {
        return kv_disk::run(&config.kv_disk, config.prints_json);
    }
    let inspection = crate::inspect(&config.source, &config.options)?;
    let printed = match config.prints_json {
        true => format!("{:#}\n", json::render(&inspection)),
        false => text::render(&inspection),
    };
    print_text(printed);
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
