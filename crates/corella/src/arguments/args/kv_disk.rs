//! The options of the disks, or of the host memory, that keep KV blocks.

use clap::Args;
use corella_engine::KvDiskFolder;

use super::byte_size::parse_size;
use crate::KvDiskOptions;

#[derive(Args)]
#[command(next_help_heading = "KV cache")]
pub struct KvDiskArgs {
    /// Keep KV pages of prompts that come again in a file in this folder, so that they outlive memory and restarts.
    /// SIZE is for all files in the folder [default: 8G]. Repeat the option for further disks. Only on a CPU
    #[arg(long, value_name = "DIR[,SIZE]", value_parser = parse_folder)]
    pub kv_disk: Vec<KvDiskFolder>,
    /// Also keep prompts with a `cache_salt` in the files of --kv-disk. The salt itself is not written
    #[arg(long, requires = "kv_disk")]
    pub kv_disk_salted: bool,
    /// Keep KV pages of prompts that come again in this much memory of the host, beside the KV cache in the memory of a
    /// GPU. Only on a GPU: on a CPU, enlarge --kv-cache-memory
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "kv_disk")]
    pub kv_host_memory: Option<u64>,
}

impl KvDiskArgs {
    pub fn options(&self) -> Option<KvDiskOptions> {
        (!self.kv_disk.is_empty()).then(|| KvDiskOptions {
            folders: self.kv_disk.clone(),
            keeps_salted: self.kv_disk_salted,
        })
    }
}

pub fn parse_folder(text: &str) -> Result<KvDiskFolder, String> {
    let (folder, size) = text.rsplit_once(',').unwrap_or((text, "8G"));
    if folder.is_empty() {
        return Err("names no folder".to_owned());
    }
    let max_bytes = parse_size(size).map_err(|error| format!("the size `{size}`: {error}"))?;
    Ok(KvDiskFolder::new(folder, max_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_may_follow_the_folder() {
        let of = |folder: &str, max_bytes| Ok(KvDiskFolder::new(folder, max_bytes));
        assert_eq!(parse_folder("/var/kv"), of("/var/kv", 8 << 30));
        assert_eq!(parse_folder("/var/kv,512M"), of("/var/kv", 512 << 20));
        assert_eq!(parse_folder("a,b,1K"), of("a,b", 1024));
        for text in ["", ",1G", "/var/kv,", "/var/kv,0", "/var/kv,x"] {
            assert!(parse_folder(text).is_err(), "{text}");
        }
    }
}
