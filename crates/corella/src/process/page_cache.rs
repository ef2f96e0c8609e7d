//! Files in the system's page cache.

use std::fs::File;
use std::io;
use std::path::Path;

/// Lets the system forget the content of a file. Pages that are mapped, or not yet written, stay.
pub fn drop_file(path: &Path) -> io::Result<()> {
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
    use std::fs;
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
        drop_file(&path).unwrap();
        let after = num_cached(&file);
        fs::remove_file(&path).unwrap();
        assert_eq!(before, NUM_PAGES);
        assert!(after < NUM_PAGES / 2, "{after} pages are left");
    }
}
