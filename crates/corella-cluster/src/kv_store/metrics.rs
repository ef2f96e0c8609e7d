//! The metrics of the use of LMCache's server.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::store::KvStore;
use crate::metric::{counter, gauge};

/// Reads the counts at each scrape.
struct StoreMetrics(Arc<KvStore>);

impl KvStore {
    /// Returns the collector of this store's part of the server's metrics.
    pub fn collector(self: &Arc<Self>) -> Box<dyn Collector> {
        Box::new(StoreMetrics(self.clone()))
    }
}

impl fmt::Debug for StoreMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreMetrics")
    }
}

impl Collector for StoreMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let stats = self.0.stats();
        let help = "1 while LMCache's server is used, 0 while it does not answer";
        gauge(
            &mut encoder,
            "corella_kv_store_on",
            help,
            stats.is_on.into(),
        )?;
        let counts = [
            (
                "corella_kv_store_chunks_stored",
                "Chunks of KV blocks that were copied to LMCache's server",
                stats.num_stored,
            ),
            (
                "corella_kv_store_copies_dropped",
                "Copies to LMCache's server that were given up, because requests needed the pages",
                stats.num_dropped,
            ),
            (
                "corella_kv_store_hits",
                "KV blocks that were fetched from LMCache's server for requests",
                stats.num_hits,
            ),
            (
                "corella_kv_store_written_bytes",
                "Bytes that were copied to LMCache's server",
                stats.bytes_written,
            ),
            (
                "corella_kv_store_read_bytes",
                "Bytes of chunks that were read from LMCache's server",
                stats.bytes_read,
            ),
            (
                "corella_kv_store_damaged_chunks",
                "Chunks of LMCache's server that proved torn or foreign",
                stats.num_damaged,
            ),
            (
                "corella_kv_store_errors",
                "Failed calls to LMCache's server",
                stats.num_errors,
            ),
        ];
        for (name, help, count) in counts {
            counter(&mut encoder, name, help, count)?;
        }
        Ok(())
    }
}
