//! The options of `corella completions` and `corella man`.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

#[derive(Args)]
pub struct CompletionsArgs {
    /// The shell that is to complete commands and options
    #[arg(value_enum)]
    pub shell: Shell,
}

#[derive(Args)]
pub struct ManArgs {
    /// The command to describe, e.g. `bench serve` [default: corella itself]
    #[arg(value_name = "COMMAND")]
    pub command: Vec<String>,
    /// Write the pages of all commands into this folder instead, as corella-COMMAND.1
    #[arg(short, long, value_name = "FOLDER", conflicts_with = "command")]
    pub output: Option<PathBuf>,
}
