//! Messages of a cluster's nodes about cached blocks: frames, some with a list behind them.

use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use corella_cluster::blocks::SourceNode;
use corella_cluster::transport::{
    BlockMessage, FRAME_BYTES, Frame, Hello, KvSender, LoadFrame, PeerAddress, SenderConfig,
    TransferThreads, decode_blocks, encode_blocks, session_key,
};
use corella_core::session::{LoadBlocks, LoadKey, RowPart, ToSource};
use corella_core::{Arithmetic, BlockList, Incarnation, Namespace, SchedulerConfig, TokenId};
use corella_engine::{Engine, EngineConfig, Submission};
use corella_fuzz::{Random, Target, Verdict, mutate_bytes};
use corella_model::{Executor, KvGeometry, MockConfig, MockExecutor};
use corella_test::wait_until;
use tokio::runtime::Runtime;

const SOURCE: u64 = 7;
const LOADER: u64 = 8;
const FINGERPRINT: u128 = 0x5eed;
const ARITHMETIC: Arithmetic = Arithmetic(5);
const NUM_BLOCKS: u32 = 5;
/// The time to listen for an answer to an altered message, which may not come.
const SILENCE: Duration = Duration::from_millis(50);
/// The time after which a missing mandatory answer ends a test.
const PATIENCE: Duration = Duration::from_secs(300);

/// A node with some cached blocks.
struct Source {
    engine: Engine,
    node: Arc<SourceNode>,
    sender: Arc<KvSender>,
    address: SocketAddr,
    geometry: KvGeometry,
    list: BlockList,
    _threads: TransferThreads,
    _runtime: Runtime,
}

fn request(prompt: Vec<TokenId>) -> Submission {
    Submission::new(prompt, 1)
}

impl Source {
    fn start() -> Self {
        let runtime = Runtime::new().expect("threads");
        let guard = runtime.enter();
        let mut mock = MockConfig::new(50, 64, 4);
        mock.num_layers = 3;
        let executor = MockExecutor::new(mock);
        let pages = executor.kv_pages();
        let limits = SchedulerConfig::new(64, 4, 128);
        let engine = Engine::start(EngineConfig::new(limits), Box::new(executor));
        let engine = engine.expect("it starts");
        let prompt: Vec<TokenId> = (0..4 * NUM_BLOCKS + 1).collect();
        let (exchange, namespace) = (engine.block_exchange(), Namespace::default());
        let list = exchange.list(&namespace, &prompt, &exchange.hashes(&namespace, &prompt));
        let streams = engine.submit(request(prompt)).expect("it is taken");
        for mut stream in streams {
            runtime.block_on(async { while poll_fn(|cx| stream.poll_next(cx)).await.is_some() {} });
        }
        let threads = TransferThreads::start(1).expect("threads");
        let config = SenderConfig::new(SOURCE, FINGERPRINT, ARITHMETIC);
        let sender = KvSender::start(config, pages.clone(), &threads);
        let sender = Arc::new(sender.expect("its row paths need nothing"));
        let address = sender.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let PeerAddress::Tcp(address) = address.expect("a free port") else {
            panic!("TCP was asked for");
        };
        let (life, exchange) = (Incarnation(SOURCE), engine.block_exchange());
        let node = SourceNode::start(life, exchange, &sender, pages.geometry());
        drop(guard);
        Self {
            engine,
            node,
            sender,
            address,
            geometry: pages.geometry().clone(),
            list,
            _threads: threads,
            _runtime: runtime,
        }
    }

    /// The messages of loading nodes, each in a connection of its own.
    fn corpus(&self) -> Vec<Vec<u8>> {
        let hello =
            Frame::Hello(Hello::new(LOADER, FINGERPRINT, ARITHMETIC, &self.geometry)).encode();
        let key = LoadKey {
            fetcher: Incarnation(LOADER),
            source: Incarnation(SOURCE),
            number: 1,
        };
        let say =
            |message| encode_blocks(key, &BlockMessage::ToSource(message)).expect("it has a form");
        let list = self.list.clone();
        let lookup = say(ToSource::Lookup {
            list: list.clone(),
            first_block: 1,
        });
        let load = say(ToSource::LoadBlocks(LoadBlocks {
            list,
            first_block: 1,
            rows: RowPart {
                layers: 0..3,
                heads: 0..self.geometry.num_kv_heads,
            },
            // The lease is short, so that the state of a changed message soon expires.
            lease_us: 100_000,
            credit: 16,
        }));
        let rows = Frame::Load(LoadFrame {
            load_id: 1,
            key: session_key(&key),
            first_row: 4,
            num_rows: 4 * NUM_BLOCKS,
            credit_bytes: 1 << 20,
            wait_ms: 100,
        });
        let num_blocks = NUM_BLOCKS;
        let landed = say(ToSource::Landed { num_blocks });
        let release = say(ToSource::Release);
        vec![
            [&hello[..], &lookup].concat(),
            [&hello[..], &load, &rows.encode(), &landed].concat(),
            [&hello[..], &load, &release, &lookup].concat(),
        ]
    }

    /// Sends the script, and listens until no data comes for `patience`.
    fn talk(&self, script: &[u8], patience: Duration) -> Verdict {
        let behind_hello = script.get(FRAME_BYTES..).unwrap_or_default();
        if let Some((frame, payload)) = behind_hello.split_first_chunk()
            && let Ok(Frame::Blocks(frame)) = Frame::decode(frame)
        {
            let _ = decode_blocks(&frame, payload);
        }
        let stream = TcpStream::connect(self.address).expect("the node listens");
        let wait_for = |time| stream.set_read_timeout(Some(time)).expect("a timeout");
        wait_for(patience);
        // The node may have closed the connection in the middle of it.
        let _ = (&stream).write_all(script);
        let mut num_bytes = 0;
        let mut buffer = [0; 4096];
        while let Ok(len @ 1..) = (&stream).read(&mut buffer) {
            num_bytes += len;
            assert!(num_bytes < 1 << 20, "more than there is to send");
            // The greeting always comes.
            if num_bytes > FRAME_BYTES {
                wait_for(SILENCE);
            }
        }
        match num_bytes > FRAME_BYTES {
            true => Verdict::Accepted,
            false => Verdict::Refused,
        }
    }
}

#[test]
fn block_messages() {
    let source = Source::start();
    let corpus = source.corpus();
    let other = corpus[1].clone();
    let target = Target::new("block_messages", 32 << 20, 256).watching_threads();
    target.run(
        &corpus,
        |random: &mut Random, bytes| mutate_bytes(random, bytes, &other),
        |bytes| {
            let is_valid = corpus.contains(bytes);
            source.talk(bytes, if is_valid { PATIENCE } else { SILENCE })
        },
    );
    wait_until("nothing is left of hostile loads", || {
        source.node.num_loads() + source.sender.stats().num_connections == 0
            && source.engine.stats().scheduler.num_in_use_pages == 0
    });
}
