//! Frames are read as they were written, and other bytes are refused.

use corella_cluster::transport::{
    BlockFrame, BlockVerb, FRAME_BYTES, Frame, Hello, LoadFrame, PageRun, PathFrame, PathName,
    PathSet, Refusal, StateRun, TRAILER_BYTES, Trailer,
};
use corella_core::session::{LoadKey, SessionKey};
use corella_core::{Arithmetic, Incarnation, SessionId};
use corella_model::{DType, ElementOrder, KvFormat, KvGeometry, KvLayers, PageForm};
use proptest::prelude::*;

fn hello() -> impl Strategy<Value = Frame> {
    let geometry = (
        1u32..=65535,
        1u32..=128,
        1u32..=256,
        1u32..=256,
        0usize..4,
        any::<bool>(),
    );
    let node = (
        any::<u32>(),
        any::<u64>(),
        any::<u128>(),
        any::<u64>(),
        any::<u8>(),
        any::<u64>(),
    );
    (node, geometry).prop_map(|(node, geometry)| {
        let (protocol_version, incarnation, model_fingerprint, arithmetic, paths, window_digest) =
            node;
        let (num_layers, num_kv_heads, head_dim, page_size, format, is_plain) = geometry;
        Frame::Hello(Hello {
            protocol_version,
            incarnation,
            model_fingerprint,
            arithmetic: Arithmetic(arithmetic),
            geometry: KvGeometry {
                num_layers,
                layers: KvLayers::one(num_layers),
                num_kv_heads,
                head_dim,
                page_size,
                num_pages: 0,
                format: [
                    KvFormat::Float(DType::F32),
                    KvFormat::Float(DType::F16),
                    KvFormat::Float(DType::Bf16),
                    KvFormat::Int8,
                ][format],
                order: match is_plain {
                    true => ElementOrder::Plain,
                    false => ElementOrder::Tiles,
                },
            },
            paths: PathSet(paths),
            window_digest,
        })
    })
}

fn load() -> impl Strategy<Value = Frame> {
    let key = (any::<u128>(), any::<u32>(), any::<u64>(), any::<u64>());
    let rows = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>());
    (any::<u64>(), key, rows).prop_map(|(load_id, key, rows)| {
        let (uuid, attempt, prefill_incarnation, decode_incarnation) = key;
        let (first_row, num_rows, credit_bytes, wait_ms) = rows;
        Frame::Load(LoadFrame {
            load_id,
            key: SessionKey {
                session: SessionId(uuid),
                attempt,
                prefill_incarnation: Incarnation(prefill_incarnation),
                decode_incarnation: Incarnation(decode_incarnation),
            },
            first_row,
            num_rows,
            credit_bytes,
            wait_ms,
        })
    })
}

fn data() -> impl Strategy<Value = Frame> {
    let rows = (
        any::<u32>(),
        any::<u32>(),
        any::<u32>(),
        any::<u32>(),
        any::<bool>(),
    );
    (any::<u64>(), rows).prop_map(|(load_id, rows)| {
        let (layer, first_row, num_rows, num_regions, is_native) = rows;
        Frame::Data(PageRun {
            load_id,
            layer,
            first_row,
            num_rows,
            form: match is_native {
                true => PageForm::Native,
                false => PageForm::Canonical,
            },
            num_regions,
        })
    })
}

fn small() -> impl Strategy<Value = Frame> {
    const REASONS: [Refusal; 7] = [
        Refusal::NotExported,
        Refusal::Gone,
        Refusal::Failed,
        Refusal::OtherIncarnation,
        Refusal::OtherRows,
        Refusal::Busy,
        Refusal::Superseded,
    ];
    const VERBS: [BlockVerb; 3] = [BlockVerb::Lookup, BlockVerb::Landed, BlockVerb::Unknown];
    (0..8, any::<u64>(), any::<u32>(), 0..REASONS.len()).prop_map(
        |(kind, load_id, number, reason)| match kind {
            0 => Frame::Credit {
                load_id,
                num_bytes: number,
            },
            1 => Frame::Complete {
                load_id,
                num_rows: number,
            },
            2 => Frame::Failed {
                load_id,
                reason: REASONS[reason],
            },
            3 => Frame::Received { load_id },
            4 => Frame::Path(PathFrame {
                name: PathName(load_id.to_ne_bytes()),
                data: [reason as u8; 32],
                num_bytes: number,
            }),
            5 => Frame::Blocks(BlockFrame {
                key: LoadKey {
                    fetcher: Incarnation(load_id.rotate_left(7)),
                    source: Incarnation(!load_id),
                    number: load_id,
                },
                verb: VERBS[reason % VERBS.len()],
                num_blocks: number,
                num_bytes: !number,
            }),
            6 => Frame::State(StateRun {
                load_id,
                layer: reason as u32,
                num_rows: number,
                num_bytes: !number,
            }),
            _ => Frame::Cancel { load_id },
        },
    )
}

proptest! {
    #[test]
    fn frames_come_back(frame in prop_oneof![hello(), load(), data(), small()]) {
        prop_assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
    }

    /// Bytes are a frame only if that frame is encoded as these bytes.
    #[test]
    fn other_bytes_are_refused(
        frame in prop_oneof![hello(), load(), data(), small()],
        at in 0..FRAME_BYTES,
        value in any::<u8>(),
        noise in prop::array::uniform32(any::<u8>()),
    ) {
        let mut bytes = frame.encode();
        bytes[at] = value;
        if let Ok(other) = Frame::decode(&bytes) {
            prop_assert_eq!(other.encode(), bytes);
        }
        bytes[FRAME_BYTES - 32..].copy_from_slice(&noise);
        if let Ok(other) = Frame::decode(&bytes) {
            prop_assert_eq!(other.encode(), bytes);
        }
    }

    #[test]
    fn trailers_come_back(checksum in any::<u64>(), noise in prop::array::uniform16(any::<u8>())) {
        for trailer in [Trailer::Whole { checksum }, Trailer::Withdrawn] {
            prop_assert_eq!(Trailer::decode(&trailer.encode()), Ok(trailer));
        }
        let noise: [u8; TRAILER_BYTES] = noise;
        if let Ok(trailer) = Trailer::decode(&noise) {
            prop_assert_eq!(trailer.encode(), noise);
        }
    }

    /// Any geometry from a peer yields a page size without overflow, or is refused.
    #[test]
    fn impossible_geometries_are_refused(sizes in prop::array::uniform4(any::<u32>())) {
        let Frame::Hello(hello) = greeting() else { unreachable!() };
        let mut bytes = greeting().encode();
        // The fields after kind, magic, version, incarnation and fingerprint.
        for (field, size) in bytes[32..48].chunks_mut(4).zip(sizes) {
            field.copy_from_slice(&size.to_le_bytes());
        }
        if let Ok(Frame::Hello(other)) = Frame::decode(&bytes) {
            prop_assert_eq!(other.incarnation, hello.incarnation);
            prop_assert!(other.geometry.layer_bytes() <= 1 << 27);
            prop_assert!(other.geometry.layer_bytes() > 0);
        }
    }
}

fn greeting() -> Frame {
    Frame::Hello(Hello::new(
        7,
        8,
        Arithmetic(9),
        &crate::transport::fixture::geometry(2, 16, 4),
    ))
}
