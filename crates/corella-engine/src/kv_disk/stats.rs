//! The counts of the tier, and their metrics.

use corella_core::Metric;

/// The present state of the disk tier, and its counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvDiskStats {
    /// Whether the disks are host memory
    pub is_in_memory: bool,
    /// The number of disks whose file has been opened and which no error has switched off.
    pub num_on: u32,
    /// The number of the other disks.
    pub num_off: u32,
    pub num_pages: usize,
    /// The number of pages for which the files have room.
    pub max_pages: u32,
    pub num_stored: u64,
    /// Copies that were begun and given up.
    pub num_dropped: u64,
    pub bytes_written: u64,
    /// Pages that were read for requests.
    pub num_read: u64,
    pub bytes_read: u64,
    /// Pages of the files that proved torn or damaged when they were read.
    pub num_damaged: u64,
    pub num_errors: u64,
}

type Row = Metric<KvDiskStats>;

impl KvDiskStats {
    /// Whether a disk is in use.
    pub fn is_on(&self) -> bool {
        self.num_on > 0
    }

    pub const METRICS: &[Metric<Self>] = &[
        Row::gauge("kv_disk_on", |disk| disk.num_on.into()).help("Disks of --kv-disk in use"),
        Row::gauge("kv_disk_off", |disk| disk.num_off.into()).help(
            "Disks of --kv-disk that are not in use, before their file is open and after an error",
        ),
        Row::gauge("kv_disk_blocks", |disk| disk.num_pages as u64).help("KV blocks on the disks"),
        Row::gauge("kv_disk_max_blocks", |disk| disk.max_pages.into())
            .help("KV blocks for which the files on the disks have room"),
        Row::counter("kv_disk_blocks_stored", |disk| disk.num_stored)
            .help("KV blocks that were written to the disk"),
        Row::counter("kv_disk_copies_dropped", |disk| disk.num_dropped).help(
            "Copies to the disk that were given up: requests needed the pages, or the disk failed",
        ),
        Row::counter("kv_disk_hits", |disk| disk.num_read)
            .help("KV blocks that were read from the disk for requests"),
        Row::counter("kv_disk_written_bytes", |disk| disk.bytes_written)
            .help("Bytes that were written to the disk"),
        Row::counter("kv_disk_read_bytes", |disk| disk.bytes_read)
            .help("Bytes of blocks that were read from the disk"),
        Row::counter("kv_disk_damaged_blocks", |disk| disk.num_damaged)
            .help("KV blocks on the disk that proved torn or damaged"),
        Row::counter("kv_disk_errors", |disk| disk.num_errors).help("Errors of the disk"),
    ];

    /// The metrics of host memory.
    pub const HOST_METRICS: &[Metric<Self>] = &[
        Row::gauge("kv_host_on", |host| host.is_on().into())
            .help("1 while the memory of --kv-host-memory is in use"),
        Row::gauge("kv_host_blocks", |host| host.num_pages as u64)
            .help("KV blocks in the memory of --kv-host-memory"),
        Row::gauge("kv_host_max_blocks", |host| host.max_pages.into())
            .help("KV blocks for which that memory has room"),
        Row::counter("kv_host_blocks_stored", |host| host.num_stored)
            .help("KV blocks that were copied to that memory"),
        Row::counter("kv_host_copies_dropped", |host| host.num_dropped)
            .help("Copies to that memory that were given up, because requests needed the pages"),
        Row::counter("kv_host_hits", |host| host.num_read)
            .help("KV blocks that were copied back for requests"),
        Row::counter("kv_host_written_bytes", |host| host.bytes_written)
            .help("Bytes that were copied to that memory"),
        Row::counter("kv_host_read_bytes", |host| host.bytes_read)
            .help("Bytes that were copied back"),
    ];
}
