//! The memory of keys and values, in pages.

mod memory;
mod page_commit;
mod pipeline_pages;
mod row_shape;
mod rows;

pub use self::memory::KvMemory;
pub use self::page_commit::PageCommit;
pub use self::pipeline_pages::PipelinePages;
pub use self::row_shape::{RowShape, place_bytes};
pub use self::rows::{HeadPage, KvRows, Rows, Side};
