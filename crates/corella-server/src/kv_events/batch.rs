//! A batch of KV events in vLLM's format: msgpack of `[time, [event, …], rank]`, where an event is a map with its name
//! in `type`.
//!
//! Fields and names follow vLLM's `distributed/kv_events.py` of June 2026, and of August 2026 for blocks on a disk.
//! Optional fields for which Corella has no value are left out: `group_idx`, because a block is announced when every KV
//! group has the pages that a hit reads, and `kv_cache_spec_…`.

use corella_core::{KvEvent, Namespace, PageHash, TokenId};

use crate::adapter::adapter_name::served_name;

/// The place of a batch's blocks. Routers rate other media than the pool lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// The pages that steps read.
    Pool,
    /// Host memory beside the pool of a device.
    Host,
    Disk,
}

impl Medium {
    /// vLLM's name, also for a pool in host memory.
    fn name(self) -> &'static str {
        match self {
            Self::Pool => "GPU",
            Self::Host => "CPU",
            Self::Disk => "STORAGE",
        }
    }

    /// vLLM's name of a storage that one server uses alone. A pool has none.
    fn locality(self) -> Option<&'static str> {
        (self == Self::Disk).then_some("LOCAL")
    }
}

/// Writes a batch of the blocks of one medium. Consecutive blocks become one event.
pub fn encode(unix_s: f64, events: &[KvEvent], medium: Medium, block_size: u32) -> Vec<u8> {
    let runs = runs(events);
    let mut out = Writer(Vec::with_capacity(256));
    out.array(3);
    out.float(unix_s);
    out.array(runs.len());
    for run in runs {
        match &run[0] {
            KvEvent::Cleared => {
                out.map(1);
                out.entry("type").text("AllBlocksCleared");
            }
            KvEvent::Removed { .. } => {
                out.map(3 + usize::from(medium.locality().is_some()));
                out.entry("type").text("BlockRemoved");
                out.hashes(run);
                out.medium(medium);
            }
            KvEvent::Stored {
                parent, namespace, ..
            } => {
                let has_extra = *namespace != Namespace::default();
                out.map(8 + usize::from(has_extra) + usize::from(medium.locality().is_some()));
                out.entry("type").text("BlockStored");
                out.stored(run, *parent, block_size);
                out.medium(medium);
                match &namespace.lora {
                    Some(lora) => out.entry("lora_name").text(served_name(lora)),
                    None => out.entry("lora_name").nil(),
                }
                if has_extra {
                    out.extra_keys(run.len(), parent.is_none(), namespace);
                }
            }
        }
    }
    // The engine's data-parallel rank.
    out.number(0);
    out.0
}

/// Cuts events into runs, each of which becomes one event of the format.
fn runs(events: &[KvEvent]) -> Vec<&[KvEvent]> {
    let belongs = |before: &KvEvent, event: &KvEvent| match (before, event) {
        (KvEvent::Removed { .. }, KvEvent::Removed { .. }) => true,
        (KvEvent::Stored { page, .. }, KvEvent::Stored { parent, .. }) => *parent == Some(*page),
        _ => false,
    };
    events.chunk_by(belongs).collect()
}

/// The published name of a block: the low half of its hash.
fn name(hash: PageHash) -> u64 {
    hash.0 as u64
}

struct Writer(Vec<u8>);

impl Writer {
    fn stored(&mut self, run: &[KvEvent], parent: Option<PageHash>, block_size: u32) {
        self.hashes(run);
        match parent {
            Some(parent) => self.entry("parent_block_hash").number(name(parent)),
            None => self.entry("parent_block_hash").nil(),
        }
        let tokens = || run.iter().flat_map(tokens_of);
        self.entry("token_ids").array(tokens().count());
        for &token in tokens() {
            self.number(token.into());
        }
        self.entry("block_size").number(block_size.into());
        // Adapters are published by name; a number would mean nothing on another server.
        self.entry("lora_id").nil();
    }

    fn medium(&mut self, medium: Medium) {
        self.entry("medium").text(medium.name());
        if let Some(locality) = medium.locality() {
            self.entry("locality").text(locality);
        }
    }

    /// The keys that distinguish blocks with equal tokens: the adapter's name in all blocks, the cache salt in a
    /// prompt's first block.
    fn extra_keys(&mut self, num_blocks: usize, is_first: bool, namespace: &Namespace) {
        self.entry("extra_keys").array(num_blocks);
        for block in 0..num_blocks {
            let salt = namespace.cache_salt.as_ref();
            let salt = salt.filter(|_| is_first && block == 0);
            let adapter = namespace.lora.as_deref().map(served_name);
            let keys: Vec<_> = adapter
                .into_iter()
                .chain(salt.map(|salt| &**salt))
                .collect();
            if keys.is_empty() {
                self.nil();
                continue;
            }
            self.array(keys.len());
            for key in keys {
                self.text(key);
            }
        }
    }

    fn hashes(&mut self, run: &[KvEvent]) {
        self.entry("block_hashes").array(run.len());
        for event in run {
            match event {
                KvEvent::Stored { page, .. } | KvEvent::Removed { page } => {
                    self.number(name(*page))
                }
                KvEvent::Cleared => unreachable!("it is in a run of its own"),
            }
        }
    }

    fn entry(&mut self, key: &str) -> &mut Self {
        self.text(key);
        self
    }

    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn float(&mut self, value: f64) {
        self.0.push(0xcb);
        self.0.extend(value.to_be_bytes());
    }

    fn number(&mut self, value: u64) {
        match value {
            0..=0x7f => self.0.push(value as u8),
            0x80..=0xff => self.0.extend([0xcc, value as u8]),
            0x100..=0xffff => self.with(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.with(0xce, &(value as u32).to_be_bytes()),
            _ => self.with(0xcf, &value.to_be_bytes()),
        }
    }

    fn text(&mut self, text: &str) {
        match text.len() {
            len @ 0..=31 => self.0.push(0xa0 | len as u8),
            len @ 32..=0xff => self.0.extend([0xd9, len as u8]),
            len @ 0x100..=0xffff => self.with(0xda, &(len as u16).to_be_bytes()),
            len => self.with(0xdb, &(len as u32).to_be_bytes()),
        }
        self.0.extend(text.as_bytes());
    }

    fn array(&mut self, len: usize) {
        match len {
            0..=15 => self.0.push(0x90 | len as u8),
            16..=0xffff => self.with(0xdc, &(len as u16).to_be_bytes()),
            _ => self.with(0xdd, &(len as u32).to_be_bytes()),
        }
    }

    /// All maps here have at most 15 entries.
    fn map(&mut self, len: usize) {
        self.0.push(0x80 | len as u8);
    }

    fn with(&mut self, tag: u8, bytes: &[u8]) {
        self.0.push(tag);
        self.0.extend(bytes);
    }
}

fn tokens_of(event: &KvEvent) -> &[TokenId] {
    match event {
        KvEvent::Stored { tokens, .. } => tokens,
        KvEvent::Removed { .. } | KvEvent::Cleared => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(page: u128, parent: Option<u128>, namespace: Namespace) -> KvEvent {
        KvEvent::Stored {
            page: PageHash(page),
            parent: parent.map(PageHash),
            tokens: [1, 200].into(),
            namespace,
        }
    }

    /// Written by hand from msgpack's specification.
    #[test]
    fn a_batch_has_the_bytes_of_the_specification() {
        let none = Namespace::default;
        let events = [
            KvEvent::Cleared,
            stored(1 << 64 | 5, None, none()),
            stored(6, Some(1 << 64 | 5), none()),
            KvEvent::Removed {
                page: PageHash(u128::MAX),
            },
        ];
        let mut expected = vec![0x93, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x93];
        expected.extend(b"\x81\xa4type\xb0AllBlocksCleared");
        expected.extend(b"\x88\xa4type\xabBlockStored\xacblock_hashes\x92\x05\x06");
        expected.extend(b"\xb1parent_block_hash\xc0\xa9token_ids\x94\x01\xcc\xc8\x01\xcc\xc8");
        expected.extend(b"\xaablock_size\x02\xa7lora_id\xc0\xa6medium\xa3GPU\xa9lora_name\xc0");
        expected.extend(b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\xcf");
        expected.extend([0xff; 8]);
        expected.extend(b"\xa6medium\xa3GPU\x00");
        assert_eq!(encode(1.5, &events, Medium::Pool, 2), expected);
    }

    #[test]
    fn blocks_on_the_disk_have_a_medium_and_a_locality() {
        let events = [
            KvEvent::Removed { page: PageHash(7) },
            stored(5, None, Namespace::default()),
        ];
        let mut expected = vec![0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x92];
        expected.extend(b"\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\x07");
        expected.extend(b"\xa6medium\xa7STORAGE\xa8locality\xa5LOCAL");
        expected.extend(b"\x89\xa4type\xabBlockStored\xacblock_hashes\x91\x05");
        expected.extend(b"\xb1parent_block_hash\xc0\xa9token_ids\x92\x01\xcc\xc8");
        expected.extend(b"\xaablock_size\x02\xa7lora_id\xc0\xa6medium\xa7STORAGE");
        expected.extend(b"\xa8locality\xa5LOCAL\xa9lora_name\xc0\x00");
        assert_eq!(encode(0.0, &events, Medium::Disk, 2), expected);
    }

    #[test]
    fn blocks_in_host_memory_have_a_medium() {
        let events = [KvEvent::Removed { page: PageHash(7) }];
        let mut expected = vec![0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91];
        expected.extend(b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x07");
        expected.extend(b"\xa6medium\xa3CPU\x00");
        assert_eq!(encode(0.0, &events, Medium::Host, 2), expected);
    }

    #[test]
    fn an_adapter_is_a_key_of_each_block_and_a_salt_of_the_first() {
        let namespace = Namespace {
            lora: Some("a#12".into()),
            cache_salt: Some("s".into()),
            arithmetic: None,
        };
        let first = stored(1, None, namespace.clone());
        let second = stored(2, Some(1), namespace.clone());
        let bytes = encode(0.0, &[first, second.clone()], Medium::Pool, 2);
        assert!(bytes.ends_with(b"lora_name\xa1a\xaaextra_keys\x92\x92\xa1a\xa1s\x91\xa1a\x00"));
        let bytes = encode(0.0, &[second], Medium::Pool, 2);
        assert!(bytes.ends_with(b"lora_name\xa1a\xaaextra_keys\x91\x91\xa1a\x00"));
    }

    #[test]
    fn only_what_follows_each_other_is_one_event() {
        let none = Namespace::default;
        let events = [
            stored(1, None, none()),
            stored(2, None, none()),
            stored(3, Some(2), none()),
            KvEvent::Removed { page: PageHash(3) },
            KvEvent::Removed { page: PageHash(2) },
            stored(2, None, none()),
        ];
        let lengths: Vec<_> = runs(&events).iter().map(|run| run.len()).collect();
        assert_eq!(lengths, [1, 2, 2, 1]);
    }
}
