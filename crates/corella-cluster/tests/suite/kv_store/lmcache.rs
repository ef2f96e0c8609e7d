//! A stand-in for LMCache's server, version 0.5.6. It answers as the real one did when it was asked, reads and writes the
//! messages by itself, and counts the locks that it was not asked to release.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// Tokens of a chunk.
pub const CHUNK: usize = 8;
const POOL_BYTES: u64 = 4 << 20;

pub struct FakeServer {
    pub port: u16,
    pub status_port: u16,
    state: Arc<Mutex<State>>,
    is_down: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

struct State {
    pool_name: String,
    pool: File,
    num_allocated: u64,
    /// The name and the bytes of a chunk, by instance.
    registered: HashMap<i64, (String, u64)>,
    chunks: HashMap<ChunkName, Chunk>,
    /// Reserved chunks, and chunks that are read, by instance, name, start and end.
    writes: HashMap<Call, Vec<(ChunkName, Chunk)>>,
    reads: HashMap<Call, Vec<ChunkName>>,
    /// The number of chunks that a look-up has found, by session.
    found: HashMap<String, usize>,
    sessions: HashSet<String>,
    /// Whether chunks disappear between the look-up and the read.
    evicts: bool,
    num_lookups: usize,
}

/// The model's name, and all tokens up to the chunk's end.
type ChunkName = (String, Vec<u64>);
type Call = (i64, String, Vec<u64>, u64, u64);

#[derive(Clone, Copy)]
struct Chunk {
    offset: u64,
    num_bytes: u64,
    num_locks: i64,
}

impl FakeServer {
    pub async fn start(version: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let status = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let status_port = status.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State::new(port)));
        let is_down = watch::Sender::new(false);
        let tasks = vec![
            tokio::spawn(serve_grpc(listener, state.clone(), is_down.subscribe())),
            tokio::spawn(serve_status(status, version, is_down.subscribe())),
        ];
        Self {
            port,
            status_port,
            state,
            is_down,
            tasks,
        }
    }

    /// Ends all connections, and closes further ones at once. The ports stay taken, so that no other test gets them.
    pub fn stop(&self) {
        self.is_down.send_replace(true);
    }

    /// Takes connections again, without chunks and registrations, and with new memory by the same name. The old memory
    /// stays for processes that have opened it.
    pub fn start_again(&self) {
        *self.lock() = State::new(self.port);
        self.is_down.send_replace(false);
    }

    pub fn num_chunks(&self) -> usize {
        self.lock().chunks.len()
    }

    pub fn num_lookups(&self) -> usize {
        self.lock().num_lookups
    }

    /// The locks, reservations, reads and sessions that the clients have not ended.
    pub fn num_open(&self) -> i64 {
        let state = self.lock();
        let num_locks: i64 = state.chunks.values().map(|chunk| chunk.num_locks).sum();
        let num_uses = state.writes.len() + state.reads.len() + state.sessions.len();
        num_locks + num_uses as i64
    }

    pub fn evict_after_lookups(&self) {
        self.lock().evicts = true;
    }

    /// Changes a byte of each chunk, at `at` from its end.
    pub fn damage(&self, at: u64) {
        let state = self.lock();
        for chunk in state.chunks.values() {
            let at = chunk.offset + chunk.num_bytes - at;
            let mut byte = [0];
            state.pool.read_exact_at(&mut byte, at).unwrap();
            state.pool.write_all_at(&[byte[0] ^ 1], at).unwrap();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        let _ = fs::remove_file(pool_path(&self.lock().pool_name));
    }
}

fn pool_path(name: &str) -> PathBuf {
    PathBuf::from("/dev/shm").join(name)
}

async fn serve_status(
    listener: TcpListener,
    version: &'static str,
    is_down: watch::Receiver<bool>,
) {
    while let Ok((mut stream, _)) = listener.accept().await {
        if *is_down.borrow() {
            continue;
        }
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n")
            && stream.read_buf(&mut request).await.unwrap_or(0) > 0
        {}
        assert!(request.starts_with(b"GET /lmc_version HTTP/1.1\r\n"));
        let len = version.len() + 2;
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n\r\n\"{version}\""
        );
        let _ = stream.write_all(answer.as_bytes()).await;
    }
}

async fn serve_grpc(
    listener: TcpListener,
    state: Arc<Mutex<State>>,
    is_down: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        if *is_down.borrow() {
            continue;
        }
        let state = state.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let state = state.clone();
            async move {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect().await?.to_bytes();
                let message = &body[5..];
                let head = [&[0][..], &(message.len() as u32).to_be_bytes()].concat();
                assert_eq!(body[..5], head[..]);
                let answer = state.lock().unwrap().call(&path, message);
                Ok::<_, hyper::Error>(grpc_answer(answer))
            }
        });
        let mut is_down = is_down.clone();
        connections.spawn(async move {
            let server = http2::Builder::new(TokioExecutor::new());
            tokio::select! {
                _ = server.serve_connection(TokioIo::new(stream), service) => {}
                _ = is_down.wait_for(|is_down| *is_down) => {}
            }
        });
    }
}

type Frames = tokio_stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>;

fn grpc_answer(answer: Result<Vec<u8>, &'static str>) -> Response<StreamBody<Frames>> {
    let mut trailers = HeaderMap::new();
    let mut frames = Vec::new();
    match answer {
        Ok(message) => {
            let head = [&[0][..], &(message.len() as u32).to_be_bytes()].concat();
            frames.push(Ok(Frame::data(Bytes::from([head, message].concat()))));
            trailers.insert("grpc-status", HeaderValue::from_static("0"));
        }
        Err(why) => {
            trailers.insert("grpc-status", HeaderValue::from_static("2"));
            trailers.insert("grpc-message", HeaderValue::from_static(why));
        }
    }
    frames.push(Ok(Frame::trailers(trailers)));
    let mut response = Response::new(StreamBody::new(tokio_stream::iter(frames)));
    let grpc = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(CONTENT_TYPE, grpc);
    response
}

const UNREGISTERED: &str = "non-GPU context not registered (or reaped)";

impl State {
    fn new(port: u16) -> Self {
        let pool_name = format!("corella-fake-lmcache-{}-{port}", std::process::id());
        let path = pool_path(&pool_name);
        let _ = fs::remove_file(&path);
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        let pool = options.open(&path).unwrap();
        pool.set_len(POOL_BYTES).unwrap();
        Self {
            pool_name,
            pool,
            num_allocated: 0,
            registered: HashMap::new(),
            chunks: HashMap::new(),
            writes: HashMap::new(),
            reads: HashMap::new(),
            found: HashMap::new(),
            sessions: HashSet::new(),
            evicts: false,
            num_lookups: 0,
        }
    }

    fn call(&mut self, path: &str, message: &[u8]) -> Result<Vec<u8>, &'static str> {
        let fields = Fields::read(message);
        match path.strip_prefix("/lmcache.mp.").unwrap() {
            "ControllerService/GetChunkSize" => Ok(number(1, CHUNK as u64)),
            "EngineDrivenService/RegisterKvCacheEngineDrivenContext" => {
                let num_bytes = fields.number(5) * fields.number(6) * fields.number(9);
                let facts = (fields.text(7), fields.number(8), fields.number(3));
                assert_eq!(facts, ("uint8".to_owned(), 1, 1));
                let registered = (fields.text(2), num_bytes);
                self.registered.insert(fields.number(1) as i64, registered);
                Ok([text(1, self.pool_name.as_bytes()), number(2, POOL_BYTES)].concat())
            }
            "EngineDrivenService/PrepareStore" => self.prepare_store(&fields),
            "EngineDrivenService/CommitStore" => {
                let reserved = self.writes.remove(&fields.call());
                self.chunks.extend(reserved.iter().flatten().cloned());
                Ok(number(1, reserved.is_some().into()))
            }
            "EngineDrivenService/PrepareRetrieve" => self.prepare_retrieve(&fields),
            "EngineDrivenService/CommitRetrieve" => {
                let names = self.reads.remove(&fields.call());
                self.unlock(&names.unwrap_or_default());
                Ok(number(1, 1))
            }
            "LookupService/Lookup" => {
                self.look_up(&fields);
                Ok(Vec::new())
            }
            "LookupService/WaitPrefetchStatus" => {
                let found = self.found.get(&fields.text(1)).copied();
                Ok(number(1, found.unwrap_or(0) as u64))
            }
            "LookupService/FreeLookupLocks" => {
                let key = Key::read(&fields);
                let num_found = self.found.get(&key.session).copied().unwrap_or(0);
                let names = key.names().into_iter();
                let in_range = names.filter(|(_, tokens)| tokens.len() <= num_found * CHUNK);
                self.unlock(&in_range.collect::<Vec<_>>());
                Ok(Vec::new())
            }
            "LookupService/EndSession" => {
                self.sessions.remove(&fields.text(1));
                self.found.remove(&fields.text(1));
                Ok(Vec::new())
            }
            other => panic!("{other} is not called"),
        }
    }

    fn look_up(&mut self, fields: &Fields) {
        let key = Key::read(fields);
        assert_eq!((key.num_readers, key.has_worker, key.start), (1, false, 0));
        self.num_lookups += 1;
        self.sessions.insert(key.session.clone());
        let mut registered = self.registered.values();
        let is_known = registered.any(|(name, _)| *name == key.model);
        let names = key.names();
        let found = names
            .iter()
            .take_while(|&name| is_known && self.chunks.contains_key(name));
        let num_found = found.count();
        for name in &names[..num_found] {
            self.chunks.get_mut(name).unwrap().num_locks += 1;
        }
        self.found.insert(key.session, num_found);
        if self.evicts {
            self.chunks.clear();
        }
    }

    fn prepare_store(&mut self, fields: &Fields) -> Result<Vec<u8>, &'static str> {
        let key = Key::read(fields);
        let registered = self.registered.get(&(fields.number(2) as i64));
        let (_, num_bytes) = *registered.as_ref().ok_or(UNREGISTERED)?;
        self.sessions.insert(key.session.clone());
        let num_bytes = *num_bytes;
        let missing = key
            .names()
            .into_iter()
            .filter(|name| !self.chunks.contains_key(name));
        let mut reserved = Vec::new();
        for name in missing.collect::<Vec<_>>() {
            let offset = self.num_allocated;
            self.num_allocated += num_bytes.next_multiple_of(4096);
            assert!(self.num_allocated <= POOL_BYTES);
            let num_locks = 0;
            reserved.push((
                name,
                Chunk {
                    offset,
                    num_bytes,
                    num_locks,
                },
            ));
        }
        let chunks: Vec<_> = reserved.iter().map(|(_, chunk)| *chunk).collect();
        if !reserved.is_empty() {
            self.writes.insert(fields.call(), reserved);
        }
        Ok(text(1, &slots(&chunks)))
    }

    fn prepare_retrieve(&mut self, fields: &Fields) -> Result<Vec<u8>, &'static str> {
        let key = Key::read(fields);
        let instance = fields.number(2) as i64;
        if !self.registered.contains_key(&instance) {
            return Err(UNREGISTERED);
        }
        let names = key.names();
        let chunks: Vec<_> = names
            .iter()
            .filter_map(|name| self.chunks.get(name))
            .collect();
        if chunks.len() < names.len() || chunks.iter().any(|chunk| chunk.num_locks == 0) {
            return Ok(Vec::new());
        }
        let chunks: Vec<_> = chunks.into_iter().copied().collect();
        let overtaken = self.reads.insert(fields.call(), names);
        assert!(overtaken.is_none(), "the locks of an earlier read are lost");
        Ok([number(1, 1), text(3, &slots(&chunks))].concat())
    }

    fn unlock(&mut self, names: &[ChunkName]) {
        for name in names {
            if let Some(chunk) = self.chunks.get_mut(name) {
                chunk.num_locks -= 1;
            }
        }
    }
}

struct Key {
    model: String,
    has_worker: bool,
    tokens: Vec<u64>,
    start: u64,
    end: u64,
    session: String,
    num_readers: u64,
}

impl Key {
    fn read(fields: &Fields) -> Self {
        let fields = Fields::read(fields.bytes(1));
        Self {
            model: fields.text(1),
            has_worker: fields.has(3),
            tokens: varints(fields.bytes(4)),
            start: fields.number(5),
            end: fields.number(6),
            session: fields.text(7),
            num_readers: fields.number(10),
        }
    }

    fn names(&self) -> Vec<ChunkName> {
        let (start, end) = (self.start as usize, self.end as usize);
        assert!(start.is_multiple_of(CHUNK) && end.is_multiple_of(CHUNK));
        assert!(start < end && end <= self.tokens.len());
        let ends = (start + CHUNK..=end).step_by(CHUNK);
        ends.map(|end| (self.model.clone(), self.tokens[..end].to_vec()))
            .collect()
    }
}

/// A list of slots in MessagePack.
fn slots(chunks: &[Chunk]) -> Vec<u8> {
    let mut bytes = b"\x82\xa5slots".to_vec();
    bytes.push(0x90 | u8::try_from(chunks.len()).unwrap());
    for chunk in chunks {
        bytes.extend(b"\x84\xa6offset\xce");
        bytes.extend((chunk.offset as u32).to_be_bytes());
        bytes.extend(b"\xa6length\xce");
        bytes.extend((chunk.num_bytes as u32).to_be_bytes());
        bytes.extend(b"\xa5shape\x93\x01\x01\xce");
        bytes.extend((chunk.num_bytes as u32).to_be_bytes());
        bytes.extend(b"\xa5dtype\xa5uint8");
    }
    bytes.extend(b"\xadchunk_indices\x90");
    bytes
}

/// The fields of a message in protocol buffers.
struct Fields(Vec<(u64, Field)>);

enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

impl Fields {
    fn read(mut bytes: &[u8]) -> Self {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let tag = varint(&mut bytes);
            let field = match tag & 7 {
                0 => Field::Number(varint(&mut bytes)),
                1 => Field::Bytes(bytes.split_off(..8).unwrap().to_vec()),
                2 => {
                    let len = varint(&mut bytes) as usize;
                    Field::Bytes(bytes.split_off(..len).unwrap().to_vec())
                }
                kind => panic!("no wire type {kind}"),
            };
            fields.push((tag >> 3, field));
        }
        Self(fields)
    }

    fn get(&self, tag: u64) -> Option<&Field> {
        let field = self.0.iter().find(|(at, _)| *at == tag);
        field.map(|(_, field)| field)
    }

    fn has(&self, tag: u64) -> bool {
        self.get(tag).is_some()
    }

    fn number(&self, tag: u64) -> u64 {
        match self.get(tag) {
            Some(Field::Number(number)) => *number,
            _ => 0,
        }
    }

    fn bytes(&self, tag: u64) -> &[u8] {
        match self.get(tag) {
            Some(Field::Bytes(bytes)) => bytes,
            _ => &[],
        }
    }

    fn text(&self, tag: u64) -> String {
        String::from_utf8(self.bytes(tag).to_vec()).unwrap()
    }

    /// The key under which a call for chunks is stored until the call that ends it. The session is not part of the key.
    fn call(&self) -> Call {
        let key = Key::read(self);
        (
            self.number(2) as i64,
            key.model,
            key.tokens,
            key.start,
            key.end,
        )
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut number = 0;
    for shift in (0..).step_by(7) {
        let byte = *bytes.split_off_first().unwrap();
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    number
}

fn varints(mut bytes: &[u8]) -> Vec<u64> {
    let mut numbers = Vec::new();
    while !bytes.is_empty() {
        numbers.push(varint(&mut bytes));
    }
    numbers
}

fn put_varint(mut number: u64, bytes: &mut Vec<u8>) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn number(tag: u64, number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_varint(tag << 3, &mut bytes);
    put_varint(number, &mut bytes);
    bytes
}

fn text(tag: u64, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_varint(tag << 3 | 2, &mut bytes);
    put_varint(content.len() as u64, &mut bytes);
    bytes.extend(content);
    bytes
}
