//! The option of the store of another program that keeps KV blocks.

use std::str::FromStr;

use clap::Args;

#[derive(Args)]
#[command(next_help_heading = "KV cache")]
pub struct KvStoreArgs {
    /// Keep KV pages of prompts that come again in LMCache's server on this host, version 0.5.6, at this gRPC port. Its
    /// HTTP port tells the version [default: 8080]. Only on a CPU
    #[arg(
        long,
        value_name = "lmcache:PORT[,HTTP_PORT]",
        conflicts_with_all = ["kv_disk", "kv_host_memory"]
    )]
    pub kv_store: Option<KvStoreAddress>,
}

/// The ports of LMCache's server on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvStoreAddress {
    pub port: u16,
    pub status_port: u16,
}

/// LMCache's own default.
const STATUS_PORT: u16 = 8080;

impl FromStr for KvStoreAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ports = text.strip_prefix("lmcache:");
        let ports = ports.ok_or("the only store is `lmcache:PORT`, a server on this host")?;
        let port = |text: &str| match text.parse() {
            Ok(0) | Err(_) => Err(format!("`{text}` is no port")),
            Ok(port) => Ok(port),
        };
        let (grpc, status) = match ports.split_once(',') {
            Some((grpc, status)) => (port(grpc)?, port(status)?),
            None => (port(ports)?, STATUS_PORT),
        };
        Ok(Self {
            port: grpc,
            status_port: status,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_has_one_or_two_ports() {
        let of = |port, status_port| Ok(KvStoreAddress { port, status_port });
        assert_eq!("lmcache:5555".parse(), of(5555, 8080));
        assert_eq!("lmcache:5555,81".parse(), of(5555, 81));
        for text in [
            "",
            "5555",
            "lmcache:",
            "lmcache:0",
            "lmcache:host:1",
            "lmcache:1,",
            "redis:1",
        ] {
            assert!(text.parse::<KvStoreAddress>().is_err(), "{text}");
        }
    }
}
