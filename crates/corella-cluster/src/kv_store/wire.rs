//! The messages of LMCache's server, version 0.5.6, as far as they are used. The numbers of fields are its own.

use prost::Message;

pub const GET_CHUNK_SIZE: &str = "/lmcache.mp.ControllerService/GetChunkSize";
pub const REGISTER: &str = "/lmcache.mp.EngineDrivenService/RegisterKvCacheEngineDrivenContext";
pub const PREPARE_STORE: &str = "/lmcache.mp.EngineDrivenService/PrepareStore";
pub const COMMIT_STORE: &str = "/lmcache.mp.EngineDrivenService/CommitStore";
pub const PREPARE_RETRIEVE: &str = "/lmcache.mp.EngineDrivenService/PrepareRetrieve";
pub const COMMIT_RETRIEVE: &str = "/lmcache.mp.EngineDrivenService/CommitRetrieve";
pub const LOOKUP: &str = "/lmcache.mp.LookupService/Lookup";
pub const WAIT_PREFETCH: &str = "/lmcache.mp.LookupService/WaitPrefetchStatus";
pub const FREE_LOOKUP_LOCKS: &str = "/lmcache.mp.LookupService/FreeLookupLocks";
pub const END_SESSION: &str = "/lmcache.mp.LookupService/EndSession";

#[derive(Clone, Copy, PartialEq, Message)]
pub struct Empty {}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct ChunkSize {
    #[prost(int64, tag = "1")]
    pub num_tokens: i64,
}

/// Chunks of a sequence: those of the tokens from `start` to `end`.
#[derive(Clone, PartialEq, Message)]
pub struct Key {
    #[prost(string, tag = "1")]
    pub model_name: String,
    #[prost(int64, tag = "2")]
    pub world_size: i64,
    /// Absent for the chunks of all workers.
    #[prost(int64, optional, tag = "3")]
    pub worker: Option<i64>,
    /// All tokens from the sequence's beginning on.
    #[prost(int64, repeated, tag = "4")]
    pub tokens: Vec<i64>,
    #[prost(int64, tag = "5")]
    pub start: i64,
    #[prost(int64, tag = "6")]
    pub end: i64,
    #[prost(string, tag = "7")]
    pub session: String,
    /// The number of workers that read each chunk. 0 is refused.
    #[prost(int64, tag = "10")]
    pub num_readers: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Registration {
    #[prost(int64, tag = "1")]
    pub instance: i64,
    #[prost(string, tag = "2")]
    pub model_name: String,
    #[prost(int64, tag = "3")]
    pub world_size: i64,
    #[prost(int64, tag = "4")]
    pub block_size: i64,
    #[prost(int64, tag = "5")]
    pub num_layers: i64,
    #[prost(int64, tag = "6")]
    pub row_len: i64,
    /// The name of an element type of PyTorch.
    #[prost(string, tag = "7")]
    pub element: String,
    /// Whether a chunk has one matrix for keys and values together.
    #[prost(bool, tag = "8")]
    pub has_one_matrix: bool,
    /// The number of rows of a chunk.
    #[prost(int64, optional, tag = "9")]
    pub num_rows: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Registered {
    /// The name of the shared memory. Empty if the server has none.
    #[prost(string, tag = "1")]
    pub pool_name: String,
    #[prost(int64, tag = "2")]
    pub pool_bytes: i64,
}

/// A request for chunks by a registered instance: all calls of the engine-driven service have this form.
#[derive(Clone, PartialEq, Message)]
pub struct ChunkCall {
    #[prost(message, optional, tag = "1")]
    pub key: Option<Key>,
    #[prost(int64, tag = "2")]
    pub instance: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct StorePrepared {
    /// The slots to fill, in MessagePack.
    #[prost(bytes = "vec", tag = "1")]
    pub slots: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RetrievePrepared {
    #[prost(bool, tag = "1")]
    pub is_found: bool,
    /// The slots to read, in MessagePack.
    #[prost(bytes = "vec", tag = "3")]
    pub slots: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct Committed {
    #[prost(bool, tag = "1")]
    pub is_done: bool,
}

/// The call of `Lookup` and of `FreeLookupLocks`.
#[derive(Clone, PartialEq, Message)]
pub struct LookupCall {
    #[prost(message, optional, tag = "1")]
    pub key: Option<Key>,
    #[prost(int64, tag = "2")]
    pub world_size: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct WaitPrefetch {
    #[prost(string, tag = "1")]
    pub session: String,
    #[prost(double, tag = "2")]
    pub limit_s: f64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct Prefetched {
    /// Absent if the wait has ended before the prefetch.
    #[prost(int64, optional, tag = "1")]
    pub num_chunks: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Session {
    #[prost(string, tag = "1")]
    pub session: String,
}
