//! The command line of `corella pull`, `list` and `rm`.

use clap::Args;
use corella_hub::ModelName;

use crate::built_in;

#[derive(Args)]
pub struct PullArgs {
    /// Model on the Hugging Face hub: OWNER/MODEL; OWNER/MODEL:Q4_K_M for one of its GGUF files;
    /// OWNER/MODEL@REVISION for a branch, a tag or a commit
    #[arg(value_name = "MODEL", required = true, value_parser = parse_name)]
    pub models: Vec<ModelName>,
    /// Maximum number of files to download at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub max_workers: u8,
}

#[derive(Args)]
pub struct RmArgs {
    /// Model to delete, as `corella list` names it. OWNER/MODEL deletes all of its files and
    /// revisions
    #[arg(value_name = "MODEL", required = true, value_parser = not_built_in)]
    pub models: Vec<String>,
}

fn not_built_in(text: &str) -> Result<String, &'static str> {
    match text {
        built_in::NAME => Err("it is part of the program"),
        text => Ok(text.to_owned()),
    }
}

fn parse_name(text: &str) -> Result<ModelName, String> {
    ModelName::parse(&not_built_in(text)?).map_err(|error| error.to_string())
}
