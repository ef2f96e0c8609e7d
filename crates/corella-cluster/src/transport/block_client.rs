//! The part of a node that loads cached blocks from other nodes.

use corella_core::session::{LoadKey, ToLoader};

use super::PeerAddress;

/// Receives the answers and lost connections of loads of cached blocks from the transport. Calls return at once.
pub trait BlockClient: Send + Sync {
    /// An answer of the node that `key` names as its source.
    fn handle_answer(&self, key: LoadKey, answer: ToLoader);

    /// A message to the source of a load was not sent: the node is not there, or was started again.
    fn handle_unsent(&self, key: LoadKey);

    /// The connection for messages to a node is lost, with those on their way in either direction. No message has gone
    /// over a new one yet.
    fn handle_lost(&self, source: &PeerAddress);
}
