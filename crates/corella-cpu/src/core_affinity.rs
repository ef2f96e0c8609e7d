//! Which cores a thread may run on.

use std::io;

/// How many cores this process may use, quotas of its control group included.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether some memory is nearer to a core than other memory: Linux lists NUMA nodes as in "0-1,3".
pub fn has_near_memory() -> bool {
    let nodes = std::fs::read_to_string("/sys/devices/system/node/has_memory");
    nodes.is_ok_and(|nodes| nodes.contains([',', '-']))
}

/// The cores that this thread may use, by number.
#[cfg(target_os = "linux")]
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    // SAFETY: a set of bits, for which zero is the empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` has the size that is named.
    let failed = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0;
    if failed {
        return Err(io::Error::last_os_error());
    }
    let all = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: numbers that the set has room for.
    Ok(all
        .filter(|&core| unsafe { libc::CPU_ISSET(core, &set) })
        .collect())
}

/// Keeps this thread on a core, if the system lets it.
#[cfg(target_os = "linux")]
pub fn pin_to(core: usize) {
    // SAFETY: a set of bits, for which zero is the empty one; a core that `allowed_cores` named;
    // `set` has the size that is named. A thread that stays free is as good as any other.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

#[cfg(not(target_os = "linux"))]
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
pub fn pin_to(_core: usize) {}
