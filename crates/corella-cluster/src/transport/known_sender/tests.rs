//! Loads of one connection share its attempts to connect.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use corella_core::session::SessionKey;
use corella_core::{Arithmetic, Incarnation, PageId, PageTable, SessionId};
use corella_model::{DType, ElementOrder, KvFormat, KvGeometry, KvLayers};
use corella_test::wait_until;

use crate::transport::{
    KvReceiver, LoadFailure, LoadRequest, LoadStatus, PeerAddress, PlainPages, ReceiverConfig,
    TransferThreads,
};

/// The peer accepts no connection. A load that waited for an attempt makes no attempt of its own.
#[test]
fn loads_of_a_connection_share_its_attempts() {
    let geometry = KvGeometry {
        num_layers: 1,
        layers: KvLayers::one(1),
        num_kv_heads: 1,
        head_dim: 64,
        page_size: 16,
        num_pages: 2,
        format: KvFormat::Float(DType::Bf16),
        order: ElementOrder::Plain,
    };
    let threads = TransferThreads::start(1).unwrap();
    let config = ReceiverConfig {
        connections_per_peer: 1,
        connect_timeout: Duration::from_millis(50),
        num_connect_attempts: 3,
        ..ReceiverConfig::new(1, 0, Arithmetic(0))
    };
    let receiver = KvReceiver::new(config, Arc::new(PlainPages::new(geometry)), &threads);
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let peer = PeerAddress::Tcp(silent.local_addr().unwrap());
    // The thread is blocked until all loads are queued, so that no load arrives after the last attempt.
    let (go_on, all_are_there) = mpsc::channel::<()>();
    threads.spawn(async move {
        all_are_there.recv().ok();
    });
    let loads: Vec<_> = (0..8)
        .map(|session| {
            let request = LoadRequest {
                key: SessionKey {
                    session: SessionId(session),
                    attempt: 0,
                    prefill_incarnation: Incarnation(2),
                    decode_incarnation: Incarnation(1),
                },
                peer: peer.clone(),
                arithmetic: Arithmetic(0),
                first_row: 0,
                num_rows: 32,
                tables: vec![PageTable::whole(vec![PageId(0), PageId(1)])],
                state: None,
                deadline: Instant::now() + Duration::from_hours(1),
            };
            // SAFETY: no load writes to the pages, because the peer sends no rows.
            unsafe { receiver.load(request) }.unwrap()
        })
        .collect();
    drop(go_on);
    for load in &loads {
        wait_until("the load ends", || load.status().is_over());
        assert!(
            matches!(
                load.status(),
                LoadStatus::Failed(LoadFailure::Unreachable(_))
            ),
            "{:?}",
            load.status()
        );
    }
    silent.set_nonblocking(true).unwrap();
    assert_eq!(silent.incoming().map_while(Result::ok).count(), 3);
}
