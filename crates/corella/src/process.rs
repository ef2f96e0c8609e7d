//! The process: its open files, its memory, and its supervisor.

pub(crate) mod inherited_socket;
pub(crate) mod malloc_arena;
pub(crate) mod open_files;
pub(crate) mod page_cache;
pub(crate) mod supervisor;
