//! The folder of the files: one for each model and layout, for one process at a time, and all together within a size.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::file_layer::FileLayer;
use super::tier::KvDiskFolder;

const SUFFIX: &str = "corella-kv";

/// The file of a layout, which grows as far as the folder's size allows. Files that no process uses make room for it.
pub(super) struct KvFile {
    file: File,
    path: PathBuf,
    /// The size of all files in the folder.
    max_bytes: u64,
    /// Whether the log has a line about the lack of room.
    has_told: AtomicBool,
}

impl KvFile {
    /// Opens the file of a layout, which only its owner may read, and locks it.
    pub fn open(folder: &KvDiskFolder, layout: u128) -> io::Result<Self> {
        let KvDiskFolder {
            path: folder,
            max_bytes,
            max_file_bytes,
        } = folder;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)?;
        let _turn = take_turn(folder, TURN_LIMIT)?;
        let path = folder.join(format!("{layout:032x}.{SUFFIX}"));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::other(
                    "the blocks of this model in this folder are in use, by another process or a second time by this one",
                ));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        file.set_permissions(Permissions::from_mode(0o600))?;
        // The time of modification is the file's last use, by which `remove_oldest` chooses.
        file.set_modified(SystemTime::now())?;
        let file = Self {
            file,
            path,
            max_bytes: *max_bytes,
            has_told: AtomicBool::new(false),
        };
        // An earlier process may have had a larger size.
        let len = file.len()?;
        let room = file.make_room(len.min(*max_file_bytes))?;
        if room < len {
            file.file.set_len(room)?;
        }
        Ok(file)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    /// Removes files that no process uses until the folder has room for `len` bytes of this file. Returns the number of
    /// these bytes that have room.
    fn make_room(&self, len: u64) -> io::Result<u64> {
        loop {
            let files = files(self.folder())?;
            let others = files.iter().filter(|file| file.path != self.path);
            let room = self
                .max_bytes
                .saturating_sub(others.map(|file| file.num_bytes).sum());
            if room >= len || !self.remove_oldest()? {
                return Ok(room.min(len));
            }
        }
    }

    /// Removes the least recently used file that no process uses. Returns false if there is none.
    fn remove_oldest(&self) -> io::Result<bool> {
        let removed = remove_oldest(self.folder())?;
        if let Some(path) = &removed {
            tracing::info!(
                path = %path.display(),
                "--kv-disk: the KV blocks of another model made room"
            );
        }
        Ok(removed.is_some())
    }

    /// Writes a line of the log, once, about a file that is shorter than its process needs.
    fn tell_of_lack(&self, num_bytes: u64, lack: &str) {
        if !self.has_told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                path = %self.path.display(),
                num_bytes,
                "--kv-disk: {lack}, so that this model's file stays as it is, and its least recently used blocks are \
                 overwritten"
            );
        }
    }
}

impl FileLayer for KvFile {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_at(bytes, at)
    }

    fn read_ahead(&self, at: u64, num_bytes: u64) {
        self.file.read_ahead(at, num_bytes);
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn reserve(&self, len: u64) -> io::Result<u64> {
        let there = self.len()?;
        if len <= there {
            return Ok(there);
        }
        let Ok(_turn) = take_turn(self.folder(), TURN_LIMIT) else {
            self.tell_of_lack(there, "another process keeps the lock of the folder");
            return Ok(there);
        };
        let room = self.make_room(len)?;
        if room <= there {
            self.tell_of_lack(there, "files in use take the rest of SIZE");
            return Ok(there);
        }
        while let Err(error) = self.file.reserve(room) {
            let is_full = matches!(
                error.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            );
            if is_full && self.remove_oldest()? {
                continue;
            }
            if !is_full || there == 0 {
                return Err(error);
            }
            self.tell_of_lack(there, "the disk is full");
            return Ok(there);
        }
        Ok(room)
    }

    fn clear(&self) -> io::Result<()> {
        self.file.clear()
    }
}

/// A file in the folder.
pub(super) struct Listed {
    pub path: PathBuf,
    pub num_bytes: u64,
    pub last_used: SystemTime,
}

/// The files in a folder, the least recently used first.
pub(super) fn files(folder: &Path) -> io::Result<Vec<Listed>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if path.extension().is_some_and(|suffix| suffix == SUFFIX) && entry.file_type()?.is_file() {
            let metadata = entry.metadata()?;
            files.push(Listed {
                path,
                num_bytes: metadata.len(),
                last_used: metadata.modified()?,
            });
        }
    }
    files.sort_by(|a, b| (a.last_used, &a.path).cmp(&(b.last_used, &b.path)));
    Ok(files)
}

/// Whether a process uses a file. The caller has its [turn](take_turn), so that no other process finds the file locked
/// by this check.
pub(super) fn is_in_use(path: &Path) -> bool {
    match File::open(path) {
        Ok(file) => file.try_lock().is_err(),
        // A file that cannot be opened now, for example for lack of descriptors, may be in use.
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// The longest wait for a turn. Others have theirs for a few calls of the file system, unless they or the disk hang.
pub(super) const TURN_LIMIT: Duration = Duration::from_secs(5);
/// The system reports no end of a lock, so a waiting process looks for it.
const TURN_CHECK_PERIOD: Duration = Duration::from_millis(5);

/// Keeps other processes, and other models of this one, from opening, removing and enlarging files of a folder. On a
/// file system without locks of folders, files may exceed the size for a moment.
pub(super) fn take_turn(folder: &Path, limit: Duration) -> io::Result<Option<File>> {
    let Ok(turn) = File::open(folder) else {
        return Ok(None);
    };
    let begin = Instant::now();
    loop {
        match turn.try_lock() {
            Ok(()) => return Ok(Some(turn)),
            Err(TryLockError::Error(_)) => return Ok(None),
            Err(TryLockError::WouldBlock) if begin.elapsed() >= limit => {
                let reason = "another process keeps the lock of the folder";
                return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
            }
            Err(TryLockError::WouldBlock) => thread::sleep(TURN_CHECK_PERIOD),
        }
    }
}

/// Removes the least recently used file that no process uses. Returns its path.
fn remove_oldest(folder: &Path) -> io::Result<Option<PathBuf>> {
    for file in files(folder)? {
        if !is_in_use(&file.path) {
            fs::remove_file(&file.path)?;
            return Ok(Some(file.path));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("corella-kv-folder-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }

        fn open(&self, layout: u128, max_bytes: u64) -> KvFile {
            self.open_share(layout, max_bytes, max_bytes).unwrap()
        }

        fn open_share(
            &self,
            layout: u128,
            max_bytes: u64,
            max_file_bytes: u64,
        ) -> io::Result<KvFile> {
            let folder = KvDiskFolder {
                path: self.0.clone(),
                max_bytes,
                max_file_bytes,
            };
            KvFile::open(&folder, layout)
        }

        fn path(&self, layout: u128) -> PathBuf {
            self.0.join(format!("{layout:032x}.{SUFFIX}"))
        }

        fn len(&self, layout: u128) -> Option<u64> {
            let metadata = fs::metadata(self.path(layout)).ok()?;
            Some(metadata.len())
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_oldest_file_that_no_process_uses_is_removed() {
        let folder = Folder::new("oldest");
        let files: Vec<_> = (1..5).map(|layout| folder.open(layout, 1 << 20)).collect();
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        for (age, file) in files.iter().enumerate() {
            let time = start - Duration::from_secs(age as u64);
            file.file.set_modified(time).unwrap();
        }
        let other = folder.0.join("notes.txt");
        fs::write(&other, "").unwrap();
        // All files are in use, the oldest too.
        assert_eq!(remove_oldest(&folder.0).unwrap(), None);
        let [first, second, third, fourth] = files.try_into().ok().unwrap();
        drop((second, third));
        assert_eq!(remove_oldest(&folder.0).unwrap(), Some(folder.path(3)));
        assert_eq!(remove_oldest(&folder.0).unwrap(), Some(folder.path(2)));
        assert_eq!(remove_oldest(&folder.0).unwrap(), None);
        // Its owner had a clock that ran ahead.
        let later = SystemTime::UNIX_EPOCH + Duration::from_secs(4_000_000_000);
        first.file.set_modified(later).unwrap();
        drop((first, fourth));
        let again = folder.open(1, 1 << 20);
        let metadata = again.file.metadata().unwrap();
        assert!(metadata.modified().unwrap() < later);
        assert!(folder.path(1).exists() && folder.path(4).exists() && other.exists());
    }

    #[test]
    fn files_of_other_models_stay_until_their_room_is_needed() {
        let folder = Folder::new("size");
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        for layout in 1..4 {
            let file = folder.open(layout, 100_000);
            assert_eq!(file.reserve(20_000).unwrap(), 20_000);
            let time = start + Duration::from_secs(layout as u64);
            file.file.set_modified(time).unwrap();
        }
        let file = folder.open(4, 100_000);
        assert_eq!(file.reserve(40_000).unwrap(), 40_000);
        assert_eq!(folder.len(1), Some(20_000));
        let used = folder.open(2, 100_000);
        assert_eq!(file.reserve(60_000).unwrap(), 60_000);
        assert_eq!((folder.len(1), folder.len(3)), (None, Some(20_000)));
        // The file that is in use keeps its room.
        assert_eq!(file.reserve(90_000).unwrap(), 80_000);
        assert_eq!((folder.len(2), folder.len(3)), (Some(20_000), None));
        assert_eq!(file.reserve(90_000).unwrap(), 80_000);
        assert_eq!(used.reserve(30_000).unwrap(), 20_000);
        drop(used);
        assert_eq!(file.reserve(90_000).unwrap(), 90_000);
        assert_eq!(folder.len(2), None);
    }

    #[test]
    fn a_file_that_has_become_a_share_is_cut_off() {
        let folder = Folder::new("share");
        drop(folder.open(1, 100_000).reserve(80_000));
        let first = folder.open_share(1, 100_000, 50_000).unwrap();
        assert_eq!(folder.len(1), Some(50_000));
        let second = folder.open_share(2, 100_000, 50_000).unwrap();
        assert_eq!(second.reserve(50_000).unwrap(), 50_000);
        // No share needs another's room.
        drop(first);
        assert_eq!(second.reserve(50_000).unwrap(), 50_000);
        assert_eq!(folder.len(1), Some(50_000));
    }

    #[test]
    fn a_wait_for_the_folder_has_an_end() {
        let folder = Folder::new("turn");
        let file = folder.open(1, 100_000);
        let turn = take_turn(&folder.0, TURN_LIMIT).unwrap();
        assert!(turn.is_some());
        let late = take_turn(&folder.0, Duration::from_millis(1)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        drop(turn);
        assert!(take_turn(&folder.0, Duration::ZERO).unwrap().is_some());
        assert_eq!(file.reserve(20_000).unwrap(), 20_000);
    }

    #[test]
    fn a_smaller_size_cuts_the_file_off_and_removes_others() {
        let folder = Folder::new("smaller");
        drop(folder.open(1, 100_000).reserve(30_000));
        let file = folder.open(2, 100_000);
        file.reserve(60_000).unwrap();
        file.write_at(&[7; 50_000], 0).unwrap();
        drop(file);
        let file = folder.open(2, 40_000);
        assert_eq!((folder.len(1), folder.len(2)), (None, Some(40_000)));
        let mut bytes = vec![0; 40_000];
        file.read_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 7));
        drop(file);
        let file = folder.open(2, 100_000);
        assert_eq!(file.reserve(50_000).unwrap(), 50_000);
        file.read_at(&mut bytes, 10_000).unwrap();
        assert_eq!((bytes[0], bytes[29_999], bytes[30_000]), (7, 7, 0));
    }
}
