//! What to know of a processor beside its instructions.

use std::sync::OnceLock;

/// Whether its maker is Intel.
#[cfg(target_arch = "x86_64")]
pub fn is_intel() -> bool {
    static IS_INTEL: OnceLock<bool> = OnceLock::new();
    *IS_INTEL.get_or_init(|| {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes) == [*b"Genu", *b"ineI", *b"ntel"]
    })
}

#[cfg(not(target_arch = "x86_64"))]
pub fn is_intel() -> bool {
    false
}

/// Whether memory is read faster when kernels ask for what lies ahead, as `line_ahead` says. A Sapphire
/// Rapids core leaves most of its bandwidth unused without; a Zen 4 core read 17 GB/s with, and 28 without.
pub fn wants_requests() -> bool {
    is_intel()
}

/// Whether a product of pairs of bf16 does more in its time than two multiply-adds of f32: on Zen 4 it
/// does; on a Sapphire Rapids core it did half as much.
pub fn has_fast_pairs() -> bool {
    !is_intel()
}
