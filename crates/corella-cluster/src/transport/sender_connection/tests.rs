//! Deadlines of waiting loads, at chosen times. The sender's own clock is an hour behind these times, so the sender's
//! thread expires no load.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::session::SessionKey;
use corella_core::{Arithmetic, Incarnation, SessionId};
use corella_model::{DType, ElementOrder, KvFormat, KvGeometry, KvLayers, PageForm};
use tokio::net::{TcpListener, TcpStream};

use super::SenderConnection;
use crate::transport::connection_queue::{ConnectionId, ConnectionQueue};
use crate::transport::frame::{FRAME_BYTES, Frame, LoadFrame, Refusal};
use crate::transport::outgoing::Outgoing;
use crate::transport::sender_state::SenderState;
use crate::transport::socket::Socket;
use crate::transport::{KvSender, PlainPages, SenderConfig, TransferThreads};

const OWN: Incarnation = Incarnation(7);
const THEIRS: Incarnation = Incarnation(9);
const MAX_WAIT: Duration = Duration::from_secs(60);
const TOMBSTONE_TIME: Duration = Duration::from_secs(30);
const US: Duration = Duration::from_micros(1);
const NOTHING: [Frame; 0] = [];

struct Scene {
    sender: KvSender,
    pages: Arc<PlainPages>,
    connection: SenderConnection,
    start: Instant,
    // The other end of the connection, kept open and never read.
    _peer: TcpStream,
}

impl Scene {
    async fn new() -> Self {
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
        let config = SenderConfig {
            max_wait: MAX_WAIT,
            tombstone_time: TOMBSTONE_TIME,
            ..SenderConfig::new(OWN.0, 0, Arithmetic(0))
        };
        let pages = Arc::new(PlainPages::new(geometry));
        let threads = TransferThreads::start(1).unwrap();
        let sender = KvSender::start(config, pages.clone(), &threads).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap());
        let (accepted, peer) = tokio::join!(listener.accept(), peer);
        let socket = Socket::tcp(accepted.unwrap().0).unwrap();
        let queue = ConnectionQueue::new(ConnectionId(1), 100, Arc::default());
        let connection = SenderConnection::new(queue, socket, PageForm::Native, false, THEIRS.0);
        Self {
            sender,
            pages,
            connection,
            start: Instant::now() + Duration::from_hours(1),
            _peer: peer.unwrap(),
        }
    }

    fn state(&self) -> &Arc<SenderState> {
        &self.sender.state
    }

    /// Handles a load at `start`.
    fn load(&self, load_id: u64, key: SessionKey, wait_ms: u32) {
        let load = LoadFrame {
            load_id,
            key,
            first_row: 0,
            num_rows: 16,
            credit_bytes: 0,
            wait_ms,
        };
        let handled = self.connection.handle_load(self.state(), load, self.start);
        handled.unwrap();
    }

    /// Expires the waits that are due at this time, and returns the frames queued by that.
    fn told_at(&self, time: Duration) -> Vec<Frame> {
        self.state().table().expire(self.start + time);
        let mut bytes = Vec::new();
        self.connection.queue.frames.take(&mut bytes);
        let (frames, _) = bytes.as_chunks::<FRAME_BYTES>();
        frames.iter().map(|it| Frame::decode(it).unwrap()).collect()
    }

    fn export_at(&self, key: SessionKey, time: Duration) -> Result<(), Refusal> {
        let outgoing = Arc::new(Outgoing::new(key, self.pages.clone(), 16));
        self.state().table().insert(outgoing, self.start + time)
    }
}

fn key(session: u128, decode_incarnation: Incarnation) -> SessionKey {
    SessionKey {
        session: SessionId(session),
        attempt: 0,
        prefill_incarnation: OWN,
        decode_incarnation,
    }
}

fn not_exported(load_id: u64) -> Frame {
    let reason = Refusal::NotExported;
    Frame::Failed { load_id, reason }
}

/// KV that never comes (rule 41 of docs/behaviours.md), with the times of the wire and of the configuration.
#[tokio::test]
async fn a_load_is_refused_at_its_deadline_and_remembered_as_long_as_a_tombstone_stays() {
    let scene = Scene::new().await;
    let (key, wait) = (key(1, THEIRS), Duration::from_millis(200));
    scene.load(5, key, 200);
    assert_eq!(scene.told_at(wait - US), NOTHING);
    assert_eq!(scene.told_at(wait), [not_exported(5)]);
    assert_eq!(scene.told_at(wait), NOTHING);
    let over = Err(Refusal::NotExported);
    assert_eq!(scene.export_at(key, wait), over);
    assert_eq!(scene.export_at(key, wait + TOMBSTONE_TIME - US), over);
    assert_eq!(scene.export_at(key, wait + TOMBSTONE_TIME), Ok(()));
}

#[tokio::test]
async fn no_load_waits_for_longer_than_the_sender_allows() {
    let scene = Scene::new().await;
    scene.load(1, key(1, THEIRS), u32::MAX);
    assert_eq!(scene.told_at(MAX_WAIT - US), NOTHING);
    assert_eq!(scene.told_at(MAX_WAIT), [not_exported(1)]);
}

/// A session for any node is stored before its address is given out, so a load of such a session waits for up to a
/// second.
#[tokio::test]
async fn a_load_of_what_is_stored_for_anybody_waits_for_a_second() {
    let scene = Scene::new().await;
    scene.load(1, key(1, Incarnation::ANY), 60_000);
    let second = Duration::from_secs(1);
    assert_eq!(scene.told_at(second - US), NOTHING);
    assert_eq!(scene.told_at(second), [not_exported(1)]);
}
