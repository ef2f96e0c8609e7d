//! The memory of keys and values, in pages.

mod memory;

pub use self::memory::KvMemory;
