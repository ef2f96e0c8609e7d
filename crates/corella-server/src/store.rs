//! Objects that callers leave on the server: responses, files and batches.

pub mod batch_file;
pub mod batch_line;
pub mod batch_record;
pub mod batch_table;
pub mod disk;
pub mod file_store;
pub mod response_store;
