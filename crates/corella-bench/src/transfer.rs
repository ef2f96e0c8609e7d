//! `bench transfer`: the speed of KV rows from one node's memory to another's, beside the machine's limits.

mod bare_copy;
mod layout;
mod option;
mod pair;

use std::fmt;

use corella_cluster::transport::ROW_PATHS;
use serde_json::{Value, json};

use crate::BenchError;
use crate::sample::summary::Summary;
use bare_copy::BareSockets;
use layout::Layout;
pub use option::TransferBenchOptions;
use pair::Pair;

#[derive(Debug, Clone)]
pub struct TransferReport {
    pub num_connections: usize,
    pub rows: Vec<TransferSpeed>,
}

/// Bytes per second over all connections. A ratio compares two measurements that follow each other.
#[derive(Debug, Clone)]
pub struct TransferSpeed {
    pub message_bytes: usize,
    pub page_bytes: usize,
    pub num_messages: usize,
    pub memcpy: Summary,
    pub socket: Summary,
    pub tcp: Summary,
    pub shm: Summary,
    /// Present if NIXL is installed.
    pub nixl: Option<Summary>,
    pub tcp_to_socket: Summary,
    pub shm_to_memcpy: Summary,
}

pub fn run(options: &TransferBenchOptions) -> Result<TransferReport, BenchError> {
    let mut rows = Vec::new();
    for &page_bytes in &options.page_bytes {
        for &message_bytes in &options.message_bytes {
            rows.push(speed(options, message_bytes, page_bytes)?);
        }
    }
    Ok(TransferReport {
        num_connections: options.num_connections,
        rows,
    })
}

fn speed(
    options: &TransferBenchOptions,
    message_bytes: usize,
    page_bytes: usize,
) -> Result<TransferSpeed, BenchError> {
    let failed = |error: std::io::Error| BenchError::Worker(error.to_string());
    let layout = Layout::new(options, message_bytes, page_bytes)?;
    let mut bare = BareSockets::connect(options.num_connections).map_err(failed)?;
    let tcp = Pair::over_tcp(&layout, options).map_err(failed)?;
    let shm = Pair::inside_host(&layout, options).map_err(failed)?;
    let nixl = ROW_PATHS
        .iter()
        .find(|kind| kind.option == "nixl" && kind.load.is_some_and(|load| load().is_ok()));
    let nixl = nixl.map(|kind| Pair::by_path(&layout, options, kind));
    let nixl = nixl.transpose().map_err(failed)?;
    let mut columns = [(); 5].map(|()| Vec::new());
    // The first repeat is a warm-up.
    for repeat in 0..=options.num_repeats {
        let speeds = [
            layout.measure(|| bare_copy::copy_memory(&layout))?,
            layout.measure(|| bare.copy(&layout, options.chunk_bytes))?,
            layout.measure(|| tcp.copy(&layout))?,
            layout.measure(|| shm.copy(&layout))?,
        ];
        let by_nixl = |pair: &Pair| layout.measure(|| pair.copy(&layout));
        let nixl_speed = nixl.as_ref().map(by_nixl).transpose()?;
        if repeat > 0 {
            columns
                .iter_mut()
                .zip(speeds.into_iter().chain(nixl_speed))
                .for_each(|(column, speed)| column.push(speed));
        }
    }
    if nixl.as_ref().is_some_and(|pair| !pair.has_read_by_nixl()) {
        let reason = "NIXL is installed and does not work; the log says why".to_owned();
        return Err(BenchError::Worker(reason));
    }
    let [memcpy, socket, tcp, shm, by_nixl] = columns;
    let ratios = |of: &[f64], to: &[f64]| {
        let ratios = of.iter().zip(to).map(|(of, to)| of / to);
        Summary::new(ratios.collect())
    };
    Ok(TransferSpeed {
        message_bytes,
        page_bytes,
        num_messages: layout.num_messages,
        tcp_to_socket: ratios(&tcp, &socket),
        shm_to_memcpy: ratios(&shm, &memcpy),
        memcpy: Summary::new(memcpy),
        socket: Summary::new(socket),
        tcp: Summary::new(tcp),
        shm: Summary::new(shm),
        nixl: nixl.map(|_| Summary::new(by_nixl)),
    })
}

impl TransferReport {
    pub fn to_json(&self) -> Value {
        let spread = |summary: &Summary| json!({ "median": summary.median, "mean": summary.mean, "std": summary.std });
        let rows = self.rows.iter().map(|row| {
            json!({
                "message_bytes": row.message_bytes,
                "page_bytes": row.page_bytes,
                "num_messages": row.num_messages,
                "memcpy_bytes_per_s": spread(&row.memcpy),
                "socket_bytes_per_s": spread(&row.socket),
                "tcp_bytes_per_s": spread(&row.tcp),
                "shm_bytes_per_s": spread(&row.shm),
                "nixl_bytes_per_s": row.nixl.as_ref().map(spread),
                "tcp_to_socket": spread(&row.tcp_to_socket),
                "shm_to_memcpy": spread(&row.shm_to_memcpy),
            })
        });
        json!({
            "num_connections": self.num_connections,
            "rows": rows.collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for TransferReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "Sessions of KV rows, {} connections, GB/s (medians)",
            self.num_connections
        )?;
        writeln!(
            f,
            "{:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>11} {:>11}",
            "page KB", "KB", "memcpy", "socket", "tcp", "shm", "nixl", "tcp/socket", "shm/memcpy"
        )?;
        let gb = |summary: &Summary| summary.median / 1e9;
        for row in &self.rows {
            writeln!(
                f,
                "{:>9} {:>9} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9} {:>11.2} {:>11.2}",
                row.page_bytes >> 10,
                row.message_bytes >> 10,
                gb(&row.memcpy),
                gb(&row.socket),
                gb(&row.tcp),
                gb(&row.shm),
                row.nixl
                    .as_ref()
                    .map_or("-".to_owned(), |nixl| format!("{:.2}", gb(nixl))),
                row.tcp_to_socket.median,
                row.shm_to_memcpy.median,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_its_row() {
        let report = run(&TransferBenchOptions {
            message_bytes: vec![64 << 10, 1 << 20],
            page_bytes: vec![4 << 10, 64 << 10],
            num_connections: 2,
            num_repeats: 1,
            bytes_per_repeat: 1 << 20,
            chunk_bytes: 64 << 10,
        });
        let json = report.unwrap().to_json();
        let rows = json["rows"].as_array().unwrap();
        let sizes = |row: &Value| {
            ["page_bytes", "message_bytes", "num_messages"].map(|name| row[name].as_u64().unwrap())
        };
        let sizes: Vec<_> = rows.iter().map(sizes).collect();
        assert_eq!(
            sizes,
            [
                [4096, 65536, 16],
                [4096, 1048576, 8],
                [65536, 65536, 16],
                [65536, 1048576, 8]
            ]
        );
        for row in rows {
            assert!(row["tcp_to_socket"]["median"].as_f64().unwrap() > 0.0);
            assert!(row["shm_to_memcpy"]["median"].as_f64().unwrap() > 0.0);
        }
    }

    #[test]
    fn every_way_brings_the_same_bytes_to_the_same_pages() {
        let options = TransferBenchOptions {
            bytes_per_repeat: 1 << 20,
            chunk_bytes: 24 << 10,
            ..TransferBenchOptions::default()
        };
        let layout = Layout::new(&options, 128 << 10, 8 << 10).unwrap();
        let tcp = Pair::over_tcp(&layout, &options).unwrap();
        let shm = Pair::inside_host(&layout, &options).unwrap();
        let mut bare = BareSockets::connect(options.num_connections).unwrap();
        let ways: [&mut dyn FnMut() -> std::io::Result<()>; 4] = [
            &mut || bare_copy::copy_memory(&layout),
            &mut || bare.copy(&layout, options.chunk_bytes),
            &mut || tcp.copy(&layout),
            &mut || shm.copy(&layout),
        ];
        for way in ways {
            let pages = || {
                layout
                    .tables
                    .iter()
                    .flat_map(|table| table.from.iter().zip(&table.to))
            };
            // SAFETY: no copy is running.
            pages().for_each(|(_, &to)| unsafe { layout.to.fill(0, to, |_| 0) });
            way().unwrap();
            assert_eq!(pages().count(), 128);
            for (&from, &to) in pages() {
                // SAFETY: as above.
                let [from, to] = unsafe { [layout.from.bytes(0, from), layout.to.bytes(0, to)] };
                assert!(from == to && from.iter().any(|&byte| byte != 0));
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_said() {
        for (message_bytes, page_bytes) in [(100 << 10, 64 << 10), (1 << 20, 1000), (0, 4096)] {
            let error = run(&TransferBenchOptions {
                message_bytes: vec![message_bytes],
                page_bytes: vec![page_bytes],
                ..TransferBenchOptions::default()
            });
            assert!(
                matches!(error, Err(BenchError::Option(_))),
                "{message_bytes} {page_bytes}"
            );
        }
    }
}
