//! The senders that a receiver knows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::PeerAddress;
use super::known_sender::KnownSender;

pub struct SenderTable {
    max_peers: usize,
    connections_per_peer: usize,
    peers: Mutex<HashMap<PeerAddress, Arc<KnownSender>>>,
}

impl SenderTable {
    pub fn new(max_peers: usize, connections_per_peer: usize) -> Self {
        Self {
            max_peers,
            connections_per_peer,
            peers: Mutex::default(),
        }
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<PeerAddress, Arc<KnownSender>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn num_peers(&self) -> usize {
        self.peers().len()
    }

    /// Forgets peers without loads to make room. Returns `None` if the table stays full.
    pub fn get(&self, address: &PeerAddress) -> Option<Arc<KnownSender>> {
        let mut peers = self.peers();
        if !peers.contains_key(address) && peers.len() >= self.max_peers {
            peers.retain(|_, peer| !peer.is_idle());
            if peers.len() >= self.max_peers {
                return None;
            }
        }
        let num_connections = self.connections_per_peer;
        let first_index = peers.len() * num_connections;
        let make = || {
            Arc::new(KnownSender::new(
                address.clone(),
                first_index,
                num_connections,
            ))
        };
        Some(peers.entry(address.clone()).or_insert_with(make).clone())
    }
}
