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
    // The time of modification is the file's last use, by which `remove_oldest` chooses.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_oldest_file_that_no_process_uses_is_removed() {
        let name = format!("corella-kv-folder-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&folder);
        let files: Vec<_> = (1..5)
            .map(|layout| open(&folder, layout).unwrap())
            .collect();
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        for (age, file) in files.iter().enumerate() {
            file.set_modified(start - Duration::from_secs(age as u64))
                .unwrap();
        }
        let other = folder.join("notes.txt");
        fs::write(&other, "").unwrap();
        let path = |layout: u128| folder.join(format!("{layout:032x}.{SUFFIX}"));
        // All files are in use, the oldest too.
        assert_eq!(remove_oldest(&folder).unwrap(), None);
        let [first, second, third, fourth] = files.try_into().unwrap();
        drop((second, third));
        assert_eq!(remove_oldest(&folder).unwrap(), Some(path(3)));
        assert_eq!(remove_oldest(&folder).unwrap(), Some(path(2)));
        assert_eq!(remove_oldest(&folder).unwrap(), None);
        drop((first, fourth));
        assert!(path(1).exists() && path(4).exists() && other.exists());
        fs::remove_dir_all(&folder).unwrap();
    }
}
