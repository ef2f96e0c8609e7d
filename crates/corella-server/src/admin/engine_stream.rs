//! `/engine/events`: snapshots of the engine, several times a second while there are readers.
//!
//! One task makes the snapshots for all readers. The task begins with the first reader and ends when the last one has
//! left. Without the task, the engine keeps no records. A slow reader misses snapshots: only the newest one is kept.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use hyper::body::Frame;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use crate::admin::engine_event::{server_event, snapshot_event};
use crate::call::sse::{Events, event_stream};
use crate::model_set::model_use::UsedModel;
use crate::state::server_parts::ServerParts;
use crate::state::server_state::ServerState;

const INTERVAL: Duration = Duration::from_millis(250);

pub async fn engine_events(UsedModel(state): UsedModel) -> Response {
    let mut first = Events::default();
    let interval_ms = INTERVAL.as_millis() as u64;
    first.push_named("server", &server_event(&state, interval_ms));
    let recent = &state.metrics.outputs.recent_latency;
    let make = || drop(tokio::spawn(make_snapshots(Arc::downgrade(&state))));
    let reader = state.engine_feed.subscribe(recent, make);
    event_stream(Body::new(FeedBody {
        first: Some(first.into()),
        next: Some(Box::pin(next_event(reader, state.parts.clone()))),
        server: state.parts.clone(),
    }))
}

/// Ends with the model: an unloaded model has no further snapshots.
async fn make_snapshots(model: Weak<ServerState>) {
    let Some(mut watch) = model.upgrade().map(|state| state.engine.watch()) else {
        return;
    };
    let mut number = 0;
    let mut due = Instant::now();
    while let Some(state) = model.upgrade() {
        let feed = &state.engine_feed;
        let recent = &state.metrics.outputs.recent_latency;
        if feed.try_stop(recent) {
            return;
        }
        // A lost engine ends the watch. If the engine's loop is stuck, no snapshot comes, and readers see that the
        // stream stands still.
        if let Ok(Some(snapshot)) = timeout(INTERVAL, watch.snapshot()).await {
            let mut events = Events::default();
            let snapshot = snapshot_event(&state, number, &snapshot, recent);
            events.push_named("snapshot", &snapshot);
            number += 1;
            feed.publish(events.into());
        }
        drop(state);
        due = (due + INTERVAL).max(Instant::now());
        sleep_until(due).await;
    }
}

type NextEvent = Pin<Box<dyn Future<Output = Option<(Bytes, watch::Receiver<Bytes>)>> + Send>>;

/// The body of a stream. The stream ends when the server drains, because an endless stream would delay the shutdown, and
/// with its model.
struct FeedBody {
    first: Option<Bytes>,
    /// `None` after the last event.
    next: Option<NextEvent>,
    server: Arc<ServerParts>,
}

impl HttpBody for FeedBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let Some(next) = &mut this.next else {
            return Poll::Ready(None);
        };
        let Poll::Ready(event) = next.as_mut().poll(cx) else {
            return Poll::Pending;
        };
        this.next = None;
        let Some((event, reader)) = event else {
            return Poll::Ready(None);
        };
        this.next = Some(Box::pin(next_event(reader, this.server.clone())));
        Poll::Ready(Some(Ok(Frame::data(event))))
    }
}

async fn next_event(
    mut reader: watch::Receiver<Bytes>,
    server: Arc<ServerParts>,
) -> Option<(Bytes, watch::Receiver<Bytes>)> {
    tokio::select! {
        () = server.draining() => None,
        changed = reader.changed() => {
            changed.ok()?;
            let newest = reader.borrow_and_update().clone();
            Some((newest, reader))
        }
    }
}
