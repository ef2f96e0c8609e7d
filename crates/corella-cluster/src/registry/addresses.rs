//! Nodes at fixed addresses, or at the addresses of a DNS name.

use std::time::Duration;

use super::NodeRecord;
use super::source::{Exchange, Following, Source};

/// The limit of the time for a DNS look-up.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct FixedAddresses(pub Vec<String>);

impl Source for FixedAddresses {
    fn follow<'a>(&'a mut self, exchange: &'a mut Exchange) -> Following<'a> {
        Box::pin(async move {
            let nodes = self
                .0
                .iter()
                .map(|address| NodeRecord::at(address, address));
            exchange.give(nodes.collect());
            std::future::pending().await
        })
    }
}

/// All addresses (A and AAAA) of one name, each with a node at the same port.
pub(super) struct Dns {
    pub name: String,
    pub port: u16,
    pub interval: Duration,
}

impl Dns {
    async fn look_up(&self) -> Result<Vec<NodeRecord>, String> {
        // The system's resolver takes a bare IPv6 address.
        let name = self.name.trim_start_matches('[').trim_end_matches(']');
        let lookup = tokio::net::lookup_host((name, self.port));
        let addresses = match tokio::time::timeout(LOOKUP_TIMEOUT, lookup).await {
            Ok(Ok(addresses)) => addresses,
            Ok(Err(error)) => return Err(format!("no address of {name}: {error}")),
            Err(_) => {
                let seconds = LOOKUP_TIMEOUT.as_secs();
                return Err(format!("no address of {name} within {seconds} s"));
            }
        };
        let mut addresses: Vec<_> = addresses.map(|address| address.to_string()).collect();
        addresses.sort();
        addresses.dedup();
        Ok(addresses
            .iter()
            .map(|address| NodeRecord::at(address, address))
            .collect())
    }
}

impl Source for Dns {
    fn follow<'a>(&'a mut self, exchange: &'a mut Exchange) -> Following<'a> {
        Box::pin(async move {
            loop {
                match self.look_up().await {
                    Ok(nodes) => exchange.give(nodes),
                    Err(reason) => return reason,
                }
                tokio::time::sleep(self.interval).await;
            }
        })
    }
}
