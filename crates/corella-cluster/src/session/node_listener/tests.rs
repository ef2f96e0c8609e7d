//! Connections whose other end is slow to begin, in virtual time.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tokio_stream::StreamExt;

use super::*;

const HOUR: Duration = Duration::from_hours(1);

async fn listener(max_num_connections: usize) -> (NodeListener, std::net::SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let listener = NodeListener {
        max_num_connections,
        ..NodeListener::new(listener)
    };
    (listener, address)
}

/// A byte is missing.
#[tokio::test(start_paused = true)]
async fn a_connection_that_does_not_begin_is_closed() {
    let (listener, address) = listener(8).await;
    let mut connections = listener.connections();
    let mut peer = TcpStream::connect(address).await.unwrap();
    peer.write_all(&[b'x'; OPENING_BYTES - 1]).await.unwrap();
    let mut accepted = connections.next().await.unwrap().unwrap();
    let mut bytes = Vec::new();
    let error = accepted.read_to_end(&mut bytes).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(bytes.len() < OPENING_BYTES);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_has_begun_may_be_silent() {
    let (listener, address) = listener(8).await;
    let mut connections = listener.connections();
    let mut peer = TcpStream::connect(address).await.unwrap();
    peer.write_all(&[b'x'; OPENING_BYTES]).await.unwrap();
    let mut accepted = connections.next().await.unwrap().unwrap();
    let mut bytes = [0; OPENING_BYTES];
    accepted.read_exact(&mut bytes).await.unwrap();
    tokio::select! {
        read = accepted.read_u8() => panic!("{read:?}"),
        () = sleep(HOUR) => {}
    }
    peer.write_u8(7).await.unwrap();
    assert_eq!(accepted.read_u8().await.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn further_connections_wait_until_one_ends() {
    let (listener, address) = listener(2).await;
    let mut connections = listener.connections();
    let _peers = [
        TcpStream::connect(address).await.unwrap(),
        TcpStream::connect(address).await.unwrap(),
        TcpStream::connect(address).await.unwrap(),
    ];
    let first = connections.next().await.unwrap().unwrap();
    let _second = connections.next().await.unwrap().unwrap();
    tokio::select! {
        _ = connections.next() => panic!("there is no room for a third"),
        () = sleep(HOUR) => {}
    }
    drop(first);
    connections.next().await.unwrap().unwrap();
}
