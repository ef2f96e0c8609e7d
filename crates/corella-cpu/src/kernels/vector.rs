//! Vectors of f32 for kernels that have one source for all instruction sets.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// A vector register. Its functions are part of a kernel that is compiled with the instruction set.
///
/// # Safety
/// The functions need the instruction set, and pointers need to be to `LEN` elements.
pub unsafe trait Vector: Copy {
    /// A divisor of 16.
    const LEN: usize;

    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn splat(x: f32) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * factor + sum`, rounded once where the instruction set fuses the two.
    unsafe fn mul_add(self, factor: Self, sum: Self) -> Self;
    /// `mul_add` of one element.
    fn mul_add_one(x: f32, factor: f32, sum: f32) -> f32;
}

/// Vectors without instructions of their own.
#[derive(Clone, Copy)]
pub struct Four([f32; 4]);

// SAFETY: all loads and stores are of `LEN` elements.
unsafe impl Vector for Four {
    const LEN: usize = 4;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller upholds the contract.
        Self(unsafe { from.cast::<[f32; 4]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller upholds the contract.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(self.0) };
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 4])
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] * other.0[l]))
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] * factor.0[l] + sum.0[l]))
    }

    #[inline(always)]
    fn mul_add_one(x: f32, factor: f32, sum: f32) -> f32 {
        x * factor + sum
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! register {
    ($register:ty, $len:literal, $load:ident, $store:ident, $splat:ident, $mul:ident, $mul_add:ident) => {
        // SAFETY: all loads and stores are of `LEN` elements.
        unsafe impl Vector for $register {
            const LEN: usize = $len;

            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self {
                // SAFETY: the caller upholds the contract.
                unsafe { $load(from) }
            }

            #[inline(always)]
            unsafe fn store(self, to: *mut f32) {
                // SAFETY: the caller upholds the contract.
                unsafe { $store(to, self) };
            }

            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                // SAFETY: the caller upholds the contract.
                unsafe { $splat(x) }
            }

            #[inline(always)]
            unsafe fn mul(self, other: Self) -> Self {
                // SAFETY: the caller upholds the contract.
                unsafe { $mul(self, other) }
            }

            #[inline(always)]
            unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
                // SAFETY: the caller upholds the contract.
                unsafe { $mul_add(self, factor, sum) }
            }

            #[inline(always)]
            fn mul_add_one(x: f32, factor: f32, sum: f32) -> f32 {
                x.mul_add(factor, sum)
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
register!(
    __m256,
    8,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_mul_ps,
    _mm256_fmadd_ps
);
#[cfg(target_arch = "x86_64")]
register!(
    __m512,
    16,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_mul_ps,
    _mm512_fmadd_ps
);
