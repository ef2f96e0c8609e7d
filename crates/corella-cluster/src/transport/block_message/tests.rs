//! Messages about blocks are unchanged after the wire.

use corella_core::Incarnation;
use corella_core::session::BlockPart;

use super::*;

const KEY: LoadKey = LoadKey {
    fetcher: Incarnation(7),
    source: Incarnation(9),
    number: 3,
};

fn list() -> BlockList {
    BlockList {
        namespace: Namespace {
            cache_salt: Some("salt".into()),
            ..Namespace::default()
        },
        tokens: vec![1, 2, 3, 70_000],
        hashes: vec![PageHash(1 << 100), PageHash(u128::MAX)],
    }
}

fn lookup(first_block: u32) -> BlockMessage {
    let list = list();
    BlockMessage::ToSource(ToSource::Lookup { list, first_block })
}

fn parts(bytes: &[u8]) -> (BlockFrame, &[u8]) {
    let (frame, payload) = bytes.split_first_chunk().unwrap();
    match Frame::decode(frame) {
        Ok(Frame::Blocks(frame)) => (frame, payload),
        other => panic!("{other:?}"),
    }
}

#[test]
fn messages_come_back_as_they_were() {
    let failed = |failure| BlockMessage::ToFetcher(ToFetcher::Failed(failure));
    let load = LoadBlocks {
        list: list(),
        first_block: 1,
        rows: RowPart {
            layers: 0..28,
            heads: 2..8,
        },
        lease_us: u64::MAX,
        credit: 5,
    };
    let messages = [
        lookup(1),
        BlockMessage::ToSource(ToSource::LoadBlocks(load)),
        BlockMessage::ToSource(ToSource::Landed { num_blocks: 12 }),
        BlockMessage::ToSource(ToSource::Release),
        BlockMessage::ToFetcher(ToFetcher::Found { num_blocks: 0 }),
        BlockMessage::ToFetcher(ToFetcher::Complete { num_blocks: 8 }),
        failed(LoadFailure::NotHere { num_blocks: 4 }),
        failed(LoadFailure::Refused),
        failed(LoadFailure::HoldEnded),
        failed(LoadFailure::Stalled),
        failed(LoadFailure::Unknown),
    ];
    for message in messages {
        let bytes = encode(KEY, &message).unwrap();
        let (frame, payload) = parts(&bytes);
        assert_eq!(frame.key, KEY);
        assert_eq!(frame.num_bytes as usize, payload.len());
        assert_eq!(decode(&frame, payload), Ok(message));
    }
}

#[test]
fn what_the_wire_cannot_carry_is_not_written() {
    let part = BlockPart {
        block: 0,
        group: 0,
        layer: 0,
    };
    let data = BlockMessage::ToFetcher(ToFetcher::Data(part));
    assert_eq!(encode(KEY, &data), None);
    let mut of_adapter = list();
    of_adapter.namespace.lora = Some("name".into());
    let lookup = BlockMessage::ToSource(ToSource::Lookup {
        list: of_adapter,
        first_block: 0,
    });
    assert_eq!(encode(KEY, &lookup), None);
}

#[test]
fn broken_payloads_are_errors() {
    let bytes = encode(KEY, &lookup(1)).unwrap();
    let (frame, payload) = parts(&bytes);
    assert!(decode(&frame, &payload[..payload.len() - 1]).is_err());
    let release = BlockFrame {
        verb: BlockVerb::Release,
        ..frame
    };
    assert!(decode(&release, payload).is_err());
    let half_hash = ListMessage {
        hashes: vec![0; 24],
        ..ListMessage::default()
    };
    assert!(decode(&frame, &half_hash.encode_to_vec()).is_err());
}

/// Lookups of older nodes end with the list. In lookups of newer nodes, older nodes skip the fields after the list.
#[test]
fn lookups_of_older_nodes_ask_from_the_first_block_on() {
    #[derive(Clone, PartialEq, Message)]
    struct OldLookup {
        #[prost(uint32, repeated, tag = "1")]
        tokens: Vec<u32>,
        #[prost(bytes = "vec", tag = "2")]
        hashes: Vec<u8>,
        #[prost(string, optional, tag = "3")]
        cache_salt: Option<String>,
    }
    let bytes = encode(KEY, &lookup(1)).unwrap();
    let (frame, payload) = parts(&bytes);
    let old = OldLookup::decode(payload).unwrap();
    assert_eq!(old.tokens, list().tokens);
    assert_eq!(decode(&frame, &old.encode_to_vec()), Ok(lookup(0)));
}

/// Loads of two nodes, or of two sources, are stored under different names.
#[test]
fn each_load_has_a_session_of_its_own() {
    let other_loader = LoadKey {
        fetcher: Incarnation(8),
        ..KEY
    };
    let next = LoadKey { number: 4, ..KEY };
    let keys = [KEY, other_loader, next].map(|key| session_key(&key));
    assert_eq!(keys[0].session, SessionId(7 << 64 | 3));
    assert_eq!(keys[1].session, SessionId(8 << 64 | 3));
    assert_eq!(keys[2].session, SessionId(7 << 64 | 4));
    assert_eq!(keys[0].prefill_incarnation, Incarnation(9));
    assert_eq!(keys[0].decode_incarnation, Incarnation(7));
}
