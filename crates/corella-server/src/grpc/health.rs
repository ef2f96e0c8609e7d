//! The standard gRPC health service (`grpc.health.v1.Health`), for gateways and orchestrators. It asks for no key.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use hyper::body::Frame;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

use crate::admin::health::readiness;
use crate::model_set::driver::ModelSet;
use crate::wire::api_error::ApiError;
use crate::wire::grpc_message::{
    grpc_response, message_response, read_message, trailers, write_message,
};
use crate::wire::request_body::SentBody;

pub const CHECK: &str = "/grpc.health.v1.Health/Check";
pub const WATCH: &str = "/grpc.health.v1.Health/Watch";
/// The services that have a health. The empty name is the whole server.
const SERVICES: [&str; 2] = ["", "vllm.Inference"];
/// Time between two checks for changes that watchers must hear.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);
/// Limits the streams of `Watch`, which need no key.
pub const MAX_WATCHES: usize = 256;

#[derive(Clone, PartialEq, Message)]
struct HealthCheckRequest {
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

fn status_of(models: &ModelSet, service: &str) -> ServingStatus {
    match SERVICES.contains(&service) {
        false => ServingStatus::ServiceUnknown,
        true if readiness(models).is_ok() => ServingStatus::Serving,
        true => ServingStatus::NotServing,
    }
}

async fn asked_service(models: &ModelSet, body: SentBody) -> Result<String, ApiError> {
    let body = models.parts().bodies.read(body).await?;
    let request: HealthCheckRequest = read_message(body.bytes())?;
    Ok(request.service)
}

pub async fn check(State(models): State<ModelSet>, body: SentBody) -> Result<Response, ApiError> {
    let service = asked_service(&models, body).await?;
    match status_of(&models, &service) {
        ServingStatus::ServiceUnknown => Err(ApiError::unknown_service(&service)),
        status => Ok(message_response(&HealthCheckResponse {
            status: status.into(),
        })),
    }
}

/// Tells the status at once and after each change. A server that ends closes the stream after its last status.
pub async fn watch(
    models: ModelSet,
    body: SentBody,
    watches: Arc<Semaphore>,
) -> Result<Response, ApiError> {
    let Ok(permit) = watches.try_acquire_owned() else {
        let reason = format!("{MAX_WATCHES} clients watch this server already.");
        return Err(ApiError::no_service(&reason));
    };
    let service = asked_service(&models, body).await?;
    Ok(grpc_response(Body::new(WatchBody {
        models,
        service,
        told: None,
        has_ended: false,
        next_look: Box::pin(sleep(WATCH_INTERVAL)),
        _permit: permit,
    })))
}

struct WatchBody {
    models: ModelSet,
    service: String,
    told: Option<ServingStatus>,
    has_ended: bool,
    next_look: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl WatchBody {
    /// Returns the status that the client has not heard.
    fn news(&mut self) -> Option<Bytes> {
        let status = status_of(&self.models, &self.service);
        if self.told.replace(status) == Some(status) {
            return None;
        }
        let mut bytes = Vec::new();
        let status = status.into();
        write_message(&HealthCheckResponse { status }, &mut bytes);
        Some(bytes.into())
    }

    fn end(&mut self) -> Option<HeaderMap> {
        // A drain that has begun since the last look is told before the end.
        let has_told = self.told != Some(ServingStatus::Serving);
        self.has_ended = has_told && self.models.parts().is_draining();
        self.has_ended
            .then(|| trailers(Some(&ApiError::draining())))
    }
}

impl HttpBody for WatchBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.has_ended {
            return Poll::Ready(None);
        }
        loop {
            if let Some(news) = this.news() {
                return Poll::Ready(Some(Ok(Frame::data(news))));
            }
            if let Some(trailers) = this.end() {
                return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
            }
            if this.next_look.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            this.next_look
                .as_mut()
                .reset(Instant::now() + WATCH_INTERVAL);
        }
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended
    }
}
