//! The cores that a thread may run on, and pinning a thread to one of them.

use std::io;

/// The number of cores this process may use, limited by its control group's quota.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether the machine has several NUMA nodes with memory. Linux lists them as in "0-1,3".
pub fn has_near_memory() -> bool {
    let nodes = std::fs::read_to_string("/sys/devices/system/node/has_memory");
    nodes.is_ok_and(|nodes| nodes.contains([',', '-']))
}

/// The numbers of the cores that this thread may run on.
#[cfg(target_os = "linux")]
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    // SAFETY: `cpu_set_t` is a bit set, and all zeros are the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the size passed is the size of `set`.
    let failed = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) } != 0;
    if failed {
        return Err(io::Error::last_os_error());
    }
    let all = 0..libc::CPU_SETSIZE as usize;
    // SAFETY: `core` is less than the set's size, `CPU_SETSIZE`.
    Ok(all
        .filter(|&core| unsafe { libc::CPU_ISSET(core, &set) })
        .collect())
}

/// Pins this thread to a core. A refusal is ignored, because it costs only speed.
#[cfg(target_os = "linux")]
pub fn pin_to(core: usize) {
    // SAFETY: all zeros are the empty set, `core` is one that `allowed_cores` returned, and the
    // size passed is the size of `set`.
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
