//! The option that names a file with options.

use std::path::PathBuf;

use clap::Args;

#[derive(Args)]
pub struct ConfigFileArgs {
    /// Read options from this TOML file, by the names that they have here. Options on the command
    /// line win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}
