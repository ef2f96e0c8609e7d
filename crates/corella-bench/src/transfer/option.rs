//! The options of `bench transfer`.

#[derive(Debug, Clone)]
pub struct TransferBenchOptions {
    /// The sizes of a session in bytes. Each gives rows of the table.
    pub message_bytes: Vec<usize>,
    /// The sizes in bytes of a page within a layer. Each gives rows of the table.
    pub page_bytes: Vec<usize>,
    pub num_connections: usize,
    /// The number of measurements of each row. The rows take turns.
    pub num_repeats: usize,
    /// Approximate bytes of one measurement. The number of sessions is rounded so that each `Table` is copied equally
    /// often.
    pub bytes_per_repeat: usize,
    /// Bytes of a session before the next session's turn, and bytes of one bare call.
    pub chunk_bytes: usize,
}

impl Default for TransferBenchOptions {
    fn default() -> Self {
        Self {
            message_bytes: vec![64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20],
            page_bytes: vec![4 << 10, 64 << 10],
            num_connections: 2,
            num_repeats: 5,
            bytes_per_repeat: 256 << 20,
            chunk_bytes: 1 << 20,
        }
    }
}
