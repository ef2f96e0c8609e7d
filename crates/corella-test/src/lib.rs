//! How tests wait. A test waits for a condition or holds a process still; it never sleeps for a while and hopes,
//! and never bounds a wall-clock time. `cargo xtask tidy` refuses other waits in tests.

use std::time::{Duration, Instant};

mod held_process;

pub use held_process::HeldProcess;

/// The longest wait before a hanging test fails. No passing test comes near this limit, however busy the machine, so
/// raising it mends nothing.
const PATIENCE: Duration = Duration::from_secs(300);

/// The time between two looks at a condition.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Waits until a condition holds.
///
/// # Panics
///
/// Panics with `what` if the condition does not hold within five minutes.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Waits until `look` finds something, and returns it.
///
/// # Panics
///
/// Panics with `what` if nothing is found within five minutes.
#[track_caller]
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "never happened: {what}");
        std::thread::sleep(LOOK_INTERVAL);
    }
}

/// [`wait_until`] for tests on an async runtime, which runs other tasks meanwhile.
///
/// # Panics
///
/// Panics with `what` if the condition does not hold within five minutes.
pub async fn wait_until_async(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for_async(what, || condition().then_some(())).await;
}

/// [`wait_until_async`] for a condition that is itself async, such as a request to a server.
///
/// # Panics
///
/// Panics with `what` if the condition does not hold within five minutes.
pub async fn wait_until_asked(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < PATIENCE, "never happened: {what}");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// [`wait_for`] for tests on an async runtime, which runs other tasks meanwhile.
///
/// # Panics
///
/// Panics with `what` if nothing is found within five minutes.
pub async fn wait_for_async<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "never happened: {what}");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}
