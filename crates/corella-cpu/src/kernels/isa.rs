//! The instruction sets that there are kernels for, and which of them this machine has.

use std::fmt;

use super::{Kernels, portable, processor};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, avx512_bf16};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    Portable,
    Avx2,
    Avx512,
    /// AVX-512, and products of pairs for bf16 weights, keys and values.
    Avx512Bf16,
    /// AVX-512, and matrix tiles for bf16 and integers.
    Amx,
}

impl Isa {
    pub const ALL: [Self; 5] = [
        Self::Portable,
        Self::Avx2,
        Self::Avx512,
        Self::Avx512Bf16,
        Self::Amx,
    ];

    /// Whether rows are rounded to bf16 before bf16 weights are multiplied with them.
    pub fn rounds_rows(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Amx => "amx",
        })
    }
}

/// The best instruction set of this machine that there are kernels for.
pub fn detect_isa() -> Isa {
    let is_worthwhile = |isa| isa != Isa::Avx512Bf16 || processor::has_fast_pairs();
    let mut best_first = Isa::ALL.into_iter().rev();
    best_first
        .find(|&isa| is_supported(isa) && is_worthwhile(isa))
        .unwrap_or(Isa::Portable)
}

pub fn is_supported(isa: Isa) -> bool {
    match isa {
        Isa::Portable => true,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_supported(Isa::Avx2)
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => is_supported(Isa::Avx512) && avx512_bf16::is_supported(),
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => is_supported(Isa::Avx512Bf16) && amx::is_supported(),
        #[cfg(not(target_arch = "x86_64"))]
        _ => false,
    }
}

/// The kernels of an instruction set; `None` if this machine lacks it.
pub fn kernels(isa: Isa) -> Option<&'static Kernels> {
    if !is_supported(isa) {
        return None;
    }
    match isa {
        Isa::Portable => Some(&portable::KERNELS),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some(&avx2::KERNELS),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Some(&avx512::KERNELS),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => Some(&avx512_bf16::KERNELS),
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => Some(&amx::KERNELS),
        #[cfg(not(target_arch = "x86_64"))]
        _ => None,
    }
}
