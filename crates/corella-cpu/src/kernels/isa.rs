//! The instruction sets that have kernels, and the choice among those of this machine.

use corella_model::DeviceError;

use super::{Kernels, portable, processor};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, avx512_bf16};

/// An instruction set that has kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum Isa {
    /// Plain Rust, for any processor.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 (F, BW, DQ and VL).
    Avx512,
    /// AVX-512 with instructions that multiply pairs of bf16 values.
    Avx512Bf16,
    /// AVX-512 with matrix tiles for bf16 and 8-bit integers.
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

    /// Whether rows are rounded to bf16 before they are multiplied by bf16 weights.
    pub fn rounds_rows(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx)
    }
}

/// The fastest instruction set of this machine.
pub fn detect_isa() -> Isa {
    let is_worthwhile = |isa| isa != Isa::Avx512Bf16 || processor::has_fast_pairs();
    let mut best_first = Isa::ALL.into_iter().rev();
    best_first
        .find(|&isa| is_supported(isa) && is_worthwhile(isa))
        .unwrap_or(Isa::Portable)
}

/// Whether this machine has an instruction set.
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

/// The given instruction set, or the best that this machine has, with its kernels.
pub fn choose_kernels(isa: Option<Isa>) -> Result<(Isa, &'static Kernels), DeviceError> {
    let isa = isa.unwrap_or_else(detect_isa);
    match kernels(isa) {
        Some(kernels) => Ok((isa, kernels)),
        None => Err(DeviceError(format!(
            "this machine has no {isa} instructions"
        ))),
    }
}

/// The kernels of an instruction set; `None` if this machine does not have it.
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
