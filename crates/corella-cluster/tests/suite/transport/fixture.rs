//! Two nodes with plain memory for their pages.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_cluster::transport::{
    KvReceiver, KvSender, LoadHandle, LoadRequest, LoadStatus, PeerAddress, PlainPages,
    ReceiverConfig, SendStatus, SenderConfig, TransferThreads,
};
use corella_core::session::SessionKey;
use corella_core::{Arithmetic, Incarnation, PageId, PageTable, SessionId};
use corella_model::{DType, ElementOrder, KvFormat, KvGeometry, KvLayers, KvPages};
use corella_test::{wait_for, wait_until};
use tokio::sync::watch;

pub const PREFILL: u64 = 0x70;
pub const DECODE: u64 = 0xdec0de;
pub const MODEL: u128 = 0x1234_5678_9abc_def0_1111;
pub const ARITHMETIC: Arithmetic = Arithmetic(0x2222);
/// For deadlines and limits that are not the test's subject: every test ends before.
pub const HOUR: Duration = Duration::from_hours(1);
/// Ends a read that would hang. No passing test comes near it.
pub const READ_TIMEOUT: Duration = Duration::from_mins(5);
/// Limits one attempt to connect that succeeds.
const CONNECT_TIMEOUT: Duration = Duration::from_mins(1);
/// Limits one attempt to connect that fails at the end of this time.
pub const FAILED_CONNECT_TIME: Duration = Duration::from_secs(1);

pub fn geometry(num_layers: u32, page_size: u32, num_pages: u32) -> KvGeometry {
    KvGeometry {
        num_layers,
        layers: KvLayers::one(num_layers),
        num_kv_heads: 2,
        head_dim: 64,
        page_size,
        num_pages,
        format: KvFormat::Float(DType::Bf16),
        order: ElementOrder::Plain,
    }
}

/// The table of a model with one KV group.
pub fn whole(pages: &[PageId]) -> [PageTable; 1] {
    [PageTable::whole(pages.to_vec())]
}

pub fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

pub fn key(uuid: u128) -> SessionKey {
    SessionKey {
        session: SessionId(uuid),
        attempt: 0,
        prefill_incarnation: Incarnation(PREFILL),
        decode_incarnation: Incarnation(DECODE),
    }
}

pub fn page_ids(ids: impl IntoIterator<Item = u32>) -> Vec<PageId> {
    ids.into_iter().map(PageId).collect()
}

pub struct SendingNode {
    pub sender: KvSender,
    pub pages: Arc<PlainPages>,
    pub address: SocketAddr,
}

impl SendingNode {
    pub fn new(geometry: KvGeometry) -> Self {
        Self::configured(geometry, |_| {})
    }

    pub fn configured(geometry: KvGeometry, change: impl FnOnce(&mut SenderConfig)) -> Self {
        Self::on_threads(2, geometry, change)
    }

    pub fn on_threads(
        num_threads: usize,
        geometry: KvGeometry,
        change: impl FnOnce(&mut SenderConfig),
    ) -> Self {
        let threads = TransferThreads::start(num_threads).unwrap();
        let mut config = SenderConfig {
            max_wait: HOUR,
            tombstone_time: HOUR,
            stall_timeout: HOUR,
            idle_timeout: HOUR,
            chunk_bytes: 64 << 10,
            ..SenderConfig::new(PREFILL, MODEL, ARITHMETIC)
        };
        change(&mut config);
        let pages = Arc::new(PlainPages::new(geometry));
        let sender = KvSender::start(config, pages.clone(), &threads).unwrap();
        let address = listen(&sender);
        Self {
            sender,
            pages,
            address,
        }
    }

    /// Fills pages with content that differs by session, layer and page.
    pub fn fill(&self, key: &SessionKey, table: &[PageId]) {
        for (index, &page) in table.iter().enumerate() {
            for layer in 0..self.num_layers() {
                // SAFETY: the tests fill pages before they declare them readable.
                unsafe { self.pages.fill(layer, page, content(key, layer, index)) };
            }
        }
    }

    pub fn num_layers(&self) -> u32 {
        KvPages::geometry(&*self.pages).num_layers
    }

    pub fn export(&self, key: &SessionKey, num_rows: u32) -> watch::Receiver<SendStatus> {
        // SAFETY: the tests that change readable pages say so.
        unsafe { self.sender.export(*key, num_rows) }.unwrap()
    }

    /// Stores the first layers. The others never come.
    pub fn store_layers(
        &self,
        key: &SessionKey,
        table: &[PageId],
        num_rows: u32,
        num_layers: u32,
    ) -> watch::Receiver<SendStatus> {
        self.fill(key, table);
        let status = self.export(key, num_rows);
        self.sender.add_pages(key, &whole(table));
        self.sender
            .handle_rows_readable(key, 0..num_layers, num_rows);
        status
    }

    /// Stores all rows at once.
    pub fn export_whole(
        &self,
        key: &SessionKey,
        table: &[PageId],
        num_rows: u32,
    ) -> watch::Receiver<SendStatus> {
        self.fill(key, table);
        let status = self.export(key, num_rows);
        self.make_readable(key, table, num_rows);
        status
    }

    pub fn make_readable(&self, key: &SessionKey, table: &[PageId], num_rows: u32) {
        self.sender.add_pages(key, &whole(table));
        self.sender
            .handle_rows_readable(key, 0..self.num_layers(), num_rows);
        assert!(self.sender.finish(key));
    }
}

/// Returns byte `i` of a page within a layer, for page `index` of a session.
pub fn content(key: &SessionKey, layer: u32, index: usize) -> impl Fn(usize) -> u8 + use<> {
    let seed = key.session.0 as usize * 131 + layer as usize * 31 + index * 7 + 1;
    move |i| (seed.wrapping_mul(i / 8 + 3) >> 2) as u8 ^ i as u8
}

pub struct ReceivingNode {
    pub receiver: KvReceiver,
    pub pages: Arc<PlainPages>,
}

impl ReceivingNode {
    pub fn new(geometry: KvGeometry) -> Self {
        Self::configured(geometry, |_| {})
    }

    pub fn configured(geometry: KvGeometry, change: impl FnOnce(&mut ReceiverConfig)) -> Self {
        let threads = TransferThreads::start(2).unwrap();
        let mut config = ReceiverConfig::new(DECODE, MODEL, ARITHMETIC);
        config.connect_timeout = CONNECT_TIMEOUT;
        change(&mut config);
        let pages = Arc::new(PlainPages::new(geometry));
        let receiver = KvReceiver::new(config, pages.clone(), &threads);
        Self { receiver, pages }
    }

    pub fn load(
        &self,
        key: &SessionKey,
        peer: impl Into<PeerAddress>,
        first_row: u32,
        num_rows: u32,
        table: &[PageId],
    ) -> LoadHandle {
        self.load_until(key, peer, first_row, num_rows, table, Instant::now() + HOUR)
    }

    pub fn load_until(
        &self,
        key: &SessionKey,
        peer: impl Into<PeerAddress>,
        first_row: u32,
        num_rows: u32,
        table: &[PageId],
        deadline: Instant,
    ) -> LoadHandle {
        let request = LoadRequest {
            key: *key,
            peer: peer.into(),
            arithmetic: ARITHMETIC,
            first_row,
            num_rows,
            tables: whole(table).to_vec(),
            state: None,
            deadline,
        };
        // SAFETY: tests give every load pages of its own.
        unsafe { self.receiver.load(request) }.unwrap()
    }

    /// Asserts that these pages hold the session's rows, from the page `first` on, in all layers.
    pub fn assert_holds(&self, key: &SessionKey, table: &[PageId], first: usize) {
        let geometry = KvPages::geometry(&*self.pages);
        for (index, &page) in table.iter().enumerate().skip(first) {
            for layer in 0..geometry.num_layers {
                // SAFETY: the load is over.
                let bytes = unsafe { self.pages.bytes(layer, page) };
                let expected: Vec<u8> = (0..bytes.len()).map(content(key, layer, index)).collect();
                assert!(
                    bytes == expected,
                    "session {key}, page {index}, layer {layer}"
                );
            }
        }
    }

    pub fn fill(&self, pages: &[PageId], byte: u8) {
        let geometry = KvPages::geometry(&*self.pages);
        for &page in pages {
            for layer in 0..geometry.num_layers {
                // SAFETY: no load has these pages.
                unsafe { self.pages.fill(layer, page, |_| byte) };
            }
        }
    }

    pub fn assert_filled(&self, pages: &[PageId], byte: u8) {
        let geometry = KvPages::geometry(&*self.pages);
        for &page in pages {
            for layer in 0..geometry.num_layers {
                // SAFETY: no load has these pages.
                let bytes = unsafe { self.pages.bytes(layer, page) };
                assert!(
                    bytes.iter().all(|&other| other == byte),
                    "{page:?}, layer {layer}"
                );
            }
        }
    }
}

/// Listens on a free port.
pub fn listen(sender: &KvSender) -> SocketAddr {
    match sender.listen(loopback(0)).unwrap() {
        PeerAddress::Tcp(address) => address,
        PeerAddress::Name(name) => panic!("{name}"),
        PeerAddress::Unix(name) => panic!("{name}"),
    }
}

/// Waits until a load is over.
pub fn wait(load: &LoadHandle) -> LoadStatus {
    wait_for("the load ends", || {
        let status = load.status();
        status.is_over().then_some(status)
    })
}

/// Waits until a load has received rows.
pub fn wait_for_bytes(load: &LoadHandle) {
    wait_until("rows come", || load.status() != LoadStatus::Opening);
    assert!(
        matches!(load.status(), LoadStatus::Receiving { .. }),
        "{:?}",
        load.status()
    );
}

pub fn wait_for_status(status: &watch::Receiver<SendStatus>, wanted: SendStatus) {
    wait_until(&format!("the session is {wanted:?}"), || {
        *status.borrow() == wanted
    });
}

/// Lower bounds hold on slow machines, too; the tests have no other bounds on wall-clock time.
pub fn assert_not_before(earliest: Instant, what: &str) {
    let left = earliest.saturating_duration_since(Instant::now());
    assert!(left.is_zero(), "{what}, {left:?} too early");
}
