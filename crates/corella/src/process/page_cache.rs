//! Files in the system's page cache.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Returns the regular files in a folder, without those in its folders.
pub fn files_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_file() {
            files.push(path);
        }
    }
    Ok(files)
}

/// Lets the system forget the content of files. Pages that are mapped, or not yet written, stay. All files are tried,
/// and the first error is returned.
pub fn drop_files(paths: &[PathBuf]) -> io::Result<()> {
    let dropped = paths.iter().map(|path| drop_file(path));
    dropped.fold(Ok(()), Result::and)
}

fn drop_file(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: the descriptor is open, and the call changes no content.
        let error =
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
    }
    drop(file);
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    const PAGE: usize = 4096;
    const NUM_PAGES: usize = 512;

    /// Counts the pages of a file in the page cache.
    fn num_cached(file: &File) -> usize {
        let length = NUM_PAGES * PAGE;
        let mut cached = vec![0_u8; NUM_PAGES];
        // SAFETY: the file has this length, and `cached` has a byte for each page.
        unsafe {
            let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
            let map = libc::mmap(
                std::ptr::null_mut(),
                length,
                read,
                shared,
                file.as_raw_fd(),
                0,
            );
            assert_ne!(map, libc::MAP_FAILED);
            assert_eq!(libc::mincore(map, length, cached.as_mut_ptr()), 0);
            libc::munmap(map, length);
        }
        cached.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn a_file_that_was_read_leaves_the_page_cache() {
        let name = format!("corella-page-cache-{}", std::process::id());
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../target")
            .join(name);
        fs::write(&path, vec![1; NUM_PAGES * PAGE]).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        let before = num_cached(&file);
        // A file that is gone keeps no other.
        let missing = path.with_extension("missing");
        let error = drop_files(&[missing, path.clone()]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let after = num_cached(&file);
        fs::remove_file(&path).unwrap();
        assert_eq!(before, NUM_PAGES);
        assert!(after < NUM_PAGES / 2, "{after} pages are left");
    }

    #[test]
    fn the_files_of_a_folder_are_those_beside_its_folders() {
        let name = format!("corella-files-in-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(folder.join("pooling")).unwrap();
        let tokenizer = folder.join("tokenizer.json");
        fs::write(&tokenizer, "{}").unwrap();
        let found = files_in(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.unwrap(), [tokenizer]);
    }
}
