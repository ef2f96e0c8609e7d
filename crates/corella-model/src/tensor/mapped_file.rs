//! Files in memory, and what is known of their end.
//!
//! The system ends a process that reads a mapped page which its file no longer has (`SIGBUS`). In a watched file, such a
//! page becomes zeros instead, and the file's watch reports it. So a reader must check the watch before it uses what it
//! has read, and must discard the data if a page was lost.

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(target_os = "linux")]
use super::page_fault::Place;

/// A mapped file.
pub struct MappedFile {
    /// Dropped before the map, so that no place outlives its memory.
    #[cfg(target_os = "linux")]
    _place: Option<Place>,
    map: memmap2::Mmap,
}

impl MappedFile {
    /// # Safety
    /// The file must not change while it is mapped. A watched file may become shorter.
    pub unsafe fn new(file: &File, name: &str, watch: Option<&FileWatch>) -> io::Result<Self> {
        // SAFETY: the caller's promise, or the watch's.
        let map = unsafe { memmap2::Mmap::map(file) }?;
        if let Some(watch) = watch {
            watch.0.add(&map, name);
        }
        Ok(Self {
            #[cfg(target_os = "linux")]
            _place: match watch {
                Some(watch) => Some(Place::new(&map, watch.0.clone())?),
                None => None,
            },
            map,
        })
    }

    /// Releases the memory of a range, which is read from the file again when needed.
    #[cfg(unix)]
    pub fn release(&self, range: Range<usize>) {
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the map is shared and read only, so a released page is read again from the file with the same bytes.
        // A failure leaves the map unchanged.
        let _ = unsafe {
            self.map
                .unchecked_advise_range(advice, range.start, range.len())
        };
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

/// Watches the files of one model. Clones share the watch.
#[derive(Clone, Default)]
pub struct FileWatch(Arc<Watched>);

/// The start addresses of maps tell files apart.
#[derive(Default)]
pub(super) struct Watched {
    /// The file that has lost a page; 0 if none has.
    torn: AtomicUsize,
    names: Mutex<Vec<(usize, String)>>,
}

impl FileWatch {
    /// Fails if a page was read that its file no longer had. The error names the file.
    ///
    /// A page that still begins within the file is no fault: the system fills its end with zeros.
    pub fn check(&self) -> Result<(), String> {
        match self.0.torn.load(Ordering::Acquire) {
            0 => Ok(()),
            start => Err(self.0.describe(start)),
        }
    }
}

impl Watched {
    fn add(&self, map: &[u8], name: &str) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.push((map.as_ptr().addr(), name.to_owned()));
    }

    /// Called in a signal handler, which may only touch atomics.
    pub(super) fn set_torn(&self, start: usize) {
        self.torn.store(start, Ordering::Release);
    }

    fn describe(&self, start: usize) -> String {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        // A later map of the model may have the address of an earlier one.
        let found = names.iter().rev().find(|(known, _)| *known == start);
        let name = found.map_or("a file of the model", |(_, name)| name);
        format!("{name} has become shorter while it was in use, or could not be read")
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    const PAGE: usize = 4096;

    /// A file of pages that begin with 1, 2, 3, and so on. It is removed at the end.
    struct Pages {
        path: PathBuf,
        file: File,
    }

    impl Pages {
        fn new(name: &str, num_pages: u8) -> Self {
            let name = format!("corella-mapped-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let pages = (1..=num_pages).flat_map(|number| [number; PAGE]);
            fs::write(&path, pages.collect::<Vec<u8>>()).unwrap();
            let options = File::options().read(true).write(true).open(&path);
            Self {
                file: options.unwrap(),
                path,
            }
        }

        fn map(&self, watch: &FileWatch) -> MappedFile {
            let name = self.path.display().to_string();
            // SAFETY: only its length changes, and it is watched.
            unsafe { MappedFile::new(&self.file, &name, Some(watch)) }.unwrap()
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.path);
        }
    }

    #[test]
    fn a_lost_page_is_zeros_and_its_own_watch_tells() {
        let (cut, whole) = (Pages::new("cut", 4), Pages::new("whole", 4));
        let (watch, other_watch) = (FileWatch::default(), FileWatch::default());
        let (map, other) = (cut.map(&watch), whole.map(&other_watch));
        cut.file.set_len(PAGE as u64).unwrap();
        // A page that the file still has is no loss.
        assert_eq!((map[0], watch.check()), (1, Ok(())));
        assert_eq!(map[2 * PAGE..3 * PAGE], [0; PAGE]);
        let told = watch.check().unwrap_err();
        let name = cut.path.display().to_string();
        assert_eq!(
            told,
            format!("{name} has become shorter while it was in use, or could not be read")
        );
        assert_eq!((map[0], map[PAGE], map[4 * PAGE - 1]), (1, 0, 0));
        assert_eq!(other[3 * PAGE], 4);
        assert_eq!(other_watch.check(), Ok(()));
        // A loss stays known when the file is as long as before.
        cut.file.set_len(4 * PAGE as u64).unwrap();
        map.release(0..4 * PAGE);
        assert_eq!(map[3 * PAGE], 0);
        assert!(watch.check().is_err());
    }

    #[test]
    fn threads_that_read_a_lost_page_at_once_go_on() {
        let cut = Pages::new("threads", 64);
        let watch = FileWatch::default();
        let map = cut.map(&watch);
        cut.file.set_len(0).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert!(map.iter().all(|&byte| byte == 0)));
            }
        });
        assert!(watch.check().is_err());
    }

    #[test]
    fn a_place_is_free_again_when_its_map_ends() {
        let cut = Pages::new("again", 2);
        let watch = FileWatch::default();
        // More maps than places, one after another.
        for _ in 0..5000 {
            drop(cut.map(&watch));
        }
        assert_eq!(watch.check(), Ok(()));
    }

    #[test]
    fn a_removed_or_replaced_file_is_read_on() {
        let old = Pages::new("replaced", 2);
        let watch = FileWatch::default();
        let map = old.map(&watch);
        let new = old.path.with_extension("new");
        fs::write(&new, [9; 100]).unwrap();
        fs::rename(&new, &old.path).unwrap();
        assert_eq!((map[0], map[2 * PAGE - 1]), (1, 2));
        fs::remove_file(&old.path).unwrap();
        map.release(0..2 * PAGE);
        assert_eq!((map[0], map[2 * PAGE - 1], watch.check()), (1, 2, Ok(())));
    }
}
