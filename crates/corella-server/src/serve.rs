//! Accepts connections, bounds their number, and drains them on a signal.

pub mod listener;
pub mod loading;
mod preface_deadline;
pub mod shutdown;
mod write_deadline;

use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use corella_engine::{EngineState, rare_line};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout_at};

use crate::batch_run::run_batches;
use crate::config::tls::ServerTls;
use crate::http::grpc_router::grpc_router;
use crate::http::router::router;
use crate::model_set::driver::ModelSet;
use crate::serve::listener::{Connection, Listener};
use crate::serve::preface_deadline::PrefaceDeadline;
use crate::serve::shutdown::Shutdown;
use crate::serve::write_deadline::WriteDeadline;
use crate::state::server_parts::ServerParts;
use crate::state::use_count::{Count, Counted};

/// The outcome of a server's drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainReport {
    /// Number of requests that the drain timeout or a second signal ended. Their clients got an error that says so.
    pub num_cut_off: usize,
}

/// Larger than the headers of any client. Limits the memory of a request whose headers are incomplete.
const MAX_HEADER_BYTES: usize = 64 << 10;
/// Limits the connections of the gRPC port. Gateways keep a few, and each carries many calls.
pub const MAX_GRPC_CONNECTIONS: usize = 256;
/// Limits the calls in flight on a connection of HTTP/2.
const MAX_STREAMS: u32 = 256;
/// Limits the headers of a call. Calls of a connection wait for their bodies side by side.
const MAX_HEADER_LIST_BYTES: u32 = 16 << 10;
/// A silent connection of HTTP/2 is asked for a sign of life at this interval, and closed without an answer.
const PING_INTERVAL: Duration = Duration::from_secs(60);
/// The pause when a connection cannot be accepted, for example at the limit of open files.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// The time between two checks of the engine's state. The engine's thread cannot wake an async runtime.
const ENGINE_CHECK_PERIOD: Duration = Duration::from_millis(500);
/// Time for the last bytes of answers to be written.
const FLUSH_PERIOD: Duration = Duration::from_secs(5);

/// Serves until a shutdown is requested or the server has been idle for its limit. Then it refuses new requests, lets
/// running ones finish within the drain timeout, and returns. While they finish, it answers `/ready` and `/health`, on
/// new connections too, so that a load balancer can see that the server takes no requests. On an inherited socket, new
/// connections wait for the next server instead.
///
/// A lost engine never recovers, so it ends the server with an error, and the supervisor of the
/// process restarts it.
///
/// `grpc` is the listener of the gRPC port, if the server has one.
// Long: the order of the end, in which each step waits for the one before.
pub async fn serve(
    listener: impl Into<Listener>,
    grpc: Option<Listener>,
    models: ModelSet,
    mut shutdown: Shutdown,
) -> io::Result<DrainReport> {
    let listener = listener.into();
    let server = models.parts().clone();
    let limits = ConnectionLimits {
        header_timeout: server.config.header_timeout,
        write_timeout: server.config.write_timeout,
        max_num_connections: server.config.max_num_connections,
        keep_alive: true,
    };
    let tls = server.config.tls.clone();
    let newcomers = server.use_count.newcomers.clone();
    let grpc = grpc.map(|listener| {
        let router = grpc_router(models.clone());
        let limits = ConnectionLimits {
            max_num_connections: limits.max_num_connections.min(MAX_GRPC_CONNECTIONS),
            ..limits
        };
        let (tls, newcomers) = (tls.clone(), newcomers.clone());
        let connections =
            Connections::new(router, Protocol::http2(&limits), tls, &limits, newcomers);
        Port {
            listener,
            connections,
        }
    });
    let http = Port {
        listener,
        connections: Connections::new(
            router(models.clone()),
            Protocol::http1(&limits),
            tls,
            &limits,
            newcomers,
        ),
    };
    // Lines of batches count as requests in flight. Batches stop when serving ends for any reason.
    let mut runner = JoinSet::new();
    if let Ok(batches) = server.batches() {
        runner.spawn(run_batches(models.clone(), batches.clone()));
    }
    tokio::select! {
        // Connections come before idleness: a connection that is there already keeps the server from ending as idle.
        // They come after all else: with many at once, accepting takes the whole budget of each poll.
        biased;
        error = engine_lost(&models) => {
            // Watches of the health end, too.
            server.drain();
            // The streams have received their error; this gives clients the time to read it.
            close_all(http, grpc).await;
            return Err(error);
        }
        () = shutdown.requested() => {}
        error = accept_all(&http, grpc.as_ref()) => return Err(error),
        () = idle(&server) => {}
    }
    server.drain();
    for state in models.loaded() {
        state.engine.drain();
    }
    let deadline = Instant::now() + server.config.drain_timeout;
    tracing::info!(
        running = *server.num_in_flight.borrow(),
        drain_timeout_s = server.config.drain_timeout.as_secs(),
        "draining"
    );
    let mut num_in_flight = server.num_in_flight.subscribe();
    let accepts = !server.config.has_inherited_socket;
    tokio::select! {
        error = accept_all(&http, grpc.as_ref()), if accepts => return Err(error),
        _ = timeout_at(deadline, num_in_flight.wait_for(|&num| num == 0)) => {}
        () = shutdown.requested() => {}
    }
    // A lost engine also ends the requests in flight.
    let engine = models.only_engine_state();
    let num_cut_off = *server.num_in_flight.borrow();
    for state in models.loaded() {
        state.calls.cut_off();
    }
    close_all(http, grpc).await;
    // Gives batches the time to write their last answers.
    let _ = timeout_at(Instant::now() + FLUSH_PERIOD, runner.join_next()).await;
    match engine {
        Some(EngineState::Lost(reason)) => Err(stopped(&reason)),
        _ => Ok(DrainReport { num_cut_off }),
    }
}

/// A listening socket and its connections.
struct Port {
    listener: Listener,
    connections: Connections,
}

impl Port {
    async fn accept(&self) -> io::Error {
        self.connections.accept_from(&self.listener).await
    }

    async fn close(self) {
        drop(self.listener);
        self.connections.close().await;
    }
}

async fn accept_all(http: &Port, grpc: Option<&Port>) -> io::Error {
    let Some(grpc) = grpc else {
        return http.accept().await;
    };
    tokio::select! {
        error = http.accept() => error,
        error = grpc.accept() => error,
    }
}

async fn close_all(http: Port, grpc: Option<Port>) {
    let grpc = async {
        if let Some(grpc) = grpc {
            grpc.close().await;
        }
    };
    tokio::join!(http.close(), grpc);
}

/// Waits until the engine of the only model has stopped, and returns why. Among several models, a lost engine ends only
/// the requests of its own.
async fn engine_lost(models: &ModelSet) -> io::Error {
    let is_only = !models.has_several();
    loop {
        match models.only_engine_state() {
            Some(EngineState::Lost(reason)) => return stopped(&reason),
            _ if is_only => {}
            _ => models.note_lost_engines(),
        }
        sleep(ENGINE_CHECK_PERIOD).await;
    }
}

/// Waits until the server has been idle for its limit; forever without a limit.
async fn idle(server: &ServerParts) {
    match server.config.exit_when_idle {
        Some(limit) => {
            server.use_count.unused_for(limit).await;
            tracing::info!(
                idle_s = limit.as_secs_f32(),
                "no request came, so the server ends"
            );
        }
        None => std::future::pending().await,
    }
}

fn stopped(reason: &str) -> io::Error {
    io::Error::other(format!("the engine has stopped: {reason}"))
}

/// Limits on the connections of clients.
pub struct ConnectionLimits {
    pub header_timeout: Duration,
    pub write_timeout: Duration,
    pub max_num_connections: usize,
    /// Whether a connection may carry several requests.
    pub keep_alive: bool,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            header_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            max_num_connections: 16_384,
            keep_alive: true,
        }
    }
}

/// The version of HTTP that a port speaks.
#[derive(Clone)]
pub enum Protocol {
    Http1(http1::Builder),
    Http2 {
        http: http2::Builder<TokioExecutor>,
        preface_timeout: Duration,
    },
}

impl Protocol {
    pub fn http1(limits: &ConnectionLimits) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(limits.header_timeout)
            .keep_alive(limits.keep_alive)
            .max_header_size(MAX_HEADER_BYTES);
        Self::Http1(http)
    }

    pub fn http2(limits: &ConnectionLimits) -> Self {
        let mut http = http2::Builder::new(TokioExecutor::new());
        http.timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADER_LIST_BYTES)
            .keep_alive_interval(PING_INTERVAL);
        Self::Http2 {
            http,
            preface_timeout: limits.header_timeout,
        }
    }

    fn is_http2(&self) -> bool {
        matches!(self, Self::Http2 { .. })
    }
}

pub struct Connections {
    router: Router,
    protocol: Protocol,
    tls: Option<ServerTls>,
    write_timeout: Duration,
    max_num_connections: u32,
    permits: Arc<Semaphore>,
    phase: watch::Sender<Phase>,
    /// Counts the connections whose first request has no answer yet.
    newcomers: Count,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Open,
    /// Connections end after their current request.
    Closing,
    Closed,
}

impl Connections {
    pub fn new(
        router: Router,
        protocol: Protocol,
        tls: Option<ServerTls>,
        limits: &ConnectionLimits,
        newcomers: Count,
    ) -> Self {
        let max_num_connections = u32::try_from(limits.max_num_connections)
            .unwrap_or(u32::MAX)
            .min((Semaphore::MAX_PERMITS >> 1) as u32);
        Self {
            router,
            protocol,
            tls,
            write_timeout: limits.write_timeout,
            max_num_connections,
            permits: Arc::new(Semaphore::new(max_num_connections as usize)),
            phase: watch::Sender::new(Phase::Open),
            newcomers,
        }
    }

    /// Accepts connections, and tries again after an error. Returns only if the permits are closed.
    pub async fn accept_from(&self, listener: &Listener) -> io::Error {
        loop {
            // At the limit, new connections wait in the kernel's bounded backlog.
            let Ok(permit) = self.permits.clone().acquire_owned().await else {
                return io::Error::other("the server is closed");
            };
            match listener.accept().await {
                Ok(stream) => self.spawn(stream, permit),
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    rare_line!(warn, %error, "cannot accept connections");
                    sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    fn spawn(&self, stream: Connection, permit: OwnedSemaphorePermit) {
        // Every token is a small write, which must not wait for the next one.
        if let Connection::Tcp(stream) = &stream
            && let Err(error) = stream.set_nodelay(true)
        {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        let (router, protocol, tls) =
            (self.router.clone(), self.protocol.clone(), self.tls.clone());
        let write_timeout = self.write_timeout;
        let newcomer = self.newcomers.begin();
        let mut phase = self.phase.subscribe();
        tokio::spawn(async move {
            let _permit = permit;
            let (stream, tls) = match (stream, tls) {
                (Connection::Tcp(stream), Some(tls)) => (stream, tls),
                (stream, _) => {
                    let stream = WriteDeadline::new(stream, write_timeout);
                    return answer(stream, &protocol, router, phase, newcomer).await;
                }
            };
            // When the server closes, a client without a finished handshake is dropped at once.
            let secured = tokio::select! {
                secured = tls.accept(stream, protocol.is_http2()) => secured,
                _ = phase.changed() => return,
            };
            match secured {
                Ok(stream) => {
                    let stream = WriteDeadline::new(stream, write_timeout);
                    answer(stream, &protocol, router, phase, newcomer).await;
                }
                Err(error) => tracing::debug!(%error, "a client's TLS handshake has failed"),
            }
        });
    }

    /// Closes every connection, after a moment to write its last bytes: the end of an answer, or the error of a request
    /// that was cut off.
    pub async fn close(self) {
        self.phase.send_replace(Phase::Closing);
        let all = self.permits.acquire_many(self.max_num_connections);
        if timeout_at(Instant::now() + FLUSH_PERIOD, all).await.is_ok() {
            return;
        }
        self.phase.send_replace(Phase::Closed);
        let all = self.permits.acquire_many(self.max_num_connections);
        // Dropping a connection takes no time unless the runtime is starved.
        let _ = timeout_at(Instant::now() + FLUSH_PERIOD, all).await;
    }
}

/// Answers the requests of one connection until the connection or the server ends.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    protocol: &Protocol,
    router: Router,
    phase: watch::Receiver<Phase>,
    newcomer: Counted,
) {
    let newcomer = Mutex::new(Some(newcomer));
    let service = TowerToHyperService::new(router);
    // Connections take turns: one with thousands of requests that have arrived already would answer many of these
    // before another connection gets its turn.
    let service = service_fn(move |request: Request<Incoming>| {
        let answer = service.call(request);
        let first = { newcomer.lock() }
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        async move {
            yield_now().await;
            let answer = answer.await;
            drop(first);
            answer
        }
    });
    match protocol {
        Protocol::Http1(http) => {
            let connection = http.serve_connection(TokioIo::new(stream), service);
            run(pin!(connection), phase, |http| http.graceful_shutdown()).await;
        }
        Protocol::Http2 {
            http,
            preface_timeout,
        } => {
            let stream = PrefaceDeadline::new(stream, *preface_timeout);
            let connection = http.serve_connection(TokioIo::new(stream), service);
            run(pin!(connection), phase, |http| http.graceful_shutdown()).await;
        }
    }
}

/// Runs a connection until it or the server ends. `end_gracefully` lets it end after its current requests.
async fn run<C: Future<Output = hyper::Result<()>>>(
    mut connection: Pin<&mut C>,
    mut phase: watch::Receiver<Phase>,
    end_gracefully: impl Fn(Pin<&mut C>),
) {
    loop {
        tokio::select! {
            result = &mut connection => {
                if let Err(error) = result {
                    tracing::debug!(%error, "connection ended");
                }
                return;
            }
            changed = phase.changed() => {
                let now = *phase.borrow_and_update();
                if changed.is_err() || now == Phase::Closed {
                    return;
                }
                end_gracefully(connection.as_mut());
            }
        }
    }
}

fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::Mutex;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    /// A connection whose requests have all arrived does not delay the requests of another connection.
    #[tokio::test]
    async fn connections_take_turns() {
        const NUM_REQUESTS: usize = 50;
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut clients = Vec::new();
        for name in ["a", "b"] {
            let order = order.clone();
            let handler = move || {
                order.lock().expect("no panic").push(name);
                ready(())
            };
            let router = Router::new().route("/", get(handler));
            let (ours, mut theirs) = duplex(1 << 16);
            let request = "GET / HTTP/1.1\r\nhost: test\r\n";
            let requests = format!("{request}\r\n").repeat(NUM_REQUESTS - 1);
            let requests = format!("{requests}{request}connection: close\r\n\r\n");
            theirs.write_all(requests.as_bytes()).await.expect("room");
            let phase = watch::Sender::new(Phase::Open);
            clients.push(tokio::spawn(async move {
                let http = Protocol::Http1(http1::Builder::new());
                let mut answers = Vec::new();
                let (_, read) = tokio::join!(
                    answer(
                        ours,
                        &http,
                        router,
                        phase.subscribe(),
                        Count::default().begin()
                    ),
                    theirs.read_to_end(&mut answers),
                );
                read.expect("it is open");
            }));
        }
        for client in clients {
            client.await.expect("no panic");
        }
        let order = order.lock().expect("no panic");
        assert_eq!(order.len(), 2 * NUM_REQUESTS);
        for pair in order.chunks(2) {
            assert_ne!(pair[0], pair[1], "{order:?}");
        }
    }
}
