//! Runs batches. Requests of waiting clients come first.

mod ending;
mod input_check;
mod job;
mod line_answer;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::model_set::driver::ModelSet;

use crate::store::batch_table::Batches;
use job::run_job;

/// Time between two searches for expired files.
const SWEEP_PERIOD: Duration = Duration::from_secs(60);

/// Runs batches until the server begins to drain, and then waits for the lines in progress. The next start of the
/// server answers the remaining lines.
pub async fn run_batches(models: ModelSet, batches: Arc<Batches>) {
    let mut jobs = JoinSet::new();
    let server = models.parts();
    while !server.is_draining() {
        while let Some(job) = batches.take_job() {
            jobs.spawn(run_job(models.clone(), batches.clone(), job));
        }
        tokio::select! {
            () = batches.has_work.notified() => {}
            Some(_) = jobs.join_next() => {}
            () = sleep(SWEEP_PERIOD) => sweep(&batches).await,
            () = server.draining() => {}
        }
    }
    while jobs.join_next().await.is_some() {}
}

async fn sweep(batches: &Arc<Batches>) {
    let batches = batches.clone();
    let swept = tokio::task::spawn_blocking(move || {
        let is_needed = |id: &str| batches.user_of(id).is_some();
        batches.files.sweep(is_needed)
    });
    if let Ok(Err(error)) = swept.await {
        tracing::error!(%error, "expired files cannot be deleted");
    }
}
