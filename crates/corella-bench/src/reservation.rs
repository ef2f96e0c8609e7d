//! Measures how long a busy engine takes to answer another node.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::time::{Duration, Instant};

use corella_core::{LostKv, TokenId};
use corella_engine::{Engine, Receipt, StreamEvent, Submission};

use crate::{BenchError, Summary};

/// The length of the other node's prompt.
const NUM_TOKENS: usize = 256;
/// The timeout of a reservation, much longer than any answer takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Times from the call to the answer, in milliseconds.
#[derive(Debug, Clone)]
pub struct AnswerTimes {
    /// The time until pages are reserved.
    pub reserve_ms: Summary,
    /// The time until an abandoned reservation has ended.
    pub abort_ms: Summary,
    pub num_reservations: usize,
}

/// Reserves pages and abandons the reservation, again and again with a pause of `interval`, until `load` ends. The
/// answers come from the engine's loop, which also runs the steps of `load`.
pub async fn measure_beside<T>(
    load: impl Future<Output = T>,
    engine: &Engine,
    interval: Duration,
) -> Result<(T, AnswerTimes), BenchError> {
    let (mut reserve_ms, mut abort_ms) = (Vec::new(), Vec::new());
    let mut load = pin!(load);
    let result = loop {
        let reservation = async {
            tokio::time::sleep(interval).await;
            reserve_and_abort(engine).await
        };
        tokio::select! {
            result = &mut load => break result,
            times = reservation => {
                let [reserve, abort] = times?;
                reserve_ms.push(reserve.as_secs_f64() * 1e3);
                abort_ms.push(abort.as_secs_f64() * 1e3);
            }
        }
    };
    let times = AnswerTimes {
        num_reservations: reserve_ms.len(),
        reserve_ms: Summary::new(reserve_ms),
        abort_ms: Summary::new(abort_ms),
    };
    Ok((result, times))
}

async fn reserve_and_abort(engine: &Engine) -> Result<[Duration; 2], BenchError> {
    let refused = |reason: String| BenchError::Worker(format!("a reservation failed: {reason}"));
    let asked_at = Instant::now();
    let prompt = (0..NUM_TOKENS).map(|at| at as TokenId % 64).collect();
    let receipt = engine.reserve(Submission::new(prompt, 1), TIMEOUT);
    let Receipt { mut stream, .. } = receipt.map_err(|error| refused(format!("{error:?}")))?;
    match poll_fn(|cx| stream.poll_next(cx)).await {
        Some(StreamEvent::Accepted) => {}
        event => return Err(refused(format!("{event:?}"))),
    }
    let reserved_at = Instant::now();
    let how = LostKv::End("a measurement needs it no more".into());
    engine.kv_exchange().handle_kv_lost(stream.id(), how);
    match poll_fn(|cx| stream.poll_next(cx)).await {
        Some(event) if event.is_terminal() => {}
        event => return Err(refused(format!("{event:?}"))),
    }
    Ok([reserved_at - asked_at, reserved_at.elapsed()])
}

impl fmt::Display for AnswerTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            reserve_ms,
            abort_ms,
            num_reservations,
        } = self;
        writeln!(f, "{num_reservations} reservations beside the load, ms")?;
        writeln!(f, "{:<10}{:>9}{:>9}{:>9}", "", "median", "p99", "max")?;
        for (name, times) in [("reserve", reserve_ms), ("abort", abort_ms)] {
            let Summary {
                median, p99, max, ..
            } = times;
            writeln!(f, "{name:<10}{median:>9.3}{p99:>9.3}{max:>9.3}")?;
        }
        Ok(())
    }
}
