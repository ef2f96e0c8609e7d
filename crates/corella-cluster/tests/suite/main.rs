//! Nodes that serve together, with real sockets: pairs, registries, transports; and a store of another program.

mod kv_store;
mod pair;
mod proxy;
mod registry;
mod transport;
