//! Messages of a cluster's nodes: sessions over gRPC, and frames of KV connections.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use corella_cluster::session::{DecodeNode, DecodeParts, NodeListener, NodeSite, serve_sessions};
use corella_cluster::transport::{
    FRAME_BYTES, Frame, Hello, KvReceiver, KvSender, LoadFrame, PeerAddress, PlainPages,
    ReceiverConfig, SenderConfig, TRAILER_BYTES, Trailer, TransferThreads,
};
use corella_core::session::{Hello as NodeFacts, KvShape, SessionConfig, SessionKey};
use corella_core::{Arithmetic, Incarnation, PageId, PageTable, SchedulerConfig, SessionId};
use corella_engine::{Engine, EngineConfig};
use corella_fuzz::{Random, Target, Verdict, mutate_bytes};
use corella_model::{
    DType, ElementOrder, Executor, KvFormat, KvGeometry, KvLayers, KvPages, MockConfig,
    MockExecutor,
};
use corella_test::wait_until;
use prost::bytes::{Buf, BufMut};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

const PREFILL: u64 = 7;
const DECODE: u64 = 8;
const FINGERPRINT: u128 = 0x5eed;
const ARITHMETIC: Arithmetic = Arithmetic(5);
/// The time to listen for an answer to an altered message, which may not come.
const SILENCE: Duration = Duration::from_millis(50);
/// The time after which a missing mandatory answer ends a test.
const PATIENCE: Duration = Duration::from_secs(300);

/// A message in protocol buffers, written field by field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(mut self, field: u8, value: u64) -> Self {
        self.put_tag(field, 0);
        self.put_varint(value);
        self
    }

    fn fixed64(mut self, field: u8, value: u64) -> Self {
        self.put_tag(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn float(mut self, field: u8, value: f32) -> Self {
        self.put_tag(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(mut self, field: u8, value: &[u8]) -> Self {
        self.put_tag(field, 2);
        self.put_varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    fn put_tag(&mut self, field: u8, kind: u64) {
        self.put_varint((u64::from(field) << 3) | kind);
    }

    fn put_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// Messages of one stream, and the same bytes in a row.
#[derive(Clone)]
struct Stream {
    messages: Vec<Vec<u8>>,
    all: Vec<u8>,
}

impl Stream {
    fn new(messages: Vec<Vec<u8>>) -> Self {
        let all = messages.concat();
        Self { messages, all }
    }
}

impl AsRef<[u8]> for Stream {
    fn as_ref(&self) -> &[u8] {
        &self.all
    }
}

fn hello() -> Message {
    let shape = Message::default()
        .varint(1, 3)
        .varint(2, 1)
        .varint(3, 8)
        .varint(4, 1);
    Message::default()
        .bytes(1, b"prefill")
        .fixed64(2, PREFILL)
        .varint(3, 1)
        .varint(4, 0)
        .bytes(5, &FINGERPRINT.to_be_bytes())
        .bytes(6, &1u128.to_be_bytes())
        .bytes(7, &shape.0)
        .bytes(8, b"f32")
        .varint(9, 4)
        .bytes(10, b"plain")
        .bytes(11, b"any")
        .bytes(12, b"any")
        .bytes(13, b"127.0.0.1:9")
        .bytes(16, b"host")
}

/// A prefill node's messages to a decode node for one request.
fn session() -> Stream {
    let key = Message::default()
        .bytes(1, &77u128.to_be_bytes())
        .varint(2, 0)
        .fixed64(3, PREFILL)
        .fixed64(4, DECODE);
    let rules = Message::default()
        .bytes(1, &[5, 6])
        .bytes(2, &[0, 0, 128, 63, 0, 0, 128, 63]);
    let sampling = Message::default()
        .float(1, 0.5)
        .varint(2, 5)
        .float(3, 1.0)
        .float(7, 1.0)
        .fixed64(8, 1)
        .varint(10, 2)
        .bytes(11, &rules.0);
    let stopping = Message::default()
        .varint(1, 8)
        .bytes(3, &[3])
        .bytes(4, &[4]);
    let allocate = Message::default()
        .bytes(1, &[1, 2, 3, 4, 5, 6])
        .bytes(2, &sampling.0)
        .bytes(3, &stopping.0)
        .bytes(6, b"salt")
        .varint(7, 1_000_000)
        .bytes(9, b"trace");
    let sample = Message::default()
        .varint(1, 9)
        .float(2, -0.5)
        .bytes(3, &[9, 8]);
    let first = Message::default().bytes(1, &sample.0).varint(2, 0);
    let abort = Message::default().varint(1, 1).bytes(2, b"enough");
    Stream::new(vec![
        Message::default().bytes(1, &key.0).bytes(2, &hello().0).0,
        Message::default().bytes(3, &allocate.0).0,
        Message::default().bytes(10, &[]).0,
        Message::default().bytes(6, &first.0).0,
        Message::default().bytes(11, &abort.0).0,
    ])
}

/// Sends and receives messages as bytes.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, message: Vec<u8>, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put_slice(&message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        let mut message = vec![0; bytes.remaining()];
        bytes.copy_to_slice(&mut message);
        Ok(Some(message))
    }
}

struct Decode {
    runtime: Runtime,
    engine: Engine,
    channel: Channel,
    // The threads that would receive rows.
    _threads: TransferThreads,
}

impl Decode {
    fn start() -> Self {
        let runtime = Runtime::new().expect("threads");
        let _guard = runtime.enter();
        let mut mock = MockConfig::new(50, 64, 4);
        mock.num_layers = 3;
        let executor = MockExecutor::new(mock);
        let pages = executor.kv_pages();
        let limits = SchedulerConfig::new(64, 4, 128);
        let engine =
            Engine::start(EngineConfig::new(limits), Box::new(executor)).expect("it starts");
        let facts = NodeFacts {
            instance: "decode".into(),
            incarnation: Incarnation(DECODE),
            protocol_major: 1,
            protocol_minor: 0,
            model_fingerprint: FINGERPRINT,
            tokenizer_digest: 1,
            kv_shape: KvShape {
                num_layers: 3,
                num_kv_heads: 1,
                head_dim: 8,
                num_ranks: 1,
                window_digest: 0,
            },
            kv_format: "f32".into(),
            page_size: 4,
            element_order: "plain".into(),
            weight_format: "any".into(),
            instruction_set: "any".into(),
            group: "".into(),
        };
        let threads = TransferThreads::start(1).expect("threads");
        let receiver = KvReceiver::new(
            ReceiverConfig::new(DECODE, FINGERPRINT, ARITHMETIC),
            pages,
            &threads,
        );
        let parts = DecodeParts {
            receiver: Arc::new(receiver),
            constraints: None,
            site: NodeSite::default(),
            meter: None,
        };
        let node = DecodeNode::start(SessionConfig::new(64), facts, engine.clone(), parts);
        let node = node.expect("its configuration is valid");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = runtime.block_on(listener).expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        runtime.spawn(serve_sessions(
            NodeListener::new(listener),
            node,
            None,
            std::future::pending(),
        ));
        let channel = Endpoint::from_shared(format!("http://{address}"))
            .expect("an address")
            .connect_lazy();
        drop(_guard);
        Self {
            runtime,
            engine,
            channel,
            _threads: threads,
        }
    }

    /// Opens a stream, and sends the script.
    fn talk(&self, script: &Stream, patience: Duration) -> Verdict {
        self.runtime.block_on(async {
            let (sender, receiver) = mpsc::channel(16);
            let mut grpc = tonic::client::Grpc::new(self.channel.clone());
            grpc.ready().await.expect("the node takes streams");
            let path = PathAndQuery::from_static("/corella.cluster.v1.Sessions/Serve");
            let request = Request::new(ReceiverStream::new(receiver));
            let mut answers = match grpc.streaming(request, path, Raw).await {
                Ok(answers) => answers.into_inner(),
                Err(_) => return Verdict::Refused,
            };
            for message in &script.messages {
                if sender.send(message.clone()).await.is_err() {
                    break;
                }
            }
            match tokio::time::timeout(patience, answers.message()).await {
                Ok(Ok(Some(_))) => Verdict::Accepted,
                _ => Verdict::Refused,
            }
        })
    }
}

#[test]
fn session_messages() {
    let node = Decode::start();
    // The node is up, and answers.
    assert_eq!(node.talk(&session(), PATIENCE), Verdict::Accepted);
    let mutate = |random: &mut Random, stream: &mut Stream| {
        let mut messages = std::mem::take(&mut stream.messages);
        let at = random.below(messages.len());
        let other = random.pick(&session().messages);
        match random.below(6) {
            0 => drop(messages.remove(at)),
            1 => messages.insert(at, other),
            _ => mutate_bytes(random, &mut messages[at], &other),
        }
        *stream = Stream::new(messages);
    };
    let target = Target::new("session_messages", 32 << 20, 256).watching_threads();
    target.run(&[session()], mutate, |stream| {
        let is_valid = stream.messages == session().messages;
        node.talk(stream, if is_valid { PATIENCE } else { SILENCE })
    });
    assert_eq!(node.talk(&session(), PATIENCE), Verdict::Accepted);
    // Reservations of hostile streams are given back.
    wait_until("no request is left", || {
        node.engine.stats().num_live_requests == 0
    });
}

fn geometry() -> KvGeometry {
    KvGeometry {
        num_layers: 2,
        layers: KvLayers::one(2),
        num_kv_heads: 2,
        head_dim: 64,
        page_size: 16,
        num_pages: 8,
        format: KvFormat::Float(DType::Bf16),
        order: ElementOrder::Plain,
    }
}

/// A sender with one session of two pages.
struct Sender {
    sender: KvSender,
    address: SocketAddr,
    _threads: TransferThreads,
}

impl Sender {
    fn start(key: &SessionKey) -> Self {
        let threads = TransferThreads::start(1).expect("threads");
        let pages = Arc::new(PlainPages::new(geometry()));
        let sender = KvSender::start(
            SenderConfig::new(PREFILL, FINGERPRINT, ARITHMETIC),
            pages as Arc<dyn KvPages>,
            &threads,
        )
        .expect("its row paths need nothing");
        let address = sender.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let PeerAddress::Tcp(address) = address.expect("a free port") else {
            panic!("TCP was asked for");
        };
        // SAFETY: these pages are never changed.
        unsafe { sender.export(*key, 32) }.expect("there is room");
        sender.add_pages(key, &[PageTable::whole(vec![PageId(1), PageId(2)])]);
        sender.handle_rows_readable(key, 0..2, 32);
        assert!(sender.finish(key));
        Self {
            sender,
            address,
            _threads: threads,
        }
    }

    /// Sends the script, and listens until no data comes for `patience`.
    fn talk(&self, script: &[u8], patience: Duration) -> Verdict {
        for frame in script.chunks_exact(FRAME_BYTES) {
            let _ = Frame::decode(frame.try_into().expect("a frame"));
        }
        if let Some(trailer) = script.first_chunk::<TRAILER_BYTES>() {
            let _ = Trailer::decode(trailer);
        }
        let stream = TcpStream::connect(self.address).expect("the node listens");
        let wait_for = |time| stream.set_read_timeout(Some(time)).expect("a timeout");
        wait_for(patience);
        // The node may have closed the connection in the middle of it.
        let _ = (&stream).write_all(script);
        let mut answer: Vec<u8> = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(len @ 1..) = (&stream).read(&mut buffer) {
            answer.extend(&buffer[..len]);
            assert!(answer.len() < 1 << 20, "more than there is to send");
            wait_for(SILENCE);
        }
        match answer.len() {
            0 => Verdict::Refused,
            _ => Verdict::Accepted,
        }
    }
}

#[test]
fn kv_frames() {
    let key = SessionKey {
        session: SessionId(1),
        attempt: 0,
        prefill_incarnation: Incarnation(PREFILL),
        decode_incarnation: Incarnation(DECODE),
    };
    let node = Sender::start(&key);
    let load = LoadFrame {
        load_id: 1,
        key,
        first_row: 0,
        num_rows: 32,
        credit_bytes: 1 << 20,
        wait_ms: 100,
    };
    let hello = Frame::Hello(Hello::new(DECODE, FINGERPRINT, ARITHMETIC, &geometry()));
    let other = Frame::Load(LoadFrame {
        key: SessionKey {
            session: SessionId(2),
            ..key
        },
        load_id: 2,
        ..load
    });
    let corpus: Vec<Vec<u8>> = [
        vec![
            hello.clone(),
            Frame::Load(load),
            Frame::Credit {
                load_id: 1,
                num_bytes: 4096,
            },
        ],
        vec![hello.clone(), other, Frame::Cancel { load_id: 2 }],
        vec![hello, Frame::Load(load), Frame::Received { load_id: 1 }],
    ]
    .iter()
    .map(|frames| frames.iter().flat_map(Frame::encode).collect())
    .collect();
    let second = corpus[1].clone();
    let target = Target::new("kv_frames", 32 << 20, 256).watching_threads();
    target.run(
        &corpus,
        |random, bytes| mutate_bytes(random, bytes, &second),
        |bytes| {
            let is_valid = corpus.contains(bytes);
            node.talk(bytes, if is_valid { PATIENCE } else { SILENCE })
        },
    );
    wait_until("no connection is left", || {
        node.sender.stats().num_connections == 0
    });
}
