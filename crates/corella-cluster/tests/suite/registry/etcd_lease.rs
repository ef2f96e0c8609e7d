//! The state of a node key's lease, as etcd reports it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use corella_test::wait_until_async;
use serde_json::{Value, json};

/// Waits until the lease of a node's key has been renewed: its time to live falls second by second, and rises with a
/// renewal.
pub async fn until_renewed(etcd: SocketAddr, instance_id: &str) {
    let mut stream = BufReader::new(TcpStream::connect(etcd).unwrap());
    let key = BASE64.encode(format!("/test/nodes/{instance_id}"));
    let mut least = None;
    wait_until_async("the lease is renewed", || {
        let found = ask(&mut stream, "/v3/kv/range", &json!({ "key": key }));
        // A node that registers again has another lease.
        let Some(lease_id) = found["kvs"][0]["lease"].as_str() else {
            return false;
        };
        let query = json!({ "ID": lease_id });
        let lease = ask(&mut stream, "/v3/lease/timetolive", &query);
        // 64-bit numbers are strings in etcd's JSON.
        let left_s: i64 = lease["TTL"].as_str().unwrap_or("0").parse().unwrap();
        match &mut least {
            Some((known_id, least_s)) if known_id == lease_id => {
                let is_renewed = left_s > *least_s;
                *least_s = left_s.min(*least_s);
                is_renewed
            }
            _ => {
                least = Some((lease_id.to_owned(), left_s));
                false
            }
        }
    })
    .await;
}

fn ask(stream: &mut BufReader<TcpStream>, path: &str, body: &Value) -> Value {
    let body = body.to_string();
    let length = body.len();
    let head = "Host: etcd\r\nContent-Type: application/json";
    let request =
        format!("POST {path} HTTP/1.1\r\n{head}\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.get_mut().write_all(request.as_bytes()).unwrap();
    let mut length = None;
    for line in stream.lines() {
        let line = line.unwrap().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        length = line
            .strip_prefix("content-length: ")
            .map_or(length, |it| it.parse().ok());
    }
    let mut answer = vec![0; length.expect("an answer with a length")];
    stream.read_exact(&mut answer).unwrap();
    serde_json::from_slice(&answer).unwrap()
}
