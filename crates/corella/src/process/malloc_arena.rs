//! The number of arenas from which the C library allocates.

/// Environment variables by which an operator sets the number.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const VARIABLES: [(&str, &str); 2] = [
    ("MALLOC_ARENA_MAX", ""),
    ("GLIBC_TUNABLES", "glibc.malloc.arena_max"),
];

/// With fewer arenas, threads wait for each other. With more arenas, memory grows
/// (`bench/results/2026-11-28-arenas.md`).
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ARENAS_PER_CORE: usize = 2;

/// Limits the number of arenas, unless the environment sets it. Must be called while the process has one thread.
///
/// glibc's own bound is eight for each core. Each arena keeps about the memory of its busiest moment, because blocks in
/// use lie between free ones. A server's threads come and go with its load and get a different arena each time, so all
/// arenas grow to that size.
pub fn limit_number() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        let is_chosen = |(name, part): (&str, &str)| {
            std::env::var(name).is_ok_and(|value| value.contains(part))
        };
        if VARIABLES.into_iter().any(is_chosen) {
            return;
        }
        let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let num_arenas = i32::try_from(ARENAS_PER_CORE * num_cores).unwrap_or(i32::MAX);
        // SAFETY: it takes no pointers, and no other thread allocates yet. A failure leaves the default.
        unsafe {
            libc::mallopt(libc::M_ARENA_MAX, num_arenas);
        }
    }
}
