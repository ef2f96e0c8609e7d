//! The options of the disk that keeps KV blocks.

use std::str::FromStr;

use clap::Args;

use super::byte_size::parse_size;
use crate::KvDiskOptions;

#[derive(Args)]
#[command(next_help_heading = "KV cache")]
pub struct KvDiskArgs {
    /// Keep KV pages of prompts that come again in a file in this folder, so that they outlive memory and restarts.
    /// SIZE is for all files in the folder [default: 8G]. Only on a CPU
    #[arg(long, value_name = "DIR[,SIZE]")]
    pub kv_disk: Option<KvDiskOptions>,
    /// Also keep prompts with a `cache_salt` in the file of --kv-disk. The salt itself is not written
    #[arg(long, requires = "kv_disk")]
    pub kv_disk_salted: bool,
}

impl KvDiskArgs {
    pub fn options(&self) -> Option<KvDiskOptions> {
        self.kv_disk.as_ref().map(|disk| KvDiskOptions {
            keeps_salted: self.kv_disk_salted,
            ..disk.clone()
        })
    }
}

impl FromStr for KvDiskOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (folder, size) = text.rsplit_once(',').unwrap_or((text, "8G"));
        if folder.is_empty() {
            return Err("names no folder".to_owned());
        }
        Ok(Self {
            folder: folder.into(),
            max_bytes: parse_size(size).map_err(|error| format!("the size `{size}`: {error}"))?,
            keeps_salted: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_may_follow_the_folder() {
        let of = |folder: &str, max_bytes| {
            Ok(KvDiskOptions {
                folder: folder.into(),
                max_bytes,
                keeps_salted: false,
            })
        };
        assert_eq!("/var/kv".parse(), of("/var/kv", 8 << 30));
        assert_eq!("/var/kv,512M".parse(), of("/var/kv", 512 << 20));
        assert_eq!("a,b,1K".parse(), of("a,b", 1024));
        for text in ["", ",1G", "/var/kv,", "/var/kv,0", "/var/kv,x"] {
            assert!(text.parse::<KvDiskOptions>().is_err(), "{text}");
        }
    }
}
