//! The addresses that a request may name for its KV rows. Without this limit, a request could make a node connect to
//! any address in the node's network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// Networks from which a node fetches KV rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedPeers(Vec<Network>);

/// A range of addresses in CIDR notation (RFC 4632).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    num_bits: u8,
}

impl AllowedPeers {
    /// Allows these networks and the machine itself.
    pub fn new(networks: impl IntoIterator<Item = Network>) -> Self {
        let own = [
            Network {
                address: IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)),
                num_bits: 8,
            },
            Network::of(IpAddr::V6(Ipv6Addr::LOCALHOST)),
        ];
        Self(own.into_iter().chain(networks).collect())
    }

    pub fn allow(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(address))
    }
}

impl Network {
    /// Returns a network of one address.
    pub fn of(address: IpAddr) -> Self {
        Self {
            address: address.to_canonical(),
            num_bits: if address.to_canonical().is_ipv4() {
                32
            } else {
                128
            },
        }
    }

    fn contains(&self, address: IpAddr) -> bool {
        let bits = u32::from(self.num_bits);
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let differ = own.to_bits() ^ other.to_bits();
                differ.leading_zeros() >= bits
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let differ = own.to_bits() ^ other.to_bits();
                differ.leading_zeros() >= bits
            }
            _ => false,
        }
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text} is no address or network; for example 10.0.0.0/8");
        let (address, num_bits) = text.split_once('/').unzip();
        let address: IpAddr = address.unwrap_or(text).parse().map_err(|_| wrong())?;
        let Some(num_bits) = num_bits else {
            return Ok(Self::of(address));
        };
        let num_bits: u8 = num_bits.parse().map_err(|_| wrong())?;
        match num_bits > if address.is_ipv4() { 32 } else { 128 } {
            true => Err(wrong()),
            false => Ok(Self { address, num_bits }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allow(networks: &[&str], address: &str) -> bool {
        let networks = networks.iter().map(|network| network.parse().unwrap());
        AllowedPeers::new(networks).allow(address.parse().unwrap())
    }

    #[test]
    fn a_network_has_the_addresses_that_begin_like_it() {
        for (network, inside, outside) in [
            ("10.1.0.0/16", "10.1.255.7", "10.2.0.0"),
            ("10.1.2.128/25", "10.1.2.129", "10.1.2.127"),
            ("192.0.2.7", "192.0.2.7", "192.0.2.6"),
            ("fd00:1::/32", "fd00:1:ffff::1", "fd00:2::1"),
            ("2001:db8::7", "2001:db8::7", "2001:db8::8"),
        ] {
            assert!(allow(&[network], inside), "{network} {inside}");
            assert!(!allow(&[network], outside), "{network} {outside}");
        }
        assert!(allow(&["0.0.0.0/0"], "198.51.100.1") && !allow(&["0.0.0.0/0"], "2001:db8::1"));
        assert!(allow(&["::/0"], "2001:db8::1"));
    }

    #[test]
    fn the_machine_itself_is_always_allowed_and_nothing_else_is() {
        for own in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert!(allow(&[], own), "{own}");
        }
        // Clouds serve credentials at the last of these addresses.
        for other in [
            "10.0.0.1",
            "0.0.0.0",
            "::",
            "::ffff:10.0.0.1",
            "169.254.169.254",
        ] {
            assert!(!allow(&[], other), "{other}");
        }
        // An IPv4 address may be written as an IPv6 one.
        assert!(allow(&["10.0.0.0/8"], "::ffff:10.0.0.1"));
    }

    #[test]
    fn what_is_no_network_is_refused() {
        for text in [
            "",
            "host",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "10.0.0/8",
            "10.0.0.0/8/8",
        ] {
            let error = text.parse::<Network>().unwrap_err();
            assert!(error.contains("10.0.0.0/8"), "{error}");
        }
    }
}
