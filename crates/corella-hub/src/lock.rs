//! Lets one process at a time fetch a file, with the locks of `huggingface_hub`.

use std::fs::{self, File, TryLockError};
use std::path::Path;
use std::time::Duration;

use crate::{FetchEvent, HubError, Observer};

/// Held until it is dropped, or until the process ends.
pub struct FileLock {
    _file: File,
}

impl FileLock {
    /// Waits until the lock is free. `path` names the file for the observer.
    pub fn acquire(lock: &Path, path: &str, observer: Observer<'_>) -> Result<Self, HubError> {
        const INTERVAL: Duration = Duration::from_millis(100);
        if let Some(folder) = lock.parent() {
            fs::create_dir_all(folder).map_err(HubError::disk("create", folder))?;
        }
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(lock);
        let file = file.map_err(HubError::disk("open", lock))?;
        let mut is_told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                // The file system has no locks. Two processes may then write to the same partial file. They find a
                // wrong checksum, and never load a wrong model.
                Err(TryLockError::Error(error))
                    if error.kind() == std::io::ErrorKind::Unsupported =>
                {
                    return Ok(Self { _file: file });
                }
                Err(TryLockError::Error(error)) => {
                    return Err(HubError::disk("lock", lock)(error));
                }
                Err(TryLockError::WouldBlock) => {
                    if !is_told {
                        observer(FetchEvent::Waiting { path });
                        is_told = true;
                    }
                    std::thread::sleep(INTERVAL);
                }
            }
        }
    }
}
