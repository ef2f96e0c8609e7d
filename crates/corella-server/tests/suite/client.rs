//! A client that shows its tests every byte: one connection, one request.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Far longer than any test needs, so that a hang is a failure and not a stuck build.
pub const PATIENCE: Duration = Duration::from_secs(300);

pub struct Reply {
    pub status: u16,
    head: String,
    pub body: Vec<u8>,
    /// Whether the body ended as its framing announced.
    pub is_complete: bool,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("bodies are UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }

    /// The error object of a failed request.
    pub fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        assert!(error["message"].is_string(), "{}", self.text());
        assert!(error["type"].is_string(), "{}", self.text());
        error
    }

    /// The `data` of each event; `[DONE]` is a JSON string.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        events(self.text())
    }

    /// Returns the events of a stream before its `[DONE]`.
    pub fn chunks(&self) -> Vec<Value> {
        assert!(self.is_complete);
        let mut events = self.events();
        assert_eq!(events.pop(), Some(Value::from("[DONE]")));
        events
    }
}

pub fn events(text: &str) -> Vec<Value> {
    text.split_terminator("\n\n")
        .map(|event| {
            let data = event
                .lines()
                .find_map(|line| line.strip_prefix("data: "))
                .unwrap_or_else(|| panic!("an event without data: {event:?}"));
            serde_json::from_str(data).unwrap_or_else(|_| Value::from(data))
        })
        .collect()
}

pub async fn get(address: SocketAddr, path: &str) -> Reply {
    send(address, &head("GET", path, &[], None), b"").await
}

pub async fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    post_bytes(address, path, body.to_string().as_bytes()).await
}

pub async fn post_bytes(address: SocketAddr, path: &str, body: &[u8]) -> Reply {
    send(address, &head("POST", path, &[], Some(body.len())), body).await
}

pub fn head(
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    content_length: Option<usize>,
) -> String {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    if let Some(length) = content_length {
        head += &format!("content-length: {length}\r\n");
    }
    head + "\r\n"
}

pub async fn send(address: SocketAddr, head: &str, body: &[u8]) -> Reply {
    let mut socket = open(address, head, body).await;
    read_reply(&mut socket).await
}

/// Sends a request and does not read the answer.
pub async fn open(address: SocketAddr, head: &str, body: &[u8]) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.expect("it listens");
    socket.write_all(head.as_bytes()).await.expect("it reads");
    socket.write_all(body).await.expect("it reads");
    socket
}

pub async fn open_post(address: SocketAddr, path: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let head = head("POST", path, &[], Some(body.len()));
    open(address, &head, body.as_bytes()).await
}

/// Reads until the stream contains `text`.
pub async fn read_until(socket: &mut TcpStream, text: &str) -> String {
    let mut bytes = Vec::new();
    let read = async {
        loop {
            let so_far = String::from_utf8_lossy(&bytes).into_owned();
            if so_far.contains(text) {
                return so_far;
            }
            let num_bytes = socket.read_buf(&mut bytes).await.expect("it answers");
            assert!(num_bytes > 0, "closed before {text:?}: {so_far}");
        }
    };
    tokio::time::timeout(PATIENCE, read)
        .await
        .expect("it answers in time")
}

pub async fn read_reply(socket: &mut TcpStream) -> Reply {
    let mut bytes = Vec::new();
    tokio::time::timeout(PATIENCE, socket.read_to_end(&mut bytes))
        .await
        .expect("it answers in time")
        .expect("it closes cleanly");
    parse(&bytes)
}

pub fn parse(bytes: &[u8]) -> Reply {
    let end = bytes
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .unwrap_or_else(|| panic!("no head: {:?}", String::from_utf8_lossy(bytes)));
    let head = String::from_utf8(bytes[..end].to_vec()).expect("heads are ASCII");
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .expect("a status");
    let mut reply = Reply {
        status,
        head,
        body: bytes[end + 4..].to_vec(),
        is_complete: true,
    };
    if reply.header("transfer-encoding") == Some("chunked") {
        (reply.body, reply.is_complete) = without_chunks(&reply.body);
    } else if let Some(length) = reply.header("content-length") {
        reply.is_complete = length.parse() == Ok(reply.body.len());
    }
    reply
}

fn without_chunks(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|window| window == b"\r\n") {
        let size = std::str::from_utf8(&rest[..end]).expect("a chunk size");
        let size = usize::from_str_radix(size, 16).expect("a chunk size");
        if size == 0 {
            return (body, true);
        }
        let start = end + 2;
        if rest.len() < start + size + 2 {
            break;
        }
        body.extend_from_slice(&rest[start..start + size]);
        rest = &rest[start + size + 2..];
    }
    (body, false)
}

/// Returns the named events of a stream with their data, which repeats the name.
pub fn named_events(reply: &Reply) -> Vec<(String, Value)> {
    assert!(reply.is_complete);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let data = events(reply.text());
    let names = reply
        .text()
        .lines()
        .filter_map(|line| line.strip_prefix("event: "));
    let events: Vec<_> = names.map(str::to_owned).zip(data.iter().cloned()).collect();
    assert_eq!(events.len(), data.len(), "an event without a name");
    for (name, data) in &events {
        assert_eq!(data["type"], name.as_str());
    }
    events
}
