//! Nodes that serve together, with real sockets: pairs, registries, transports.

mod pair;
mod registry;
mod transport;
