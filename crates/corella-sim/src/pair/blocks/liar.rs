//! A node that lies where the protocol has checks: about the blocks that it wants, their number, and the owner of a
//! load.
//!
//! Its machines also send their correct messages, so the liar is served like other nodes and has right blocks itself.
//! The liar never falsifies the rows of a block that both ends name, because nodes trust each other's rows.

use corella_core::session::{BlockPart, LoadFailure, LoadKey, ToFetcher, ToSource};
use corella_core::{BlockList, NodeId, PageHash};

use crate::pair::blocks::block_net::{Packet, PartRows, Surroundings};
use crate::random::Random;

/// The number of the first invented load.
const FIRST_MADE_UP: u64 = 1 << 40;

/// Shows the liar a message of any node. The liar may answer with a lie.
pub fn hear<S: Surroundings + ?Sized>(
    world: &mut S,
    liar: NodeId,
    (from, to, key): (NodeId, NodeId, LoadKey),
    packet: &Packet,
) {
    match packet {
        // The liar confirms blocks of its own before a row has landed.
        Packet::ToSource(ToSource::LoadBlocks(load)) if to == liar => {
            confirm(world, liar, (from, key), load.list.hashes.len() as u32);
        }
        // The liar confirms blocks of another source, whose hold may have ended before the rows were read.
        Packet::ToSource(ToSource::Landed { num_blocks }) if to != liar && from != liar => {
            world.net().totals.num_lies_for_others += 1;
            confirm(world, liar, (from, key), *num_blocks);
        }
        _ if !world.random().once_in(3) => {}
        Packet::ToSource(message) if to != liar => {
            let key = LoadKey {
                number: FIRST_MADE_UP + world.random().below(64),
                ..key
            };
            let message = other_request(message, world.random());
            tell(world, liar, (to, key), Packet::ToSource(message));
        }
        Packet::ToSource(_) => {}
        _ if from == liar => {
            let packet = other_answer(packet, world.random());
            tell(world, liar, (to, key), packet);
        }
        _ if to != liar => {
            world.net().totals.num_lies_for_others += 1;
            tell(world, liar, (to, key), for_other(packet));
        }
        // This answer is about a load that the liar has invented.
        _ if key.number >= FIRST_MADE_UP => {
            let num_blocks = world.random().below(14) as u32;
            let message = match world.random().once_in(8) {
                true => ToSource::Release,
                false => ToSource::Landed { num_blocks },
            };
            tell(world, liar, (from, key), Packet::ToSource(message));
        }
        _ => {}
    }
}

/// Confirms blocks before their source can.
fn confirm<S: Surroundings + ?Sized>(
    world: &mut S,
    liar: NodeId,
    (to, key): (NodeId, LoadKey),
    num_blocks: u32,
) {
    let at_us = world.now_us();
    let confirmed = Packet::ToFetcher(ToFetcher::Complete { num_blocks });
    world.net().totals.num_lies += 1;
    world.push_packet(at_us, (liar, to, key), confirmed);
}

fn tell<S: Surroundings + ?Sized>(
    world: &mut S,
    liar: NodeId,
    (to, key): (NodeId, LoadKey),
    packet: Packet,
) {
    let max_latency_us = world.net().links.max_latency_us;
    let at_us = world.now_us() + 1 + world.random().below(max_latency_us);
    world.net().totals.num_lies += 1;
    world.push_packet(at_us, (liar, to, key), packet);
}

/// Returns a changed copy of a message to a source.
fn other_request(message: &ToSource, random: &mut Random) -> ToSource {
    match message {
        ToSource::Lookup { list, first_block } => ToSource::Lookup {
            list: other_list(list, random),
            first_block: random.pick(&[*first_block, 0, 5, u32::MAX]),
        },
        ToSource::LoadBlocks(load) => {
            let mut load = load.clone();
            if random.once_in(2) {
                load.list = other_list(&load.list, random);
            }
            load.first_block = random.pick(&[load.first_block, 0, 3, u32::MAX]);
            load.lease_us = random.pick(&[load.lease_us, 0, 1, u64::MAX]);
            load.credit = random.pick(&[load.credit, 0, 1, u32::MAX]);
            load.rows.layers.end = random.pick(&[load.rows.layers.end, 0, u32::MAX]);
            ToSource::LoadBlocks(load)
        }
        ToSource::Landed { .. } | ToSource::Release => ToSource::Landed {
            num_blocks: random.below(14) as u32,
        },
    }
}

/// Returns a list with other tokens for the same hashes, other hashes for the same tokens, or different numbers of
/// both.
fn other_list(list: &BlockList, random: &mut Random) -> BlockList {
    let mut list = list.clone();
    let at = random.next() as usize;
    match random.below(5) {
        0 if !list.tokens.is_empty() => {
            let at = at % list.tokens.len();
            list.tokens[at] ^= 1;
        }
        1 if !list.hashes.is_empty() => {
            let at = at % list.hashes.len();
            list.hashes[at] = PageHash(random.below(256).into());
        }
        2 => drop(list.tokens.pop()),
        3 => list.hashes.extend(list.hashes.last().copied()),
        _ => list.namespace.cache_salt = Some("name".into()),
    }
    list
}

/// Returns a false answer to a node that loads from the liar, with blocks and parts that the node has not asked for.
fn other_answer(packet: &Packet, random: &mut Random) -> Packet {
    let num_blocks = random.below(14) as u32;
    match packet {
        Packet::Rows(part, rows) => {
            let part = match random.below(3) {
                0 => BlockPart {
                    block: random.pick(&[part.block + 1_000, u32::MAX]),
                    ..*part
                },
                1 => BlockPart {
                    group: random.pick(&[part.group + 3, u8::MAX]),
                    ..*part
                },
                _ => BlockPart {
                    layer: random.pick(&[part.layer + 3, u32::MAX]),
                    ..*part
                },
            };
            Packet::Rows(part, rows.clone())
        }
        Packet::ToFetcher(ToFetcher::Complete { .. }) => Packet::ToFetcher(ToFetcher::Complete {
            num_blocks: random.pick(&[0, 1_000, u32::MAX]),
        }),
        Packet::ToFetcher(ToFetcher::Failed(_)) => {
            Packet::ToFetcher(ToFetcher::Failed(LoadFailure::NotHere { num_blocks }))
        }
        _ => Packet::ToFetcher(ToFetcher::Found { num_blocks }),
    }
}

/// Returns another node's message with other rows.
fn for_other(packet: &Packet) -> Packet {
    match packet {
        Packet::Rows(part, PartRows::Sent(rows)) => {
            Packet::Rows(*part, PartRows::Sent(vec![None; rows.len()]))
        }
        // Other packets bring no rows: a page's rows are read in the memory of the node that sent the packet.
        packet => packet.clone(),
    }
}
