//! The gRPC server: one bidirectional stream for each session, and the standard health service.
//!
//! The service is written by hand: it has one method, and building Corella should need no generator.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use corella_engine::{TraceContext, TraceScope, Tracer};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::metadata::AsciiMetadataValue;
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::health::HealthService;
use super::link::MAX_UNSENT;
use super::node_listener::NodeListener;
use super::wire::Envelope;

/// The silence after which a connection is pinged.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The name of the service of sessions.
const SESSIONS: &str = "corella.cluster.v1.Sessions";
const METHOD: &str = "/corella.cluster.v1.Sessions/Serve";

/// Larger than the message of the largest prompt: a token takes at most five bytes.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Opens a stream at a decode node and sends it the messages of `outgoing`.
pub async fn open(
    channel: Channel,
    outgoing: mpsc::Receiver<Envelope>,
    trace: Option<TraceContext>,
) -> Result<Streaming<Envelope>, Status> {
    let mut grpc = tonic::client::Grpc::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    grpc.ready()
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    let mut request = Request::new(ReceiverStream::new(outgoing));
    if let Some(Ok(value)) = trace.map(|trace| trace.to_string().parse::<AsciiMetadataValue>()) {
        request.metadata_mut().insert(TRACE_PARENT, value);
    }
    let path = PathAndQuery::from_static(METHOD);
    let codec: ProstCodec<Envelope, Envelope> = ProstCodec::default();
    Ok(grpc.streaming(request, path, codec).await?.into_inner())
}

/// W3C Trace Context.
const TRACE_PARENT: &str = "traceparent";

/// Serves sessions of prefill nodes and probes of the node's load, until `shutdown` and the last session have ended.
pub async fn serve_sessions(
    listener: NodeListener,
    handler: Arc<impl SessionHandler>,
    tracer: Option<Tracer>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let (stopping, stopped) = watch::channel(());
    let shutdown = async move {
        shutdown.await;
        drop(stopping);
    };
    let is_serving = {
        let handler = handler.clone();
        move || handler.is_serving()
    };
    let health = HealthService::new(SESSIONS, is_serving, stopped);
    let router = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(health)
        .add_service(SessionService::new(handler, tracer));
    router
        .serve_with_incoming_shutdown(listener.connections(), shutdown)
        .await
}

type Outgoing = Pin<Box<dyn tokio_stream::Stream<Item = Result<Envelope, Status>> + Send>>;

/// Takes the streams that prefill nodes open.
pub trait SessionHandler: Send + Sync + 'static {
    /// Returns whether new sessions are taken.
    fn is_serving(&self) -> bool;

    /// Called for each stream. Messages in `outgoing` go to the peer until `outgoing` is dropped. `trace` is the span
    /// of the session if it is traced.
    fn serve(
        self: &Arc<Self>,
        incoming: Streaming<Envelope>,
        outgoing: mpsc::Sender<Result<Envelope, Status>>,
        trace: Option<TraceScope>,
    );
}

/// The service of sessions, as tonic's server takes it.
struct SessionService<H> {
    handler: Arc<H>,
    tracer: Option<Tracer>,
}

impl<H: SessionHandler> SessionService<H> {
    fn new(handler: Arc<H>, tracer: Option<Tracer>) -> Self {
        Self { handler, tracer }
    }
}

impl<H> Clone for SessionService<H> {
    fn clone(&self) -> Self {
        Self {
            handler: self.handler.clone(),
            tracer: self.tracer.clone(),
        }
    }
}

impl<H> NamedService for SessionService<H> {
    const NAME: &'static str = SESSIONS;
}

struct Serve<H>(SessionService<H>);

impl<H: SessionHandler> StreamingService<Envelope> for Serve<H> {
    type Response = Envelope;
    type ResponseStream = Outgoing;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Outgoing>, Status>> + Send>>;

    fn call(&mut self, request: Request<Streaming<Envelope>>) -> Self::Future {
        let (sender, receiver) = mpsc::channel(MAX_UNSENT);
        let SessionService { handler, tracer } = &self.0;
        let caller = request
            .metadata()
            .get(TRACE_PARENT)
            .and_then(|value| TraceContext::parse(value.to_str().ok()?));
        // Only the prefill node knows whether a session belongs to a trace.
        let trace = tracer
            .as_ref()
            .zip(caller)
            .and_then(|(tracer, caller)| TraceScope::begin(tracer, Some(caller)));
        handler.serve(request.into_inner(), sender, trace);
        let outgoing: Outgoing = Box::pin(ReceiverStream::new(receiver));
        Box::pin(async move { Ok(Response::new(outgoing)) })
    }
}

impl<H: SessionHandler> Service<HttpRequest<Body>> for SessionService<H> {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            if request.uri().path() != METHOD {
                return Ok(Status::unimplemented("no such method").into_http());
            }
            let codec: ProstCodec<Envelope, Envelope> = ProstCodec::default();
            let mut grpc = Grpc::new(codec)
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES);
            Ok(grpc.streaming(Serve(service), request).await)
        })
    }
}
