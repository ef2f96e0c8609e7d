//! The memory of keys and values, in pages.

mod memory;
mod page_commit;
mod pipeline_pages;

pub use self::memory::{HeadPage, KvMemory, Rows, Side, page_bytes};
pub use self::page_commit::PageCommit;
pub use self::pipeline_pages::PipelinePages;
