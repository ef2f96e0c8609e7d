//! The limit of this process's open files, including sockets.

use std::io;

/// Returns one part in `num_parts` of the limit; 0 if the system does not report it.
pub fn share(num_parts: u64) -> usize {
    limits().map_or(0, |limits| (limits.rlim_cur / num_parts) as usize)
}

/// Raises the limit as far as the system allows, and returns it.
pub fn raise_limit() -> io::Result<u64> {
    let mut limits = limits()?;
    limits.rlim_cur = limits.rlim_max;
    // SAFETY: only reads `limits`.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limits) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(limits.rlim_cur)
}

fn limits() -> io::Result<libc::rlimit> {
    let mut limits = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limits` is a valid place for the answer.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limits) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(limits)
}
