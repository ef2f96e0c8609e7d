//! The part of a node that loads cached blocks from other nodes.

use corella_core::session::{LoadKey, ToFetcher};

use super::PeerAddress;

/// Receives the answers and lost connections of loads of cached blocks from the transport. Calls return at once.
pub trait BlockClient: Send + Sync {
    /// Handles an answer of the node that `key` names as its source.
    fn handle_answer(&self, key: LoadKey, answer: ToFetcher);

    /// Handles that a message to the source of a load was lost, because the node is gone or was restarted.
    fn handle_unsent(&self, key: LoadKey);

    /// Handles the loss of the connection that carries messages to and from a node. Messages on their way are lost,
    /// too. The next connection has carried no message yet.
    fn handle_lost(&self, source: &PeerAddress);
}
