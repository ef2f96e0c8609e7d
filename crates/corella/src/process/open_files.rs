//! The limit of this process's open files, including sockets.

use std::io;

/// Returns the limit divided by `num_parts`; 0 if the system does not report the limit.
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

/// Returns a warning if the limit is too low for all connections that clients may open.
pub fn shortage(limit: u64, max_num_connections: usize) -> Option<String> {
    /// Files besides the connections: sockets, logs, and files that are read or written for a while.
    const NUM_OTHERS: u64 = 64;
    let effect = match limit.checked_sub(NUM_OTHERS) {
        Some(num) if num >= max_num_connections as u64 => return None,
        Some(num) if num > 0 => format!("more than {num} connections at once will wait"),
        _ => "hardly more than it needs itself, so that connections will wait, and requests that need a file may fail"
            .to_owned(),
    };
    Some(format!(
        "this process may open {limit} files: {effect}; to allow more, raise the hard limit (`ulimit -Hn`)"
    ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_told_truly() {
        assert_eq!(shortage(164, 100), None);
        let some = shortage(163, 100).expect("one is missing");
        assert!(
            some.contains("more than 99 connections at once will wait"),
            "{some}"
        );
        for limit in [0, 20, 64] {
            let hardly = shortage(limit, 100).expect("all are missing");
            assert!(
                hardly.contains(&format!("may open {limit} files: hardly")),
                "{hardly}"
            );
        }
    }
}
