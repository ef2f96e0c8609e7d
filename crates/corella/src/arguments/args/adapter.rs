//! The options about LoRA adapters.

use clap::Args;

#[derive(Args)]
#[command(next_help_heading = "Adapters")]
pub struct AdapterArgs {
    /// Enable LoRA adapters, which can be loaded and unloaded while the server runs
    #[arg(long)]
    pub enable_lora: bool,
    /// Load the LoRA adapter of a folder under a name that requests give as their model; repeat the option
    /// for more adapters. Implies --enable-lora
    #[arg(long, value_name = "NAME=FOLDER", num_args = 1..)]
    pub lora_modules: Vec<String>,
    /// Keep at most this many adapters loaded
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub max_loras: usize,
    /// Largest rank that an adapter may have
    #[arg(long, value_name = "RANK", default_value_t = 64)]
    pub max_lora_rank: u16,
    /// Give up an adapter that is not read within this time, while the server runs
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    pub adapter_load_timeout: u32,
}
