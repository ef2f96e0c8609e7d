//! Messages about loads of cached blocks, as a frame and a bounded payload.
//!
//! Only `Lookup` and `LoadBlocks` have a payload: a protocol buffer with the list of blocks. The rows of a granted load
//! travel like the rows of a session (`LoadFrame`). The key of that session is made from the load's key
//! ([`session_key`]).

use corella_core::session::{
    LoadBlocks, LoadFailure, LoadKey, RowPart, SessionKey, ToFetcher, ToSource,
};
use corella_core::{BlockList, Namespace, PageHash, SessionId};
use prost::Message;

use super::frame::{BlockFrame, BlockVerb, FRAME_BYTES, Frame};

/// The largest payload of a block message. A list of two million tokens in blocks of one token is smaller.
pub const MAX_LIST_BYTES: u32 = 48 << 20;

const HASH_BYTES: usize = size_of::<u128>();

/// A message in either direction.
#[derive(Clone, Debug, PartialEq)]
pub enum BlockMessage {
    ToSource(ToSource),
    ToFetcher(ToFetcher),
}

/// Returns the session under which a load's rows are exported at its source.
pub fn session_key(key: &LoadKey) -> SessionKey {
    SessionKey {
        session: SessionId(u128::from(key.fetcher.0) << 64 | u128::from(key.number)),
        attempt: 0,
        prefill_incarnation: key.source,
        decode_incarnation: key.fetcher,
    }
}

/// The blocks of a lookup or a load. Fields after `first_block` belong to loads.
#[derive(Clone, PartialEq, Message)]
struct ListMessage {
    #[prost(uint32, repeated, tag = "1")]
    tokens: Vec<u32>,
    /// 16 bytes for each block, little-endian.
    #[prost(bytes = "vec", tag = "2")]
    hashes: Vec<u8>,
    #[prost(string, optional, tag = "3")]
    cache_salt: Option<String>,
    /// In lookups, older nodes neither write nor read this field.
    #[prost(uint32, tag = "5")]
    first_block: u32,
    #[prost(uint32, tag = "6")]
    first_layer: u32,
    #[prost(uint32, tag = "7")]
    end_layer: u32,
    #[prost(uint32, tag = "8")]
    first_head: u32,
    #[prost(uint32, tag = "9")]
    end_head: u32,
    #[prost(uint64, tag = "10")]
    lease_us: u64,
    #[prost(uint32, tag = "11")]
    credit: u32,
}

/// Writes a message as its frame and payload. Returns `None` for a message that this wire cannot carry: the rows of a
/// block, a message about blocks of an adapter, or a list that is too long.
pub fn encode(key: LoadKey, message: &BlockMessage) -> Option<Vec<u8>> {
    let (verb, num_blocks, payload) = match message {
        BlockMessage::ToSource(message) => match message {
            ToSource::Lookup { list, first_block } => {
                let payload = ListMessage {
                    first_block: *first_block,
                    ..list_message(list)?
                };
                (BlockVerb::Lookup, 0, Some(payload))
            }
            ToSource::LoadBlocks(load) => {
                let payload = ListMessage {
                    first_block: load.first_block,
                    first_layer: load.rows.layers.start,
                    end_layer: load.rows.layers.end,
                    first_head: load.rows.heads.start,
                    end_head: load.rows.heads.end,
                    lease_us: load.lease_us,
                    credit: load.credit,
                    ..list_message(&load.list)?
                };
                (BlockVerb::LoadBlocks, 0, Some(payload))
            }
            ToSource::Landed { num_blocks } => (BlockVerb::Landed, *num_blocks, None),
            ToSource::Release => (BlockVerb::Release, 0, None),
        },
        BlockMessage::ToFetcher(message) => {
            let (verb, num_blocks) = match *message {
                ToFetcher::Found { num_blocks } => (BlockVerb::Found, num_blocks),
                ToFetcher::Data(_) => return None,
                ToFetcher::Complete { num_blocks } => (BlockVerb::Complete, num_blocks),
                ToFetcher::Failed(failure) => match failure {
                    LoadFailure::NotHere { num_blocks } => (BlockVerb::NotHere, num_blocks),
                    LoadFailure::Refused => (BlockVerb::Refused, 0),
                    LoadFailure::HoldEnded => (BlockVerb::HoldEnded, 0),
                    LoadFailure::Stalled => (BlockVerb::Stalled, 0),
                    LoadFailure::Unknown => (BlockVerb::Unknown, 0),
                },
            };
            (verb, num_blocks, None)
        }
    };
    let payload = payload.map(|payload| payload.encode_to_vec());
    let payload = payload.unwrap_or_default();
    let num_bytes = u32::try_from(payload.len()).ok()?;
    if num_bytes > MAX_LIST_BYTES {
        return None;
    }
    let frame = Frame::Blocks(BlockFrame {
        key,
        verb,
        num_blocks,
        num_bytes,
    });
    let mut bytes = Vec::with_capacity(FRAME_BYTES + payload.len());
    bytes.extend_from_slice(&frame.encode());
    bytes.extend_from_slice(&payload);
    Some(bytes)
}

/// Reads a message from its frame and payload. The error names the wrong field.
pub fn decode(frame: &BlockFrame, payload: &[u8]) -> Result<BlockMessage, &'static str> {
    let num_blocks = frame.num_blocks;
    let has_list = matches!(frame.verb, BlockVerb::Lookup | BlockVerb::LoadBlocks);
    if !has_list && !payload.is_empty() {
        return Err("a list of blocks with a message that has none");
    }
    let failed = |failure| BlockMessage::ToFetcher(ToFetcher::Failed(failure));
    Ok(match frame.verb {
        BlockVerb::Lookup => {
            let message = read(payload)?;
            BlockMessage::ToSource(ToSource::Lookup {
                first_block: message.first_block,
                list: block_list(message)?,
            })
        }
        BlockVerb::LoadBlocks => {
            let message = read(payload)?;
            let request = LoadBlocks {
                first_block: message.first_block,
                rows: RowPart {
                    layers: message.first_layer..message.end_layer,
                    heads: message.first_head..message.end_head,
                },
                lease_us: message.lease_us,
                credit: message.credit,
                list: block_list(message)?,
            };
            BlockMessage::ToSource(ToSource::LoadBlocks(request))
        }
        BlockVerb::Landed => BlockMessage::ToSource(ToSource::Landed { num_blocks }),
        BlockVerb::Release => BlockMessage::ToSource(ToSource::Release),
        BlockVerb::Found => BlockMessage::ToFetcher(ToFetcher::Found { num_blocks }),
        BlockVerb::Complete => BlockMessage::ToFetcher(ToFetcher::Complete { num_blocks }),
        BlockVerb::NotHere => failed(LoadFailure::NotHere { num_blocks }),
        BlockVerb::Refused => failed(LoadFailure::Refused),
        BlockVerb::HoldEnded => failed(LoadFailure::HoldEnded),
        BlockVerb::Stalled => failed(LoadFailure::Stalled),
        BlockVerb::Unknown => failed(LoadFailure::Unknown),
    })
}

/// Returns `None` for blocks of an adapter, because adapters have other names on other nodes. Returns `None` also for
/// blocks whose rows a node of another arithmetic has computed, because such blocks are not lent.
fn list_message(list: &BlockList) -> Option<ListMessage> {
    if list.namespace.lora.is_some() || list.namespace.arithmetic.is_some() {
        return None;
    }
    let hashes = list.hashes.iter().flat_map(|hash| hash.0.to_le_bytes());
    Some(ListMessage {
        tokens: list.tokens.clone(),
        hashes: hashes.collect(),
        cache_salt: list.namespace.cache_salt.as_deref().map(str::to_owned),
        ..ListMessage::default()
    })
}

fn read(payload: &[u8]) -> Result<ListMessage, &'static str> {
    ListMessage::decode(payload).map_err(|_| "an unreadable list of blocks")
}

fn block_list(message: ListMessage) -> Result<BlockList, &'static str> {
    let (hashes, rest) = message.hashes.as_chunks::<HASH_BYTES>();
    if !rest.is_empty() {
        return Err("a part of a hash");
    }
    let hashes = hashes
        .iter()
        .map(|hash| PageHash(u128::from_le_bytes(*hash)));
    Ok(BlockList {
        namespace: Namespace {
            cache_salt: message.cache_salt.map(Into::into),
            ..Namespace::default()
        },
        tokens: message.tokens,
        hashes: hashes.collect(),
    })
}

#[cfg(test)]
mod tests;
