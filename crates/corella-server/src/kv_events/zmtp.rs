//! The parts of ZMTP 3.0, ZeroMQ's wire protocol (RFC 23), that a publisher and a router need: the mechanism NULL,
//! frames, and subscriptions in both of their forms. All bytes come from outside, and a frame that is too long ends the
//! connection.

use std::fmt;

/// The length of the greeting of either side.
pub const GREETING_LEN: usize = 64;

/// Limits a frame's body. Peers send only subscriptions, replies to greetings and sequence numbers, which are short.
pub const MAX_BODY: usize = 4096;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// One frame of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub is_command: bool,
    /// Whether another frame of the same message follows.
    pub has_more: bool,
    pub body: Vec<u8>,
}

/// Why a connection is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZmtpError {
    NoGreeting,
    /// The peer asks for a mechanism other than NULL.
    Mechanism,
    /// A frame's flags do not belong to this version.
    Flags,
    TooLong,
    Command,
    /// The peer's socket type cannot talk to this one.
    SocketType,
}

impl fmt::Display for ZmtpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoGreeting => "it does not speak ZMTP 3",
            Self::Mechanism => "it asks for a security mechanism other than NULL",
            Self::Flags => "a frame has unknown flags",
            Self::TooLong => "a frame, a message or the list of subscriptions is too long",
            Self::Command => "a command cannot be read",
            Self::SocketType => "it is a socket of a kind that cannot be connected to this one",
        })
    }
}

/// The greeting of this side.
pub fn greeting() -> [u8; GREETING_LEN] {
    let mut greeting = [0; GREETING_LEN];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    // Version 3.0: peers of later versions then send subscriptions as messages.
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

pub fn check_greeting(greeting: &[u8; GREETING_LEN]) -> Result<(), ZmtpError> {
    if greeting[0] != 0xff || greeting[9] & 1 == 0 || greeting[10] < 3 {
        return Err(ZmtpError::NoGreeting);
    }
    let mechanism = &greeting[12..32];
    let is_null = mechanism.starts_with(b"NULL") && mechanism[4..].iter().all(|&byte| byte == 0);
    is_null.then_some(()).ok_or(ZmtpError::Mechanism)
}

/// Appends a frame of a message.
pub fn put_frame(out: &mut Vec<u8>, body: &[u8], has_more: bool) {
    put(out, body, if has_more { MORE } else { 0 });
}

fn put(out: &mut Vec<u8>, body: &[u8], flags: u8) {
    match u8::try_from(body.len()) {
        Ok(len) => out.extend([flags, len]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((body.len() as u64).to_be_bytes());
        }
    }
    out.extend(body);
}

/// Appends the command that names a side's socket type.
pub fn put_ready(out: &mut Vec<u8>, socket_type: &str) {
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend((socket_type.len() as u32).to_be_bytes());
    body.extend(socket_type.as_bytes());
    put(out, &body, COMMAND);
}

/// Appends the answer to a ping. The answer repeats the ping's context.
pub fn put_pong(out: &mut Vec<u8>, context: &[u8]) {
    let mut body = b"\x04PONG".to_vec();
    body.extend(context);
    put(out, &body, COMMAND);
}

/// Returns a command's name and the rest of its body.
pub fn command(body: &[u8]) -> Result<(&[u8], &[u8]), ZmtpError> {
    let (&len, rest) = body.split_first().ok_or(ZmtpError::Command)?;
    rest.split_at_checked(len.into()).ok_or(ZmtpError::Command)
}

/// The socket type that a READY command names.
pub fn socket_type(body: &[u8]) -> Result<&[u8], ZmtpError> {
    let (b"READY", mut rest) = command(body)? else {
        return Err(ZmtpError::Command);
    };
    while !rest.is_empty() {
        let (name, behind) = command(rest)?;
        let (len, behind) = behind.split_first_chunk().ok_or(ZmtpError::Command)?;
        let len = u32::from_be_bytes(*len) as usize;
        let (value, behind) = behind.split_at_checked(len).ok_or(ZmtpError::Command)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Ok(value);
        }
        rest = behind;
    }
    Err(ZmtpError::SocketType)
}

/// Received bytes, cut into frames.
#[derive(Debug, Default)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
}

impl FrameBuffer {
    /// The caller pops all frames before it pushes more, so that the buffer stays short.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    pub fn take_greeting(&mut self) -> Option<[u8; GREETING_LEN]> {
        let greeting = *self.bytes.first_chunk()?;
        self.bytes.drain(..GREETING_LEN);
        Some(greeting)
    }

    /// Returns the next frame, or `None` while it is incomplete.
    pub fn pop(&mut self) -> Result<Option<Frame>, ZmtpError> {
        let Some(&flags) = self.bytes.first() else {
            return Ok(None);
        };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & COMMAND != 0 && flags & MORE != 0 {
            return Err(ZmtpError::Flags);
        }
        let (len, head) = match flags & LONG {
            0 => (self.bytes.get(1).map(|&len| u64::from(len)), 2),
            _ => {
                let len = self.bytes[1..].first_chunk().copied();
                (len.map(u64::from_be_bytes), 9)
            }
        };
        let Some(len) = len else {
            return Ok(None);
        };
        if len > MAX_BODY as u64 {
            return Err(ZmtpError::TooLong);
        }
        let end = head + len as usize;
        let Some(body) = self.bytes.get(head..end) else {
            return Ok(None);
        };
        let frame = Frame {
            is_command: flags & COMMAND != 0,
            has_more: flags & MORE != 0,
            body: body.to_vec(),
        };
        self.bytes.drain(..end);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_cut_wherever_bytes_are() {
        let mut bytes = Vec::new();
        put_frame(&mut bytes, b"topic", true);
        put_frame(&mut bytes, &[7; 300], false);
        put_ready(&mut bytes, "SUB");
        let mut buffer = FrameBuffer::default();
        let mut frames = Vec::new();
        for byte in bytes {
            buffer.push(&[byte]);
            frames.extend(buffer.pop().unwrap());
        }
        let shapes: Vec<_> = frames
            .iter()
            .map(|frame| (frame.is_command, frame.has_more, frame.body.len()))
            .collect();
        assert_eq!(
            shapes,
            [(false, true, 5), (false, false, 300), (true, false, 25)]
        );
        assert_eq!(socket_type(&frames[2].body), Ok(&b"SUB"[..]));
    }

    #[test]
    fn what_is_no_frame_ends_the_connection() {
        for (bytes, error) in [
            (&[8, 0][..], ZmtpError::Flags),
            (&[COMMAND | MORE, 0], ZmtpError::Flags),
            (&[LONG, 0, 0, 0, 0, 0, 0, 0x10, 1], ZmtpError::TooLong),
            (
                &[LONG, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
                ZmtpError::TooLong,
            ),
        ] {
            let mut buffer = FrameBuffer::default();
            buffer.push(bytes);
            assert_eq!(buffer.pop(), Err(error), "{bytes:?}");
        }
        for body in [
            &b""[..],
            b"\x09READY",
            b"\x05READY\x0bSocket-Type\0\0\0\xff",
            b"\x05READY\x0bSocket-Type\0\0",
        ] {
            assert_eq!(socket_type(body), Err(ZmtpError::Command), "{body:?}");
        }
        assert_eq!(socket_type(b"\x05READY"), Err(ZmtpError::SocketType));
    }

    #[test]
    fn only_version_3_without_security_is_spoken() {
        let own = greeting();
        assert_eq!(check_greeting(&own), Ok(()));
        for (at, byte, error) in [
            (0, 0, ZmtpError::NoGreeting),
            (9, 0, ZmtpError::NoGreeting),
            (10, 1, ZmtpError::NoGreeting),
            (12, b'C', ZmtpError::Mechanism),
            (16, b'X', ZmtpError::Mechanism),
        ] {
            let mut other = own;
            other[at] = byte;
            assert_eq!(check_greeting(&other), Err(error), "byte {at}");
        }
    }
}
