//! A peer that sends frames chosen by the test.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use corella_cluster::transport::{
    FRAME_BYTES, Frame, Hello, LoadFrame, PageRun, TRAILER_BYTES, Trailer,
};
use corella_core::session::SessionKey;
use corella_model::{KvGeometry, PageForm};

use crate::transport::fixture::{ARITHMETIC, DECODE, HOUR, MODEL, PREFILL, READ_TIMEOUT, loopback};

pub struct RawPeer {
    pub stream: TcpStream,
}

impl RawPeer {
    /// Connects as a receiver and exchanges greetings.
    pub fn connect(address: SocketAddr, geometry: &KvGeometry) -> Self {
        Self::connect_as(Hello::new(DECODE, MODEL, ARITHMETIC, geometry), address)
    }

    pub fn connect_as(hello: Hello, address: SocketAddr) -> Self {
        let mut peer = Self::connect_silently(address);
        peer.send(&Frame::Hello(hello));
        assert!(
            matches!(peer.receive(), Some(Frame::Hello(hello)) if hello.incarnation == PREFILL)
        );
        peer
    }

    pub fn connect_silently(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        Self { stream }
    }

    pub fn send(&mut self, frame: &Frame) {
        self.stream.write_all(&frame.encode()).unwrap();
    }

    /// Returns `None` when the other side has closed the connection.
    pub fn receive(&mut self) -> Option<Frame> {
        let mut bytes = [0; FRAME_BYTES];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => Some(Frame::decode(&bytes).unwrap()),
            Err(error) => {
                let kind = error.kind();
                assert!(kind != std::io::ErrorKind::WouldBlock, "nothing comes");
                None
            }
        }
    }

    pub fn load(&mut self, load_id: u64, key: &SessionKey, num_rows: u32, credit_bytes: u32) {
        self.send(&Frame::Load(LoadFrame {
            load_id,
            key: *key,
            first_row: 0,
            num_rows,
            credit_bytes,
            wait_ms: HOUR.as_millis() as u32,
        }));
    }

    pub fn payload(&mut self, run: &PageRun, geometry: &KvGeometry) -> (Vec<u8>, Trailer) {
        let num_pages = run.num_rows.div_ceil(geometry.page_size) as usize;
        let mut bytes = vec![0; num_pages * geometry.layer_bytes()];
        self.stream.read_exact(&mut bytes).unwrap();
        let mut trailer = [0; TRAILER_BYTES];
        self.stream.read_exact(&mut trailer).unwrap();
        (bytes, Trailer::decode(&trailer).unwrap())
    }

    pub fn send_run(&mut self, run: PageRun, bytes: &[u8], checksum: u64) {
        self.send(&Frame::Data(run));
        self.stream.write_all(bytes).unwrap();
        self.stream
            .write_all(&Trailer::Whole { checksum }.encode())
            .unwrap();
    }
}

/// Accepts receivers like a sender.
pub struct RawListener {
    listener: TcpListener,
    pub address: SocketAddr,
}

impl RawListener {
    pub fn new() -> Self {
        let listener = TcpListener::bind(loopback(0)).unwrap();
        let address = listener.local_addr().unwrap();
        Self { listener, address }
    }

    /// Accepts a receiver and exchanges greetings.
    pub fn accept(&self, geometry: &KvGeometry) -> RawPeer {
        self.accept_as(Hello::new(PREFILL, MODEL, ARITHMETIC, geometry))
    }

    pub fn accept_as(&self, hello: Hello) -> RawPeer {
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        let mut peer = RawPeer { stream };
        assert!(matches!(peer.receive(), Some(Frame::Hello(hello)) if hello.incarnation == DECODE));
        peer.send(&Frame::Hello(hello));
        peer
    }
}

pub fn run(load_id: u64, layer: u32, first_row: u32, num_rows: u32) -> PageRun {
    PageRun {
        load_id,
        layer,
        first_row,
        num_rows,
        form: PageForm::Native,
        num_regions: 0,
    }
}
