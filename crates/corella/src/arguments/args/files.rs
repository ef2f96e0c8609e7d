//! The options of files and batches.

use std::path::PathBuf;

use clap::Args;
use corella_server::batch::FilesConfig;

#[derive(Args)]
#[command(next_help_heading = "Files and batches")]
pub struct FilesArgs {
    /// Keep files of /v1/files and run batches of /v1/batches, in this folder
    #[arg(long, value_name = "DIR")]
    pub files_dir: Option<PathBuf>,
    /// Maximum size of one file
    #[arg(long, value_name = "SIZE", value_parser = super::byte_size::parse_size, default_value = "256M", requires = "files_dir")]
    pub max_file_bytes: u64,
    /// Maximum size of all files together, answers of batches included
    #[arg(long, value_name = "SIZE", value_parser = super::byte_size::parse_size, default_value = "8G", requires = "files_dir")]
    pub max_files_bytes: u64,
    /// Maximum number of batch requests that run at once [default: half of --max-num-seqs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "files_dir")]
    pub batch_concurrency: Option<u32>,
}

impl FilesArgs {
    /// By default, batches take at most half of the slots, and leave the rest to requests of clients.
    pub fn config(self, max_num_seqs: u32) -> Option<FilesConfig> {
        let half = (max_num_seqs / 2).max(1);
        Some(FilesConfig {
            dir: self.files_dir?,
            max_file_bytes: self.max_file_bytes,
            max_files_bytes: self.max_files_bytes,
            batch_concurrency: self.batch_concurrency.unwrap_or(half) as usize,
        })
    }
}
