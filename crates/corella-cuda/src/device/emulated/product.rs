//! Matrix products in the simplest way.
//!
//! The vendor's library may sum in different orders for different shapes. Here, too, the order depends on the number of
//! rows, so that tests notice code that relies on a fixed order.

use half::bf16;

use crate::device::{DevicePointer, Element, Product};

/// # Safety
/// All memory of the product belongs to the host, and is not changed meanwhile.
pub unsafe fn multiply(product: &Product) {
    let Product { m, n, k, .. } = *product;
    // SAFETY: the caller's promise.
    let (input, weight) = unsafe {
        (
            read(product.input, product.element, m * k),
            read(product.weight, product.element, n * k),
        )
    };
    let dot = match m % 3 {
        1 => sum_of_products::<16>,
        2 => sum_of_products::<4>,
        _ => sum_of_products::<8>,
    };
    for row in 0..m {
        let input = &input[row * k..][..k];
        for column in 0..n {
            let sum = dot(input, &weight[column * k..][..k]);
            // SAFETY: the caller's promise.
            unsafe { write(product, row * product.out_stride + column, sum) };
        }
    }
}

/// Sums of every `LANES`th product, which are added last.
fn sum_of_products<const LANES: usize>(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += a * b;
    }
    sums.iter().sum()
}

/// # Safety
/// The elements are memory of the host.
unsafe fn read(pointer: DevicePointer, element: Element, len: usize) -> Vec<f32> {
    // SAFETY: the caller's promise; allocations are aligned, and so are the elements within them.
    unsafe {
        match element {
            Element::F32 => (0..len)
                .map(|i| *(pointer.0 as *const f32).add(i))
                .collect(),
            Element::Bf16 => (0..len)
                .map(|i| (*(pointer.0 as *const bf16).add(i)).to_f32())
                .collect(),
        }
    }
}

/// # Safety
/// As for `multiply`.
unsafe fn write(product: &Product, index: usize, mut sum: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match product.out_element {
            Element::F32 => {
                let out = (product.out.0 as *mut f32).add(index);
                if product.adds {
                    sum += *out;
                }
                *out = sum;
            }
            Element::Bf16 => {
                let out = (product.out.0 as *mut bf16).add(index);
                if product.adds {
                    sum += (*out).to_f32();
                }
                *out = bf16::from_f32(sum);
            }
        }
    }
}
