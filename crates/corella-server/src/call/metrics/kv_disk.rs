//! The metrics of the disk that keeps KV blocks.

use std::fmt;

use corella_engine::Engine;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::wire::metric_series::encode;

/// Reads the engine's counts at each scrape. Without a disk there are none.
pub struct KvDiskMetrics(pub Engine);

impl fmt::Debug for KvDiskMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KvDiskMetrics")
    }
}

impl Collector for KvDiskMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(stats) = self.0.stats().kv_disk else {
            return Ok(());
        };
        let gauges = [
            (
                "corella_kv_disk_on",
                "1 while blocks are kept on the disk, 0 after an error of the disk",
                i64::from(stats.is_on),
            ),
            (
                "corella_kv_disk_blocks",
                "KV blocks on the disk",
                stats.num_blocks as i64,
            ),
            (
                "corella_kv_disk_max_blocks",
                "KV blocks for which the file on the disk has room",
                stats.max_blocks.into(),
            ),
        ];
        let counters = [
            (
                "corella_kv_disk_blocks_stored",
                "KV blocks that were written to the disk",
                stats.num_stored,
            ),
            (
                "corella_kv_disk_hits",
                "KV blocks that were read from the disk for requests",
                stats.num_read,
            ),
            (
                "corella_kv_disk_written_bytes",
                "Bytes that were written to the disk",
                stats.bytes_written,
            ),
            (
                "corella_kv_disk_read_bytes",
                "Bytes of blocks that were read from the disk",
                stats.bytes_read,
            ),
            (
                "corella_kv_disk_damaged_blocks",
                "KV blocks on the disk that proved torn or damaged",
                stats.num_damaged,
            ),
            (
                "corella_kv_disk_errors",
                "Errors of the disk",
                stats.num_errors,
            ),
        ];
        for (name, help, value) in gauges {
            encode(&mut encoder, name, help, &ConstGauge::new(value))?;
        }
        for (name, help, value) in counters {
            encode(&mut encoder, name, help, &ConstCounter::new(value))?;
        }
        Ok(())
    }
}
