//! The free space of a disk, so that a model that does not fit is refused before it is fetched.

use std::path::Path;

/// Bytes that this user may still write at `path`; `None` if unknown.
#[cfg(unix)]
pub fn free_bytes(path: &Path) -> Option<u64> {
    use std::ffi::CString;
    use std::mem::MaybeUninit;
    use std::os::unix::ffi::OsStrExt;

    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut stats = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` ends with a zero, and `stats` has room for the result of the call.
    let status = unsafe { libc::statvfs(path.as_ptr(), stats.as_mut_ptr()) };
    if status != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so it has filled `stats`.
    let stats = unsafe { stats.assume_init() };
    #[allow(
        clippy::unnecessary_cast,
        reason = "these types differ between systems"
    )]
    Some((stats.f_bavail as u64).saturating_mul(stats.f_frsize as u64))
}

#[cfg(not(unix))]
pub fn free_bytes(_path: &Path) -> Option<u64> {
    None
}
