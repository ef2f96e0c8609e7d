//! The standard gRPC health service (`grpc.health.v1.Health`), for load balancers and orchestrators.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use prost::Message;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::server::{Grpc, NamedService, ServerStreamingService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";
/// Time between two checks for changes that watchers must hear.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);
/// The limit of concurrent streams of `Watch`.
const MAX_WATCHES: usize = 256;

#[derive(Clone, PartialEq, Message)]
struct HealthCheckRequest {
    /// The name of a service, or an empty text for the whole server.
    #[prost(string, tag = "1")]
    service: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct HealthCheckResponse {
    #[prost(enumeration = "ServingStatus", tag = "1")]
    status: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
enum ServingStatus {
    Unknown = 0,
    Serving = 1,
    NotServing = 2,
    ServiceUnknown = 3,
}

/// The health service, as tonic's server takes it.
#[derive(Clone)]
pub struct HealthService(Arc<Inner>);

struct Inner {
    /// The name of the server's only service.
    name: &'static str,
    is_serving: Box<dyn Fn() -> bool + Send + Sync>,
    watches: Arc<Semaphore>,
    /// Closed when the server stops. The server does not wait for watchers.
    stopping: watch::Receiver<()>,
}

impl HealthService {
    pub fn new(
        name: &'static str,
        is_serving: impl Fn() -> bool + Send + Sync + 'static,
        stopping: watch::Receiver<()>,
    ) -> Self {
        Self(Arc::new(Inner {
            name,
            is_serving: Box::new(is_serving),
            watches: Arc::new(Semaphore::new(MAX_WATCHES)),
            stopping,
        }))
    }

    /// Returns the status, which is the same for the server and for its only service.
    fn status_of(&self, service: &str) -> ServingStatus {
        match service.is_empty() || service == self.0.name {
            true if (self.0.is_serving)() => ServingStatus::Serving,
            true => ServingStatus::NotServing,
            false => ServingStatus::ServiceUnknown,
        }
    }

    async fn watch(
        self,
        service: String,
        outgoing: mpsc::Sender<Result<HealthCheckResponse, Status>>,
    ) {
        let mut stopping = self.0.stopping.clone();
        let mut told = None;
        loop {
            let status = self.status_of(&service);
            if told != Some(status) {
                told = Some(status);
                if outgoing.send(Ok(answer(status))).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                () = tokio::time::sleep(WATCH_INTERVAL) => {}
                () = outgoing.closed() => return,
                // The end of the channel is the signal; no value is ever sent.
                _ = stopping.changed() => return,
            }
        }
    }
}

fn answer(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse {
        status: status.into(),
    }
}

impl NamedService for HealthService {
    const NAME: &'static str = "grpc.health.v1.Health";
}

type Answer<T> = Pin<Box<dyn Future<Output = Result<Response<T>, Status>> + Send>>;
type Answers = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

struct Check(HealthService);

impl UnaryService<HealthCheckRequest> for Check {
    type Response = HealthCheckResponse;
    type Future = Answer<HealthCheckResponse>;

    fn call(&mut self, request: Request<HealthCheckRequest>) -> Self::Future {
        let service = request.into_inner().service;
        let status = self.0.status_of(&service);
        Box::pin(async move {
            match status {
                ServingStatus::ServiceUnknown => {
                    Err(Status::not_found(format!("no service {service:?} is here")))
                }
                status => Ok(Response::new(answer(status))),
            }
        })
    }
}

struct Watch(HealthService);

impl ServerStreamingService<HealthCheckRequest> for Watch {
    type Response = HealthCheckResponse;
    type ResponseStream = Answers;
    type Future = Answer<Answers>;

    fn call(&mut self, request: Request<HealthCheckRequest>) -> Self::Future {
        let health = self.0.clone();
        Box::pin(async move {
            let Ok(permit) = health.0.watches.clone().try_acquire_owned() else {
                let limit = format!("{MAX_WATCHES} clients watch already");
                return Err(Status::resource_exhausted(limit));
            };
            let (sender, receiver) = mpsc::channel(1);
            tokio::spawn(async move {
                let _permit = permit;
                health.watch(request.into_inner().service, sender).await;
            });
            let answers: Answers = Box::pin(ReceiverStream::new(receiver));
            Ok(Response::new(answers))
        })
    }
}

impl Service<HttpRequest<Body>> for HealthService {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        let health = self.clone();
        Box::pin(async move {
            let codec: ProstCodec<HealthCheckResponse, HealthCheckRequest> = ProstCodec::default();
            let mut grpc = Grpc::new(codec);
            Ok(match request.uri().path() {
                CHECK => grpc.unary(Check(health), request).await,
                WATCH => grpc.server_streaming(Watch(health), request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}
