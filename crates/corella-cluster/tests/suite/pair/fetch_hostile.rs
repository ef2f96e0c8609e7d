//! A node that sends messages about other nodes' loads, against a node that lends blocks.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};

use corella_cluster::transport::{
    BlockMessage, BlockVerb, FRAME_BYTES, Frame, Hello, decode_blocks, encode_blocks,
};
use corella_core::Incarnation;
use corella_core::session::{LoadBlocks, LoadKey, ToSource};
use corella_test::wait_until_async;

use crate::pair::blocks::Way;
use crate::pair::fetch_node::*;
use crate::pair::fixture::*;
use crate::pair::frame_proxy::*;

const SOURCE: u64 = 7;
const LOADER: u64 = 11;
const OTHER: u64 = 13;
const NUM_TOKENS: u32 = 6;
/// Blocks of a prompt without its last token.
const NUM_BLOCKS: u32 = 8;

/// A node that has greeted the source.
struct Hostile {
    stream: TcpStream,
}

impl Hostile {
    fn connect(source: &Node) -> Self {
        let stream = TcpStream::connect(source.blocks.address).expect("it listens");
        let patience = Some(CONNECT_TIMEOUT);
        stream.set_read_timeout(patience).expect("it is not zero");
        let mut hostile = Self { stream };
        let geometry = source.engine.kv_pages().geometry();
        let arithmetic = source.blocks.receiver.arithmetic();
        let hello = Frame::Hello(Hello::new(OTHER, FINGERPRINT, arithmetic, geometry));
        hostile.send(&hello.encode());
        let greeting = hostile.receive().expect("the source greets");
        assert!(matches!(greeting, Frame::Hello(hello) if hello.incarnation == SOURCE));
        hostile
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the source reads");
    }

    fn say(&mut self, key: LoadKey, message: ToSource) {
        let message = BlockMessage::ToSource(message);
        let bytes = encode_blocks(key, &message).expect("it has a form");
        self.send(&bytes);
    }

    /// The next frame, or `None` at the end of the connection.
    fn receive(&mut self) -> Option<Frame> {
        let mut bytes = [0; FRAME_BYTES];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => Some(Frame::decode(&bytes).expect("nodes send valid frames")),
            Err(error) => {
                let is_over = error.kind() != std::io::ErrorKind::WouldBlock;
                assert!(is_over, "the source neither answers nor hangs up");
                None
            }
        }
    }
}

/// The key and the request of a load that passes.
type Seen = Arc<Mutex<Option<(LoadKey, LoadBlocks)>>>;

/// A node loads blocks, and the rows wait. Meanwhile a hostile node asks for the same load, confirms its blocks and
/// ends it. The source closes the hostile node's connections, and the load goes on. Loads of an earlier incarnation of
/// the source are unknown. The hostile node then asks for the blocks itself, reads nothing, and leaves: nothing is held
/// for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_speaks_of_loads_of_others_is_hung_up_on_and_takes_nothing_from_them() {
    let model = model(256);
    let prompt: Vec<_> = (0..33).map(|i| i * i % 50).collect();
    let request = || submission(prompt.clone(), NUM_TOKENS, seeded(2));
    let source = Node::start(&model, SOURCE, Way::Tcp);
    let loader = Node::start(&model, LOADER, Way::Tcp);
    source.cache(request()).await;
    let proxy = FrameProxy::start(source.blocks.address, source.engine.kv_pages().geometry());
    let seen = Seen::default();
    let notes = seen.clone();
    proxy.judge(move |passing| {
        if let Frame::Blocks(frame) = &passing.frame
            && let Ok(BlockMessage::ToSource(ToSource::LoadBlocks(load))) =
                decode_blocks(frame, &passing.bytes[FRAME_BYTES..])
        {
            *notes.lock().unwrap() = Some((frame.key, load));
        }
        match passing.is_rows() {
            true => Verdict::Hold,
            false => Verdict::Pass,
        }
    });
    let mut streams = loader.submit(&proxy.params, request());
    wait_until_async("rows wait", || proxy.num_held() == 1).await;
    let (key, load) = seen.lock().unwrap().take().expect("blocks were asked for");

    let num_blocks = NUM_BLOCKS;
    let foreign = [
        ToSource::LoadBlocks(load.clone()),
        ToSource::Landed { num_blocks },
        ToSource::Release,
    ];
    for message in foreign {
        let mut hostile = Hostile::connect(&source);
        hostile.say(key, message.clone());
        assert_eq!(hostile.receive(), None, "{message:?}");
    }
    assert_eq!(source.blocks.source.num_loads(), 1);

    let mut hostile = Hostile::connect(&source);
    let own = LoadKey {
        fetcher: Incarnation(OTHER),
        ..key
    };
    let of_earlier_life = LoadKey {
        source: Incarnation(SOURCE - 1),
        ..own
    };
    hostile.say(of_earlier_life, ToSource::LoadBlocks(load.clone()));
    let answer = hostile.receive().expect("it is answered");
    let is_unknown =
        |frame: &Frame| matches!(frame, Frame::Blocks(frame) if frame.verb == BlockVerb::Unknown);
    assert!(is_unknown(&answer), "{answer:?}");
    let endless = LoadBlocks {
        lease_us: u64::MAX,
        ..load
    };
    hostile.say(own, ToSource::LoadBlocks(endless));
    let num_loads = || source.blocks.source.num_loads();
    wait_until_async("blocks are held for both", || num_loads() == 2).await;
    drop(hostile);
    wait_until_async("one has left", || num_loads() == 1).await;

    proxy.release();
    let (tokens, _) = finish(streams.remove(0)).await;
    assert_eq!(
        tokens,
        model.lone_tokens(&prompt, &seeded(2), NUM_TOKENS as usize)
    );
    source.at_rest().await;
    loader.at_rest().await;
    assert_eq!(loader.num_blocks(), u64::from(NUM_BLOCKS));
    assert_eq!(source.blocks.source.stats().num_complete, 1);
}
