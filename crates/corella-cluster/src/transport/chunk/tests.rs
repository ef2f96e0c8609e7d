//! Sessions that end while their pages are on the way to a socket.

use std::sync::Arc;
use std::time::Duration;

use corella_core::session::SessionKey;
use corella_core::{Incarnation, PageId, SessionId};
use corella_model::{DType, ElementOrder, KvFormat, KvGeometry, KvLayers, PageForm};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

use super::{ChunkWriter, ZEROES, push_rest};
use crate::transport::PlainPages;
use crate::transport::frame::{FRAME_BYTES, Frame, PageRun, Refusal};
use crate::transport::io_parts::IoParts;
use crate::transport::outgoing::Outgoing;
use crate::transport::socket::Socket;

const RUN: PageRun = PageRun {
    load_id: 5,
    layer: 0,
    first_row: 0,
    num_rows: 16,
    form: PageForm::Native,
    num_regions: 0,
};

/// Wherever the frame was interrupted, the receiver reads the whole header and a payload of the right length.
#[test]
fn a_withdrawn_frame_keeps_its_header_and_its_length() {
    let header = Frame::Data(RUN).encode();
    for num_payload in [1, 100, ZEROES.len() + 1, 3 * ZEROES.len()] {
        let mut whole = header.to_vec();
        whole.resize(header.len() + num_payload, 0);
        for rest in (1..whole.len()).filter(|rest| *rest < 200 || whole.len() - rest < 200) {
            let mut parts = IoParts::default();
            push_rest(&mut parts, &header, rest, num_payload);
            let mut sent = whole[..whole.len() - rest].to_vec();
            for part in parts.iter() {
                // SAFETY: a piece of the header or of the zeroes.
                sent.extend_from_slice(unsafe { part.as_ref() });
            }
            assert!(sent == whole, "{rest} of {num_payload}");
        }
    }
}

/// The socket takes no bytes when the session ends, so not even the header of the session's frame is out.
#[tokio::test]
async fn nothing_is_sent_of_a_session_that_ends_before_its_frame_begins() {
    let geometry = KvGeometry {
        num_layers: 1,
        layers: KvLayers::one(1),
        num_kv_heads: 1,
        head_dim: 64,
        page_size: 16,
        num_pages: 1,
        format: KvFormat::Float(DType::Bf16),
        order: ElementOrder::Plain,
    };
    let key = SessionKey {
        session: SessionId(1),
        attempt: 0,
        prefill_incarnation: Incarnation(7),
        decode_incarnation: Incarnation(9),
    };
    let outgoing = Outgoing::new(key, Arc::new(PlainPages::new(geometry)), 16);
    let (near, mut far) = UnixStream::pair().unwrap();
    let mut num_before = 0;
    while let Ok(num_bytes) = near.try_write(&[0x55; 4096]) {
        num_before += num_bytes;
    }
    let socket = Socket::Unix(near);
    let mut writer = ChunkWriter::new(false, Duration::from_secs(600));
    {
        let pages = [PageId(0)];
        let write = writer.write(&socket, &outgoing, RUN, &pages);
        tokio::pin!(write);
        tokio::select! {
            biased;
            _ = &mut write => panic!("the socket is full"),
            () = std::future::ready(()) => {}
        }
        outgoing.end(Refusal::Gone);
        let mut before = vec![0; num_before];
        far.read_exact(&mut before).await.unwrap();
        write.await.unwrap();
    }
    let next = Frame::Credit {
        load_id: 6,
        num_bytes: 1,
    };
    writer.write_bytes(&socket, &next.encode()).await.unwrap();
    let mut bytes = [0; FRAME_BYTES];
    far.read_exact(&mut bytes).await.unwrap();
    assert_eq!(Frame::decode(&bytes), Ok(next));
}
