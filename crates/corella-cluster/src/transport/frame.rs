//! Frames on the wire: 64 bytes each, little-endian.
//!
//! A `Data` frame is followed by its pages and a [`Trailer`]. The number of the pages' bytes follows from the rows and
//! the sender's geometry. The receiver chooses a load's id and never uses the id again.

use corella_core::session::{LoadKey, SessionKey};
use corella_core::{Incarnation, SessionId};
use corella_model::PageForm;

use super::Hello;
use super::path_name::{PathData, PathName};

pub const FRAME_BYTES: usize = 64;
pub const TRAILER_BYTES: usize = 16;
/// The limit of bytes after a frame, unless a single page is larger.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;
/// The limit of a layer's recurrent state. No model has a larger one.
pub const MAX_STATE_BYTES: usize = 256 << 20;

#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// The first frame in either direction.
    Hello(Hello),
    /// Receiver to sender: send these rows as soon as they are available.
    Load(LoadFrame),
    /// Receiver to sender: this many bytes have been received, and as many more may be sent.
    Credit { load_id: u64, num_bytes: u32 },
    /// Sender to receiver: rows of a layer. The rows of each layer come in order.
    Data(PageRun),
    /// Sender to receiver: all rows were sent and are valid.
    Complete { load_id: u64, num_rows: u32 },
    /// Sender to receiver: the load has failed.
    Failed { load_id: u64, reason: Refusal },
    /// Receiver to sender: all rows are in their pages.
    Received { load_id: u64 },
    /// Receiver to sender: stop sending.
    Cancel { load_id: u64 },
    /// Sender to receiver: the offer of a row path. Receiver to sender: the chosen path. Sent after the greetings,
    /// unless the greetings settle the path.
    Path(PathFrame),
    /// A message about a load of cached blocks (`block_message.rs`), in either direction.
    Blocks(BlockFrame),
    /// Sender to receiver, after all rows: a layer's recurrent state. Layers come in order.
    State(StateRun),
}

/// A recurrent layer's state after all rows. Its bytes follow the frame on every row path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRun {
    pub load_id: u64,
    /// The layer's number among the recurrent layers of the model.
    pub layer: u32,
    pub num_rows: u32,
    pub num_bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockFrame {
    pub key: LoadKey,
    pub verb: BlockVerb,
    pub num_blocks: u32,
    /// The number of bytes of the list that follows.
    pub num_bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockVerb {
    Lookup,
    LoadBlocks,
    Landed,
    Release,
    Found,
    Complete,
    NotHere,
    Refused,
    HoldEnded,
    Stalled,
    Unknown,
}

const BLOCK_VERBS: [BlockVerb; 11] = [
    BlockVerb::Lookup,
    BlockVerb::LoadBlocks,
    BlockVerb::Landed,
    BlockVerb::Release,
    BlockVerb::Found,
    BlockVerb::Complete,
    BlockVerb::NotHere,
    BlockVerb::Refused,
    BlockVerb::HoldEnded,
    BlockVerb::Stalled,
    BlockVerb::Unknown,
];

/// The offer of a row path, or the answer to it. Nodes with several paths in common agree on one by their greetings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathFrame {
    pub name: PathName,
    pub data: PathData,
    /// The number of bytes of the offer that follows.
    pub num_bytes: u32,
}

impl PathFrame {
    pub fn named(name: PathName) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadFrame {
    pub load_id: u64,
    pub key: SessionKey,
    /// The receiver has the rows before this one.
    pub first_row: u32,
    /// The number of rows of the session, from 0 on.
    pub num_rows: u32,
    /// The number of bytes that may be sent before any `Credit`.
    pub credit_bytes: u32,
    /// The limit of the wait for a session that the sender does not know yet, in milliseconds.
    pub wait_ms: u32,
}

/// Whole pages within one layer. The last page may also hold rows from `first_row + num_rows` on, which mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    pub load_id: u64,
    /// The layer's number in the model.
    pub layer: u32,
    /// The first row of the first page. The pages are the sender's.
    pub first_row: u32,
    pub num_rows: u32,
    pub form: PageForm,
    /// 0 if the pages themselves follow. Otherwise the number of regions of the sender's memory that the receiver
    /// reads: an address and a number of bytes follow for each, both of 64 bits.
    pub num_regions: u32,
}

/// Why a sender refuses a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("nothing was exported in time")]
    NotExported,
    #[error("the session is over")]
    Gone,
    #[error("the rows could not be computed")]
    Failed,
    /// The key names another incarnation of one of the two nodes.
    #[error("one of the two nodes was restarted meanwhile")]
    OtherIncarnation,
    /// The sender's session has another number of rows.
    #[error("the session has another number of rows")]
    OtherRows,
    /// Too many loads wait, or too many loads share the connection.
    #[error("too many loads wait")]
    Busy,
    #[error("a newer load asked for the same session")]
    Superseded,
}

const REFUSALS: [Refusal; 7] = [
    Refusal::NotExported,
    Refusal::Gone,
    Refusal::Failed,
    Refusal::OtherIncarnation,
    Refusal::OtherRows,
    Refusal::Busy,
    Refusal::Superseded,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trailer {
    /// The XXH3-64 hash of the payload.
    Whole { checksum: u64 },
    /// The session ended while its pages were sent: the payload is invalid.
    Withdrawn,
}

/// Why bytes are not a valid frame. No Corella node sends such bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("no frame begins with {0}")]
    Kind(u8),
    #[error("a frame with an impossible {0}")]
    Field(&'static str),
}

const HELLO: u8 = b'C';
const LOAD: u8 = 1;
const CREDIT: u8 = 2;
const DATA: u8 = 3;
const COMPLETE: u8 = 4;
const FAILED: u8 = 5;
const RECEIVED: u8 = 6;
const CANCEL: u8 = 7;
const PATH: u8 = 8;
const BLOCKS: u8 = 9;
const STATE: u8 = 10;

const FORMS: [PageForm; 2] = [PageForm::Native, PageForm::Canonical];

impl Frame {
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        let mut out = FieldWriter::new(&mut bytes);
        match self {
            Self::Hello(hello) => {
                out.put(&[HELLO]);
                hello.encode(&mut out);
            }
            Self::Load(load) => {
                out.kind(LOAD, load.load_id);
                out.put(&load.key.session.0.to_le_bytes());
                out.u32(load.key.attempt);
                out.u64(load.key.prefill_incarnation.0);
                out.u64(load.key.decode_incarnation.0);
                out.u32(load.first_row);
                out.u32(load.num_rows);
                out.u32(load.credit_bytes);
                out.u32(load.wait_ms);
            }
            Self::Credit { load_id, num_bytes } => {
                out.kind(CREDIT, *load_id);
                out.u32(*num_bytes);
            }
            Self::Data(run) => {
                out.kind(DATA, run.load_id);
                out.u32(run.layer);
                out.u32(run.first_row);
                out.u32(run.num_rows);
                out.u32(run.num_regions);
                out.index(&FORMS, &run.form);
            }
            Self::Complete { load_id, num_rows } => {
                out.kind(COMPLETE, *load_id);
                out.u32(*num_rows);
            }
            Self::Failed { load_id, reason } => {
                out.kind(FAILED, *load_id);
                out.index(&REFUSALS, reason);
            }
            Self::Received { load_id } => out.kind(RECEIVED, *load_id),
            Self::Cancel { load_id } => out.kind(CANCEL, *load_id),
            Self::Path(path) => {
                out.put(&[PATH, 0, 0, 0]);
                out.put(&path.name.0);
                out.put(&path.data);
                out.u32(path.num_bytes);
            }
            Self::Blocks(blocks) => {
                out.kind(BLOCKS, blocks.key.number);
                out.u64(blocks.key.fetcher.0);
                out.u64(blocks.key.source.0);
                out.u32(blocks.num_blocks);
                out.u32(blocks.num_bytes);
                out.index(&BLOCK_VERBS, &blocks.verb);
            }
            Self::State(run) => {
                out.kind(STATE, run.load_id);
                out.u32(run.layer);
                out.u32(run.num_rows);
                out.u32(run.num_bytes);
            }
        }
        bytes
    }

    /// The inverse of `encode`. Refuses bytes that `encode` would not write.
    pub fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, FrameError> {
        let mut fields = FieldReader { rest: bytes };
        let kind = fields.take::<1>()[0];
        if kind == HELLO {
            let hello = Hello::decode(&mut fields)?;
            fields.zeroes()?;
            return Ok(Self::Hello(hello));
        }
        if kind == 0 || kind > STATE {
            return Err(FrameError::Kind(kind));
        }
        if fields.take::<3>() != [0; 3] {
            return Err(FrameError::Field("padding"));
        }
        let load_id = fields.u64();
        let frame = match kind {
            LOAD => Self::Load(LoadFrame {
                load_id,
                key: SessionKey {
                    session: SessionId(u128::from_le_bytes(fields.take())),
                    attempt: fields.u32(),
                    prefill_incarnation: Incarnation(fields.u64()),
                    decode_incarnation: Incarnation(fields.u64()),
                },
                first_row: fields.u32(),
                num_rows: fields.u32(),
                credit_bytes: fields.u32(),
                wait_ms: fields.u32(),
            }),
            CREDIT => Self::Credit {
                load_id,
                num_bytes: fields.u32(),
            },
            DATA => Self::Data(PageRun {
                load_id,
                layer: fields.u32(),
                first_row: fields.u32(),
                num_rows: fields.u32(),
                num_regions: fields.u32(),
                form: fields.index(&FORMS, "form")?,
            }),
            COMPLETE => Self::Complete {
                load_id,
                num_rows: fields.u32(),
            },
            FAILED => Self::Failed {
                load_id,
                reason: fields.index(&REFUSALS, "reason")?,
            },
            RECEIVED => Self::Received { load_id },
            CANCEL => Self::Cancel { load_id },
            PATH => Self::Path(PathFrame {
                name: PathName(load_id.to_le_bytes()),
                data: fields.take(),
                num_bytes: fields.u32(),
            }),
            STATE => Self::State(StateRun {
                load_id,
                layer: fields.u32(),
                num_rows: fields.u32(),
                num_bytes: fields.u32(),
            }),
            _ => Self::Blocks(BlockFrame {
                key: LoadKey {
                    number: load_id,
                    fetcher: Incarnation(fields.u64()),
                    source: Incarnation(fields.u64()),
                },
                num_blocks: fields.u32(),
                num_bytes: fields.u32(),
                verb: fields.index(&BLOCK_VERBS, "verb")?,
            }),
        };
        fields.zeroes()?;
        Ok(frame)
    }
}

impl Trailer {
    pub fn encode(self) -> [u8; TRAILER_BYTES] {
        let (status, checksum) = match self {
            Self::Whole { checksum } => (1u64, checksum),
            Self::Withdrawn => (2, 0),
        };
        let mut bytes = [0; TRAILER_BYTES];
        bytes[..8].copy_from_slice(&status.to_le_bytes());
        bytes[8..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; TRAILER_BYTES]) -> Result<Self, FrameError> {
        let mut fields = FieldReader { rest: bytes };
        match (fields.u64(), fields.u64()) {
            (1, checksum) => Ok(Self::Whole { checksum }),
            (2, 0) => Ok(Self::Withdrawn),
            _ => Err(FrameError::Field("trailer")),
        }
    }
}

/// Writes fields one after the other. Bytes that are not written stay 0.
pub struct FieldWriter<'a> {
    rest: &'a mut [u8],
}

impl<'a> FieldWriter<'a> {
    fn new(bytes: &'a mut [u8]) -> Self {
        Self { rest: bytes }
    }

    fn kind(&mut self, kind: u8, load_id: u64) {
        self.put(&[kind, 0, 0, 0]);
        self.u64(load_id);
    }

    pub fn put(&mut self, bytes: &[u8]) {
        let (to, rest) = std::mem::take(&mut self.rest).split_at_mut(bytes.len());
        to.copy_from_slice(bytes);
        self.rest = rest;
    }

    /// Writes a value that fits 16 bits. A larger one, which no model has, is written as 0, which readers refuse.
    pub fn u16(&mut self, value: u32) {
        self.put(&u16::try_from(value).unwrap_or(0).to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    /// Writes one of a few values, counted from 1.
    pub fn index<T: PartialEq>(&mut self, values: &[T], value: &T) {
        let index = values.iter().position(|other| other == value);
        let index = index.expect("the table has every value");
        self.put(&[index as u8 + 1]);
    }
}

/// The inverse of `FieldWriter`.
pub struct FieldReader<'a> {
    rest: &'a [u8],
}

impl FieldReader<'_> {
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let (bytes, rest) = self.rest.split_first_chunk().expect("fields fit in frames");
        self.rest = rest;
        *bytes
    }

    pub fn u16(&mut self) -> u32 {
        u16::from_le_bytes(self.take()).into()
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    pub fn index<T: Copy>(&mut self, values: &[T], name: &'static str) -> Result<T, FrameError> {
        let index = usize::from(self.take::<1>()[0]);
        let value = index.checked_sub(1).and_then(|index| values.get(index));
        value.copied().ok_or(FrameError::Field(name))
    }

    fn zeroes(&self) -> Result<(), FrameError> {
        match self.rest.iter().all(|&byte| byte == 0) {
            true => Ok(()),
            false => Err(FrameError::Field("padding")),
        }
    }
}
