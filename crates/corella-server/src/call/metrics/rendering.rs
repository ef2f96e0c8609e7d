//! The text of `/metrics`, rendered for all requests that wait for it.
//!
//! Rendering takes milliseconds, and callers need no API key. Pauses between renderings therefore limit the load. The
//! rendering of a text begins after the request has arrived, so the values are never older than the request.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::body::Bytes;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

use super::text_format::prometheus_text;

/// The pause after a rendering, as a multiple of the rendering's time: rendering takes at most a fifth of one core.
const PAUSE_FACTOR: u32 = 4;
/// Limits the pause after a rendering that took long because the process did not run.
const MAX_PAUSE: Duration = Duration::from_millis(100);

pub struct MetricsText {
    begin: Instant,
    /// The earliest begin of the next rendering.
    next: Instant,
    open_metrics: Bytes,
    /// The text in Prometheus' format, converted for the first client that wants this format.
    prometheus: OnceLock<Bytes>,
}

impl MetricsText {
    pub fn open_metrics(&self) -> Bytes {
        self.open_metrics.clone()
    }

    pub fn prometheus(&self) -> Bytes {
        let converted = self.prometheus.get_or_init(|| {
            let text = String::from_utf8_lossy(&self.open_metrics);
            prometheus_text(&text).into()
        });
        converted.clone()
    }
}

/// Renders one text at a time.
pub struct Renderer {
    last: Mutex<Option<Arc<MetricsText>>>,
    min_pause: Duration,
}

impl Renderer {
    pub fn new(min_pause: Duration) -> Self {
        Self {
            last: Mutex::new(None),
            min_pause,
        }
    }

    /// Returns a text whose rendering began after this call.
    pub fn text<E>(
        &self,
        render: impl FnOnce() -> Result<String, E>,
    ) -> impl Future<Output = Result<Arc<MetricsText>, E>> {
        let arrival = Instant::now();
        async move {
            let mut last = self.last.lock().await;
            if let Some(last) = &*last {
                if last.begin >= arrival {
                    return Ok(last.clone());
                }
                sleep_until(last.next).await;
            }
            let begin = Instant::now();
            let open_metrics = render()?.into();
            let pause = PAUSE_FACTOR * begin.elapsed();
            let text = Arc::new(MetricsText {
                begin,
                next: Instant::now() + pause.min(MAX_PAUSE).max(self.min_pause),
                open_metrics,
                prometheus: OnceLock::new(),
            });
            *last = Some(text.clone());
            Ok(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use super::*;

    struct Counter(Cell<usize>);

    impl Counter {
        fn render(&self) -> Result<String, Infallible> {
            self.0.set(self.0.get() + 1);
            Ok(self.0.get().to_string())
        }
    }

    #[tokio::test]
    async fn requests_that_wait_share_a_text_and_later_ones_get_another() {
        let renderer = Renderer::new(Duration::ZERO);
        let count = Counter(Cell::new(0));
        let waiting: Vec<_> = (0..100).map(|_| renderer.text(|| count.render())).collect();
        for text in waiting {
            let Ok(text) = text.await;
            assert_eq!(text.open_metrics(), "1");
        }
        for expected in ["2", "3"] {
            let Ok(text) = renderer.text(|| count.render()).await;
            assert_eq!(text.open_metrics(), expected);
        }
    }

    #[tokio::test]
    async fn renderings_have_pauses_between_them() {
        let renderer = Renderer::new(Duration::from_secs(3600));
        let count = Counter(Cell::new(0));
        let Ok(_) = renderer.text(|| count.render()).await;
        let mut second = pin!(renderer.text(|| count.render()));
        let is_pending =
            poll_fn(|context| Poll::Ready(second.as_mut().poll(context).is_pending())).await;
        assert!(is_pending);
        assert_eq!(count.0.get(), 1);
    }
}
