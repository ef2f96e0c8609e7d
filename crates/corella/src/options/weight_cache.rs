//! Keeps packed weights in files, so that the next start of a model reads the quantised and repacked weights. Weights
//! that are only copied are not kept, because copying them again is as fast.

use std::ffi::OsStr;
use std::fs::{self, DirEntry, File, OpenOptions, TryLockError};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};

use corella_model::{Checkpoint, WeightFormat, WeightImage};

use crate::error::display_bytes::display_bytes;

/// The folder of packed weights, and its limits.
#[derive(Clone, Debug)]
pub struct WeightCache {
    /// The folder is created when needed. Files that are not of the cache stay unchanged.
    pub folder: PathBuf,
    /// Disk space for all models together. The least recently used files are deleted first.
    pub max_bytes: u64,
    /// Smaller models are not kept, because packing them again takes no time.
    pub min_bytes: u64,
}

impl WeightCache {
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            max_bytes: 32 << 30,
            min_bytes: 64 << 20,
        }
    }
}

/// The file of one model's weights in one format and layout.
pub(crate) struct WeightCacheEntry {
    cache: WeightCache,
    pub path: PathBuf,
}

/// The version of packed weights, which is part of the hash in a file's name. Raise it when packing writes other bytes
/// for the same layout name and `WeightFormat`. A changed layout of panels needs no new version, because the reader's
/// check refuses files of the earlier layout.
const VERSION: u32 = 1;
const COMPLETE: &str = "packed";
const PARTIAL: &str = "partial";

impl WeightCacheEntry {
    /// Returns `None` for a model without files, or if the metadata of a file cannot be read.
    pub fn new(
        cache: &WeightCache,
        checkpoint: &Checkpoint,
        layout: &str,
        format: Option<WeightFormat>,
    ) -> Option<Self> {
        let files = checkpoint.files().ok()?;
        let mut hasher = DefaultHasher::new();
        (VERSION, layout, format!("{format:?}")).hash(&mut hasher);
        for file in &files {
            let metadata = file.metadata().ok()?;
            let identity = (file.canonicalize().ok()?, metadata.len());
            (identity, metadata.modified().ok()?).hash(&mut hasher);
        }
        let model = match files.first()? {
            file if file.extension() == Some(OsStr::new("gguf")) => file.file_stem()?,
            file => file.parent()?.file_name().unwrap_or(OsStr::new("model")),
        };
        let model = model.to_string_lossy();
        let name = format!("{model}-{layout}-{:016x}.{COMPLETE}", hasher.finish());
        Some(Self {
            path: cache.folder.join(name),
            cache: cache.clone(),
        })
    }

    pub fn open(&self) -> Option<File> {
        let file = File::open(&self.path).ok()?;
        // `make_room` uses this time. Setting it fails in a folder of another user, which is harmless.
        let _ = file.set_modified(SystemTime::now());
        Some(file)
    }

    /// Writes the image in the background while the model is served. A failure is only a warning,
    /// because the next start can pack again.
    pub fn keep(self, image: Box<dyn WeightImage>) -> Option<WeightKeeper> {
        let num_bytes = image.num_bytes();
        if image.is_read() || num_bytes < self.cache.min_bytes.max(1) {
            return None;
        }
        if num_bytes > self.cache.max_bytes {
            tracing::info!(
                "packed weights of {} are not kept for the next start: --weight-cache-size is {}",
                display_bytes(num_bytes),
                display_bytes(self.cache.max_bytes)
            );
            return None;
        }
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&is_stopped);
        let thread = std::thread::Builder::new().name(String::from("corella-weight-cache"));
        let thread = thread.spawn(move || match self.write(image.as_ref(), &is_stopped) {
            Ok(true) => tracing::info!(
                "packed weights ({}) are kept for the next start in {}",
                display_bytes(num_bytes),
                self.path.display()
            ),
            Ok(false) => {}
            Err(error) => tracing::warn!(
                "packed weights are not kept in {}: {error}; the next start packs them again",
                self.cache.folder.display()
            ),
        });
        Some(WeightKeeper {
            stop,
            thread: Some(thread.ok()?),
        })
    }

    /// Writes the file. Returns `false` if another process writes the file, or if this process was told to stop.
    fn write(&self, image: &dyn WeightImage, is_stopped: &AtomicBool) -> io::Result<bool> {
        fs::create_dir_all(&self.cache.folder)?;
        let partial = self.path.with_extension(PARTIAL);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&partial)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // The previous holder of the lock may have completed the file meanwhile.
        if !partial
            .metadata()
            .is_ok_and(|at_path| is_same(&at_path, &file))
        {
            return Ok(false);
        }
        let written = self.write_locked(&file, image, is_stopped);
        match written {
            Ok(true) => fs::rename(&partial, &self.path)?,
            _ => fs::remove_file(&partial)?,
        }
        written
    }

    fn write_locked(
        &self,
        mut file: &File,
        image: &dyn WeightImage,
        is_stopped: &AtomicBool,
    ) -> io::Result<bool> {
        const PIECE: usize = 4 << 20;
        // Limits the dirty pages that the system may have to write at once.
        const MAX_UNSYNCED: usize = 64 << 20;
        file.set_len(0)?;
        self.make_room(image.num_bytes())?;
        let mut num_unsynced = 0;
        for piece in image.pieces(PIECE) {
            if is_stopped.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let start = Instant::now();
            file.write_all(piece)?;
            // The writer takes at most half of a core, because requests may need that core.
            std::thread::sleep(start.elapsed());
            num_unsynced += piece.len();
            if num_unsynced >= MAX_UNSYNCED {
                file.sync_data()?;
                num_unsynced = 0;
            }
        }
        file.sync_all()?;
        Ok(true)
    }

    /// Deletes the least recently used files, and partial files of killed processes. Fails if the disk lacks room.
    fn make_room(&self, num_bytes: u64) -> io::Result<()> {
        let mut kept = Vec::new();
        for entry in fs::read_dir(&self.cache.folder)? {
            let entry = entry?;
            match kind(&entry) {
                Some(PARTIAL) if is_abandoned(&entry.path()) => remove(&entry.path())?,
                Some(COMPLETE) if entry.path() != self.path => {
                    let metadata = entry.metadata()?;
                    kept.push((metadata.modified()?, metadata.len(), entry.path()));
                }
                _ => {}
            }
        }
        kept.sort();
        let mut total: u64 = num_bytes + kept.iter().map(|(_, len, _)| len).sum::<u64>();
        for (_, len, path) in kept {
            if total <= self.cache.max_bytes {
                break;
            }
            remove(&path)?;
            total -= len;
        }
        let free = free_bytes(&self.cache.folder)?;
        if free < num_bytes + num_bytes / 2 {
            return Err(io::Error::other(format!(
                "they take {}, and the disk has {} free",
                display_bytes(num_bytes),
                display_bytes(free)
            )));
        }
        Ok(())
    }
}

/// A thread that writes packed weights. Dropping the keeper stops it.
pub struct WeightKeeper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl WeightKeeper {
    /// Waits until all is written.
    pub fn wait(mut self) {
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Nothing depends on this thread, so even a panic in it does no harm.
            let _ = thread.join();
        }
    }
}

impl Drop for WeightKeeper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.join();
    }
}

/// Returns the extension of a file of the cache; `None` for any other file.
fn kind(entry: &DirEntry) -> Option<&'static str> {
    let name = entry.file_name();
    let name = name.to_str()?;
    let (rest, extension) = name.rsplit_once('.')?;
    let (_, hash) = rest.rsplit_once('-')?;
    let is_hash = hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    let known = [COMPLETE, PARTIAL].into_iter();
    known.filter(|_| is_hash).find(|known| *known == extension)
}

fn is_abandoned(path: &Path) -> bool {
    let file = File::open(path);
    file.is_ok_and(|file| file.try_lock().is_ok())
}

fn is_same(metadata: &fs::Metadata, file: &File) -> bool {
    let of_file = file.metadata();
    of_file.is_ok_and(|file| (file.dev(), file.ino()) == (metadata.dev(), metadata.ino()))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        // Another process made room at the same time.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn free_bytes(folder: &Path) -> io::Result<u64> {
    let folder = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    let mut disk = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: a terminated string, and room for the answer.
    if unsafe { libc::statvfs(folder.as_ptr(), disk.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: written by the call that succeeded.
    let disk = unsafe { disk.assume_init() };
    #[allow(clippy::unnecessary_cast, reason = "not 64 bits on every system")]
    Ok(disk.f_bavail as u64 * disk.f_frsize as u64)
}
