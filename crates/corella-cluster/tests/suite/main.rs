//! Nodes that serve together, with real sockets: pairs, registries, transports.

mod pair;
mod proxy;
mod registry;
mod transport;
