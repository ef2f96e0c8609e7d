//! The label at the beginning of a file: the shape of the file's slots, and texts that tell people which model the
//! blocks belong to.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | magic number with the version of this layout |
//! | 8 | layout of the slots, as in their headers |
//! | 24 | number of tokens of a page |
//! | 28 | length of the texts |
//! | 32 | number of bytes of a page's rows |
//! | 40 | checksum of the bytes before it and of the texts |
//! | 48 | texts, a line for each |
//!
//! Numbers are little-endian. The slots follow after 4096 bytes.

use xxhash_rust::xxh3::Xxh3;

use super::slot::{SlotShape, number};

pub(super) const LABEL_BYTES: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"CORKVF\0\x01");
const CHECKSUM_AT: usize = 40;
const TEXTS_AT: usize = 48;
/// The limit of a text, so that all of them have room.
const MAX_TEXT_BYTES: usize = 500;

/// The model whose blocks a file has, and what else decides their bits, in words for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvDiskLabel {
    pub model: String,
    pub weight_type: String,
    pub kv_type: String,
    /// The instruction set of the kernels
    pub isa: String,
    /// The version of Corella
    pub version: String,
}

impl KvDiskLabel {
    const NUM_TEXTS: usize = 5;

    fn texts(&self) -> [&str; Self::NUM_TEXTS] {
        let Self {
            model,
            weight_type,
            kv_type,
            isa,
            version,
        } = self;
        [model, weight_type, kv_type, isa, version]
    }
}

pub(super) fn write_label(shape: SlotShape, label: &KvDiskLabel) -> Vec<u8> {
    let lines = label.texts().map(|text| {
        let text: String = text.chars().filter(|c| !c.is_control()).collect();
        let end = text.floor_char_boundary(MAX_TEXT_BYTES);
        text[..end].to_owned()
    });
    let texts = lines.join("\n");
    let mut bytes = vec![0; LABEL_BYTES];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..24].copy_from_slice(&shape.layout.to_le_bytes());
    bytes[24..28].copy_from_slice(&shape.page_size.to_le_bytes());
    bytes[28..32].copy_from_slice(&(texts.len() as u32).to_le_bytes());
    bytes[32..40].copy_from_slice(&(shape.row_bytes as u64).to_le_bytes());
    bytes[TEXTS_AT..TEXTS_AT + texts.len()].copy_from_slice(texts.as_bytes());
    let checksum = checksum(&bytes, texts.len());
    bytes[CHECKSUM_AT..TEXTS_AT].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// `None` for bytes that are torn, damaged or of another version.
pub(super) fn read_label(bytes: &[u8; LABEL_BYTES]) -> Option<(SlotShape, KvDiskLabel)> {
    let texts_len = number(bytes, 28, 4) as usize;
    let is_whole = number(bytes, 0, 8) == u128::from(MAGIC)
        && texts_len <= LABEL_BYTES - TEXTS_AT
        && number(bytes, CHECKSUM_AT, 8) == u128::from(checksum(bytes, texts_len));
    let texts = &bytes[TEXTS_AT..TEXTS_AT + texts_len.min(LABEL_BYTES - TEXTS_AT)];
    let mut lines = str::from_utf8(texts).ok()?.split('\n').map(str::to_owned);
    let mut line = || lines.next().unwrap_or_default();
    let label = KvDiskLabel {
        model: line(),
        weight_type: line(),
        kv_type: line(),
        isa: line(),
        version: line(),
    };
    let shape = SlotShape {
        layout: number(bytes, 8, 16),
        page_size: number(bytes, 24, 4) as u32,
        row_bytes: number(bytes, 32, 8) as usize,
    };
    is_whole.then_some((shape, label))
}

fn checksum(bytes: &[u8], texts_len: usize) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(&bytes[..CHECKSUM_AT]);
    hasher.update(&bytes[TEXTS_AT..TEXTS_AT + texts_len]);
    hasher.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: SlotShape = SlotShape {
        layout: 7 << 90,
        page_size: 16,
        row_bytes: 1 << 20,
    };

    fn label() -> KvDiskLabel {
        KvDiskLabel {
            model: "a/model".to_owned(),
            weight_type: "bf16".to_owned(),
            kv_type: "f32".to_owned(),
            isa: String::new(),
            version: "1.2.3".to_owned(),
        }
    }

    fn written(label: &KvDiskLabel) -> [u8; LABEL_BYTES] {
        write_label(SHAPE, label).try_into().unwrap()
    }

    #[test]
    fn a_label_says_whose_blocks_a_file_has() {
        let bytes = written(&label());
        assert_eq!(read_label(&bytes), Some((SHAPE, label())));
        // The texts have 7 + 4 + 3 + 0 + 5 bytes and four line ends.
        for at in 0..48 + 23 {
            let mut damaged = bytes;
            damaged[at] ^= 1 << (at % 8);
            assert_eq!(read_label(&damaged), None, "byte {at}");
        }
        assert_eq!(read_label(&[0; LABEL_BYTES]), None);
    }

    #[test]
    fn a_long_name_is_cut_and_has_no_line_ends() {
        let long = KvDiskLabel {
            model: format!("a\nb{}", "\u{e9}".repeat(900)),
            ..label()
        };
        let (_, read) = read_label(&written(&long)).unwrap();
        assert_eq!(read.model, format!("ab{}", "\u{e9}".repeat(249)));
        assert_eq!(read.version, "1.2.3");
    }
}
