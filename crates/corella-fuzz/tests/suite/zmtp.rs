//! A ZeroMQ peer's messages to the publisher of KV events.

use corella_fuzz::{Target, Verdict, mutate_bytes};
use corella_server::zmtp::{FrameBuffer, ZmtpError, check_greeting, command, socket_type};

/// A greeting, the peer's type, a subscription in both of its forms, a ping, and a request for missed batches.
fn valid() -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[0] = 0xff;
    bytes[9..11].copy_from_slice(&[0x7f, 3]);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
        .extend(b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x08Identity\x00\x00\x00\x00");
    bytes.extend(b"\x00\x04\x01kv@\x04\x0a\x09SUBSCRIBE\x04\x08\x04PING\x00\x0ax");
    bytes.extend(b"\x01\x00\x02\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x07");
    bytes
}

/// Reads the arrived bytes, in pieces of `piece` bytes. Returns the number of frames.
fn read(bytes: &[u8], piece: usize) -> Result<usize, ZmtpError> {
    let mut buffer = FrameBuffer::default();
    let mut has_greeted = false;
    let mut num_frames = 0;
    for bytes in bytes.chunks(piece) {
        buffer.push(bytes);
        if !has_greeted {
            let Some(greeting) = buffer.take_greeting() else {
                continue;
            };
            check_greeting(&greeting)?;
            has_greeted = true;
        }
        while let Some(frame) = buffer.pop()? {
            num_frames += 1;
            if frame.is_command && command(&frame.body)?.0 == b"READY" {
                socket_type(&frame.body)?;
            }
        }
    }
    Ok(num_frames)
}

#[test]
fn zmtp() {
    assert_eq!(read(&valid(), 1024), Ok(6));
    Target::new("zmtp", 1 << 20, 64).run(
        &[valid()],
        |random, bytes| mutate_bytes(random, bytes, &[]),
        |bytes| {
            let whole = read(bytes, 1024);
            assert_eq!(read(bytes, 1), whole, "it depends on how the bytes come");
            Verdict::from(&whole)
        },
    );
}
