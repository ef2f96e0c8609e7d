//! Connections whose other end is slow to begin.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::{Stream, StreamExt};

use super::*;

async fn listener() -> (NodeListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (NodeListener::new(listener), address)
}

async fn next(
    connections: &mut (impl Stream<Item = io::Result<NodeStream>> + Unpin),
) -> NodeStream {
    connections.next().await.unwrap().unwrap()
}

/// One byte of the opening is missing.
#[tokio::test]
async fn a_connection_that_does_not_begin_is_closed() {
    let (mut listener, address) = listener().await;
    listener.opening_timeout = Duration::ZERO;
    let mut connections = listener.connections();
    let mut peer = TcpStream::connect(address).await.unwrap();
    peer.write_all(&[b'x'; OPENING_BYTES - 1]).await.unwrap();
    let mut accepted = next(&mut connections).await;
    let error = accepted.read_to_end(&mut Vec::new()).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[tokio::test]
async fn a_connection_that_has_begun_may_be_silent() {
    let (listener, address) = listener().await;
    let mut connections = listener.connections();
    let mut peer = TcpStream::connect(address).await.unwrap();
    let mut accepted = next(&mut connections).await;
    for num_bytes in [1, OPENING_BYTES - 1] {
        assert!(accepted.opening.is_some());
        peer.write_all(&vec![b'x'; num_bytes]).await.unwrap();
        accepted.read_exact(&mut vec![0; num_bytes]).await.unwrap();
    }
    assert!(accepted.opening.is_none());
}

#[tokio::test]
async fn further_connections_wait_until_one_ends() {
    let (mut listener, address) = listener().await;
    listener.max_num_connections = 2;
    let mut connections = listener.connections();
    let _peers = [
        TcpStream::connect(address).await.unwrap(),
        TcpStream::connect(address).await.unwrap(),
        TcpStream::connect(address).await.unwrap(),
    ];
    let first = next(&mut connections).await;
    let _second = next(&mut connections).await;
    // The runtime has one thread and polls its sockets every 61 turns. After 1000 turns, a third connection would
    // have arrived.
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    tokio::select! {
        biased;
        _ = connections.next() => panic!("there is no room for a third"),
        () = std::future::ready(()) => {}
    }
    drop(first);
    next(&mut connections).await;
}

/// An address whose connections are all in use does not keep other addresses out. The address may connect again when
/// one of its connections ends.
#[tokio::test]
async fn connections_are_bounded_by_address() {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut listener = NodeListener::new(listener);
    listener.max_per_address = 1;
    let mut connections = listener.connections();
    let connect = async |address: &str| {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket
            .bind(format!("{address}:0").parse().unwrap())
            .unwrap();
        let server = format!("127.0.0.1:{port}").parse().unwrap();
        socket.connect(server).await.unwrap()
    };
    let _first_peer = connect("127.0.0.2").await;
    let first = next(&mut connections).await;
    let mut second_peer = connect("127.0.0.2").await;
    let _other_peer = connect("127.0.0.3").await;
    let _other = next(&mut connections).await;
    let closed = second_peer.read(&mut [0]).await;
    assert!(matches!(closed, Ok(0) | Err(_)), "it is closed");
    drop(first);
    let _third_peer = connect("127.0.0.2").await;
    next(&mut connections).await;
}
