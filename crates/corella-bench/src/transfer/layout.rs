//! The memory of both ends of a measured transfer, and the copied pages.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use corella_cluster::transport::PlainPages;
use corella_core::PageId;
use corella_model::{DType, ElementOrder, KvFormat, KvGeometry, KvLayers, KvPages};

use super::TransferBenchOptions;
use crate::BenchError;
use crate::sample::split_mix::split_mix;

/// Number of concurrent sessions of a connection.
const SESSIONS_PER_CONNECTION: usize = 4;
/// The limit of each end's memory.
const MAX_POOL_BYTES: usize = 256 << 20;

pub const PAGE_SIZE: u32 = 16;
const HEAD_DIM: usize = 64;
/// Bytes of one token's key and value of one head, in bf16.
const ROW_BYTES: usize = 2 * HEAD_DIM * 2;

/// The memory of both ends, and the pages to copy. Every measured way of copying moves the same pages to the same
/// places in the same order.
pub struct Layout {
    pub from: Arc<PlainPages>,
    pub to: Arc<PlainPages>,
    /// The pages of each message on both sides. Concurrent messages have different pages.
    pub tables: Vec<Table>,
    pub num_connections: usize,
    /// The number of messages in one measurement.
    pub num_messages: usize,
    pub message_bytes: usize,
}

pub struct Table {
    pub from: Vec<PageId>,
    pub to: Vec<PageId>,
}

impl Layout {
    pub fn new(
        options: &TransferBenchOptions,
        message_bytes: usize,
        page_bytes: usize,
    ) -> Result<Self, BenchError> {
        let num_pages = message_bytes / page_bytes.max(1);
        if page_bytes == 0 || !page_bytes.is_multiple_of(PAGE_SIZE as usize * ROW_BYTES) {
            let step = PAGE_SIZE as usize * ROW_BYTES;
            let reason = format!("pages of {page_bytes} bytes: they must be multiples of {step}");
            return Err(BenchError::Option(reason));
        }
        if num_pages == 0 || num_pages * page_bytes != message_bytes {
            return Err(BenchError::Option(format!(
                "messages of {message_bytes} bytes: they must be whole pages of {page_bytes} bytes"
            )));
        }
        let num_connections = options.num_connections;
        let most = MAX_POOL_BYTES / (message_bytes * num_connections);
        let num_tables = num_connections * most.clamp(1, SESSIONS_PER_CONNECTION);
        let num_messages = (options.bytes_per_repeat / message_bytes).next_multiple_of(num_tables);
        let geometry = KvGeometry {
            num_layers: 1,
            layers: KvLayers::one(1),
            num_kv_heads: (page_bytes / (PAGE_SIZE as usize * ROW_BYTES)) as u32,
            head_dim: HEAD_DIM as u32,
            page_size: PAGE_SIZE,
            num_pages: (num_tables * num_pages) as u32,
            format: KvFormat::Float(DType::Bf16),
            order: ElementOrder::Plain,
        };
        let [from_ids, to_ids] = [1, 2].map(|seed| shuffled(geometry.num_pages, seed));
        let tables = from_ids.chunks(num_pages).zip(to_ids.chunks(num_pages));
        let tables = tables.map(|(from, to)| Table {
            from: from.to_vec(),
            to: to.to_vec(),
        });
        let from = PlainPages::new(geometry.clone());
        for page in 0..geometry.num_pages {
            // SAFETY: the pages are not in use yet.
            unsafe { from.fill(0, PageId(page), |i| (i as u32 ^ page) as u8) };
        }
        Ok(Self {
            tables: tables.collect(),
            from: Arc::new(from),
            to: Arc::new(PlainPages::new(geometry)),
            num_connections,
            num_messages,
            message_bytes,
        })
    }

    pub fn geometry(&self) -> &KvGeometry {
        self.from.geometry()
    }

    /// Returns the tables that a connection copies in turn.
    pub fn tables_of(&self, connection: usize) -> impl Iterator<Item = &Table> + Clone {
        self.tables
            .iter()
            .skip(connection)
            .step_by(self.num_connections)
    }

    /// Copies all messages once, and returns the bytes per second.
    pub fn measure(&self, copy: impl FnOnce() -> io::Result<()>) -> Result<f64, BenchError> {
        let started_at = Instant::now();
        copy().map_err(|error| BenchError::Worker(error.to_string()))?;
        let num_bytes = self.num_messages * self.message_bytes;
        Ok(num_bytes as f64 / started_at.elapsed().as_secs_f64())
    }
}

/// Returns pages like those of a server that has run for a while: neighbours in a table are not
/// adjacent in memory.
fn shuffled(num_pages: u32, seed: u64) -> Vec<PageId> {
    let mut state = seed;
    let mut ids: Vec<_> = (0..num_pages).map(PageId).collect();
    for last in (1..ids.len()).rev() {
        ids.swap(last, (split_mix(&mut state) % (last as u64 + 1)) as usize);
    }
    ids
}
