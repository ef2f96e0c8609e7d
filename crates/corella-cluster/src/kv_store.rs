//! Blocks in the server of LMCache, a store of another program on this host.
//!
//! LMCache's server keeps chunks of rows in shared memory, and behind it in file systems, Redis, S3 and others. A chunk
//! has a fixed number of tokens. The server names it by all tokens up to its end. Calls go over gRPC, bytes through the
//! shared memory.
//!
//! * Before a request is submitted, its prompt is looked up, and the chunks that are missing here are fetched if that is
//!   quicker than computing them ([`StoreReader`]). The request waits for them like a follower.
//! * Blocks that a request used again, or that are next to be evicted, are copied to the server (`writer.rs`). While they
//!   are copied to memory, the core holds them as for another node.
//! * The server knows nothing of a chunk's content. Each chunk has a header with the hash of its last block and a
//!   checksum (`chunk.rs`), because the server gives no promise for slow readers and for its own restart.
//! * A server that does not answer is asked again every few seconds. Meanwhile prompts are computed as without it.
//! * Only one version of LMCache is spoken to, because its messages change from version to version.

mod chunk;
mod client;
mod known_chunks;
mod link;
mod metrics;
mod pool;
mod reader;
mod slot_list;
mod store;
mod wire;
mod writer;

pub use client::LMCACHE_VERSION;
pub use reader::StoreReader;
pub use store::{KvStore, KvStoreConfig, KvStoreError, KvStoreStats};
