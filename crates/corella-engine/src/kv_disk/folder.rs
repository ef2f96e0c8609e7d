//! The folder of the files: one for each model and layout, for one process at a time.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const SUFFIX: &str = "corella-kv";

/// Opens the file of a layout, which only its owner may read, and locks it.
pub(super) fn open(folder: &Path, layout: u128) -> io::Result<File> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let path = folder.join(format!("{layout:032x}.{SUFFIX}"));
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(io::Error::other(
                "another process has the blocks of this model in this folder",
            ));
        }
        Err(TryLockError::Error(error)) => return Err(error),
    }
    file.set_permissions(Permissions::from_mode(0o600))?;
    // The last use, by which old files go first.
    file.set_modified(SystemTime::now())?;
    Ok(file)
}

/// Removes the least recently used file that no process uses. Returns its path.
pub(super) fn remove_oldest(folder: &Path) -> io::Result<Option<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if path.extension().is_some_and(|suffix| suffix == SUFFIX) && entry.file_type()?.is_file() {
            files.push((entry.metadata()?.modified()?, path));
        }
    }
    files.sort();
    for (_, path) in files {
        if File::open(&path)?.try_lock().is_ok() {
            fs::remove_file(&path)?;
            return Ok(Some(path));
        }
    }
    Ok(None)
}
