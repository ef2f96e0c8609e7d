//! Work on the disk of `--files-dir`, away from the async threads.

use corella_engine::rare_line;

use crate::wire::api_error::ApiError;

/// Runs disk work away from the threads that serve sockets.
pub async fn on_disk<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| disk_error(&error)),
        Err(error) => Err(ApiError::engine(format!(
            "The disk could not be used: {error}."
        ))),
    }
}

pub fn disk_error(error: &std::io::Error) -> ApiError {
    rare_line!(error, %error, "the folder of --files-dir cannot be used");
    match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            ApiError::insufficient_storage("The disk of the server is full.")
        }
        _ => ApiError::engine("The server could not use its disk; its log says why."),
    }
}
