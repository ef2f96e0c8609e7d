//! Loads that bring only their first blocks: the source may lend no more, has evicted the rest, or has other blocks
//! under these hashes.

use corella_cluster::transport::{
    BlockMessage, BlockVerb, FRAME_BYTES, Frame, decode_blocks, encode_blocks,
};
use corella_core::session::{LoadBlocks, ToSource};
use corella_core::{Namespace, TokenId};
use corella_engine::Submission;
use corella_model::MockConfig;
use corella_test::wait_until_async;

use crate::pair::blocks::Way;
use crate::pair::fetch_node::*;
use crate::pair::fixture::*;
use crate::pair::frame_proxy::*;

const NUM_TOKENS: u32 = 6;

/// The first tokens of one long text.
fn prompt(num_tokens: u32) -> Vec<TokenId> {
    (0..num_tokens).map(|i| i * i % 47).collect()
}

fn request(num_tokens: u32) -> Submission {
    submission(prompt(num_tokens), NUM_TOKENS, seeded(2))
}

fn lone(model: &MockConfig, num_tokens: u32) -> Vec<TokenId> {
    model.lone_tokens(&prompt(num_tokens), &seeded(2), NUM_TOKENS as usize)
}

/// The source lends at most five blocks at a time. The second model has two further KV groups, with windows of 10 and
/// 17 tokens. A query after the five blocks reads three and four pages in these groups.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_lends_the_first_of_the_blocks_that_another_lacks() {
    for way in [Way::Tcp, Way::Shm] {
        for (model, num_pages) in [(model(256), 5), (windowed_model(256), 5 + 3 + 4)] {
            let first = Node::lending(&model, 7, way, num_pages);
            let second = Node::start(&model, 11, way);
            first.cache(request(65)).await;
            // The first five of eight blocks are loaded, and then five after the eight.
            for (num_tokens, num_blocks) in [(33, 5), (65, 10)] {
                let answers = second.answer(&first, request(num_tokens)).await;
                assert_eq!(answers, [lone(&model, num_tokens)]);
                first.at_rest().await;
                second.at_rest().await;
                assert_eq!(second.num_blocks(), num_blocks);
            }
            let loads = second.blocks.loads();
            assert_eq!((loads.num_loaded, loads.num_failed), (2, 0));
            assert_eq!(first.blocks.source.stats().num_failed, 0);
        }
    }
}

/// Between lookup and load, other prompts take pages of the source.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_before_the_first_that_is_gone_are_loaded() {
    let model = model(72);
    let first = Node::start(&model, 7, Way::Tcp);
    let second = Node::start(&model, 11, Way::Tcp);
    first.cache(request(65)).await;
    let proxy = FrameProxy::start(first.blocks.address, first.engine.kv_pages().geometry());
    proxy.judge(|passing| match passing.is(BlockVerb::LoadBlocks) {
        true => Verdict::Hold,
        false => Verdict::Pass,
    });
    let mut streams = second.submit(&proxy.params, request(65));
    wait_until_async("the load waits", || proxy.num_held() == 1).await;

    let exchange = first.engine.block_exchange();
    let (namespace, prompt) = (Namespace::default(), prompt(65));
    let list = exchange.list(&namespace, &prompt, &exchange.hashes(&namespace, &prompt));
    let mut num_left = 16;
    let mut others = 0..;
    while num_left == 16 {
        let other = others.next().unwrap();
        first
            .cache(submission(
                vec![49, other % 50, other / 50, 49],
                1,
                seeded(2),
            ))
            .await;
        num_left = exchange.look_up(list.clone()).await.unwrap();
    }
    assert!(num_left > 0, "one page more evicts one block more");
    proxy.release();
    let (tokens, _) = finish(streams.remove(0)).await;
    assert_eq!(tokens, lone(&model, 65));
    first.at_rest().await;
    second.at_rest().await;
    assert_eq!(second.num_blocks(), u64::from(num_left));
    let loads = second.blocks.loads();
    assert_eq!((loads.num_loaded, loads.num_failed), (1, 0));
}

/// A loading node that names a block by another block's hash, or by tokens that do not match the hash, gets only the
/// blocks before that block. The source holds nothing for the node afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_before_the_first_that_is_named_wrongly_are_lent() {
    let wrong_hash = |load: &mut LoadBlocks| {
        if let Some(hash) = load.list.hashes.get_mut(3) {
            hash.0 ^= 1;
        }
    };
    let wrong_token = |load: &mut LoadBlocks| {
        if let Some(token) = load.list.tokens.get_mut(13) {
            *token += 1;
        }
    };
    let changes: [fn(&mut LoadBlocks); 2] = [wrong_hash, wrong_token];
    for (model, change) in [model(256), windowed_model(256)]
        .iter()
        .flat_map(|model| changes.map(|change| (model, change)))
    {
        let first = Node::start(model, 7, Way::Tcp);
        let second = Node::start(model, 11, Way::Tcp);
        first.cache(request(65)).await;
        let proxy = FrameProxy::start(first.blocks.address, first.engine.kv_pages().geometry());
        proxy.judge(move |passing| match passing.is(BlockVerb::LoadBlocks) {
            true => Verdict::Replace(changed(passing, change)),
            false => Verdict::Pass,
        });
        let answers = second.answer_from(&proxy.params, request(65)).await;
        assert_eq!(answers, [lone(model, 65)]);
        first.at_rest().await;
        second.at_rest().await;
        assert_eq!(second.num_blocks(), 3);
        let stats = first.blocks.source.stats();
        assert_eq!((stats.num_failed, stats.num_complete), (1, 1));
    }
}

/// Encodes a message that asks for blocks, with its request changed.
fn changed(passing: &Passing<'_>, change: fn(&mut LoadBlocks)) -> Vec<u8> {
    let Frame::Blocks(frame) = &passing.frame else {
        panic!("a message about blocks");
    };
    match decode_blocks(frame, &passing.bytes[FRAME_BYTES..]) {
        Ok(BlockMessage::ToSource(ToSource::LoadBlocks(mut load))) => {
            change(&mut load);
            let message = BlockMessage::ToSource(ToSource::LoadBlocks(load));
            encode_blocks(frame.key, &message).expect("it has a form")
        }
        other => panic!("{other:?}"),
    }
}
