//! The part of a node that lends cached blocks to other nodes.

use std::sync::Arc;

use corella_core::session::{LoadKey, ToFetcher, ToSource};

use super::block_message::{self, BlockMessage};
use super::connection_queue::{ConnectionId, ConnectionQueue};

/// Takes the messages of nodes that load cached blocks. Calls return at once.
pub trait BlockServer: Send + Sync {
    /// Handles a message of the node that made `key`. `from` sends the answers.
    fn handle_message(&self, from: &BlockReply, key: LoadKey, message: ToSource);

    /// Handles the loss of a connection, which ends the loads begun over the connection.
    fn handle_lost(&self, connection: ConnectionId);
}

/// Answers a loading node over the connection of its message.
#[derive(Clone)]
pub struct BlockReply {
    queue: Arc<ConnectionQueue>,
}

impl BlockReply {
    pub fn new(queue: Arc<ConnectionQueue>) -> Self {
        Self { queue }
    }

    pub fn connection(&self) -> ConnectionId {
        self.queue.id
    }

    /// Sends an answer. Without the connection nothing is sent, and the load ends at its deadline.
    pub fn send(&self, key: LoadKey, message: ToFetcher) {
        if let Some(bytes) = block_message::encode(key, &BlockMessage::ToFetcher(message)) {
            self.queue.frames.push_bytes(&bytes);
        }
    }
}
