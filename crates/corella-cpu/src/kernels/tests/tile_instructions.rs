//! Compares tile instructions, the processor's or the emulated ones, with the steps that Intel's manual describes.

use std::arch::asm;
use std::sync::Barrier;

use super::super::{Isa, is_supported};
use super::random;

const LANES: usize = 16;
/// Elements between the rows in memory, which tile instructions must leave alone.
const GAP: usize = 12;

#[test]
fn tiles_multiply_pairs_of_bf16_as_the_manual_says() {
    if !is_supported(Isa::Amx) {
        return;
    }
    // With the second size, the small numbers and many of their products and sums are subnormal.
    let shapes = [(16, 16), (1, 16), (5, 3), (16, 1)];
    let cases = shapes
        .into_iter()
        .flat_map(|shape| [(shape, 1.0), (shape, 2e-38)]);
    for ((num_rows, num_steps), size) in cases {
        let pairs = |len: usize, size: f32, seed| -> Vec<u32> {
            let numbers = random(4 * len, seed);
            let numbers = numbers.as_chunks::<4>().0.iter();
            numbers
                .map(|&[a, a_scale, b, b_scale]| {
                    let [first, second] = [(a, a_scale), (b, b_scale)]
                        .map(|(x, scale)| x * (scale * 4.0).exp2() * size);
                    first.to_bits() >> 16 | second.to_bits() & 0xffff_0000
                })
                .collect()
        };
        let a = pairs(num_rows * num_steps, size, 1);
        let b = pairs(num_steps * LANES, 1.0, 2);
        let mut sums = random(num_rows * LANES, 3);
        sums.iter_mut().for_each(|sum| *sum *= size);
        let bits = |sums: &[f32]| -> Vec<u32> { sums.iter().map(|sum| sum.to_bits()).collect() };

        let expected: Vec<f32> = (0..num_rows * LANES)
            .map(|at| {
                let (row, lane) = (at / LANES, at % LANES);
                let (mut firsts, mut seconds) = (0.0, 0.0);
                for step in 0..num_steps {
                    let (a, b) = (a[row * num_steps + step], b[step * LANES + lane]);
                    let number = |bits: u32| flushed(f32::from_bits(bits));
                    firsts = flushed(number(a << 16).mul_add(number(b << 16), firsts));
                    let high = |pair: u32| number(pair & 0xffff_0000);
                    seconds = flushed(high(a).mul_add(high(b), seconds));
                }
                flushed(flushed(sums[at]) + flushed(firsts + seconds))
            })
            .collect();
        let actual = multiplied::<false>(num_rows, num_steps, &a, &b, &bits(&sums));
        assert_eq!(
            actual,
            bits(&expected),
            "{num_rows} rows of {num_steps}, {size}"
        );
    }
}

#[test]
fn tiles_multiply_bytes_exactly() {
    if !is_supported(Isa::Amx) {
        return;
    }
    for (num_rows, num_steps) in [(16, 16), (1, 16), (7, 2), (16, 1)] {
        let words = |len: usize, seed| -> Vec<u32> {
            let numbers = random(len, seed).into_iter();
            // In one of four words, all bytes are -128, whose square is the largest product.
            let word = |x: f32| {
                if x > 0.5 {
                    0x8080_8080
                } else {
                    x.to_bits() << 3 ^ x.to_bits()
                }
            };
            numbers.map(word).collect()
        };
        let a = words(num_rows * num_steps, 4);
        let b = words(num_steps * LANES, 5);
        let sums = words(num_rows * LANES, 6);
        let expected: Vec<u32> = (0..num_rows * LANES)
            .map(|at| {
                let (row, lane) = (at / LANES, at % LANES);
                let products = (0..num_steps).flat_map(|step| {
                    let a = a[row * num_steps + step].to_le_bytes();
                    let b = b[step * LANES + lane].to_le_bytes();
                    std::iter::zip(a, b)
                });
                products.fold(sums[at], |sum, (a, b)| {
                    let product = i32::from(a.cast_signed()) * i32::from(b.cast_signed());
                    sum.wrapping_add_signed(product)
                })
            })
            .collect();
        let actual = multiplied::<true>(num_rows, num_steps, &a, &b, &sums);
        assert_eq!(actual, expected, "{num_rows} rows of {num_steps}");
    }
}

/// The emulation replaces an instruction when a thread first meets it, while others may be executing it. Registers that
/// are no operands stay as they are.
#[test]
fn threads_may_meet_an_instruction_at_the_same_time() {
    if !is_supported(Isa::Amx) {
        return;
    }
    const NUM_THREADS: usize = 8;
    let barrier = Barrier::new(NUM_THREADS);
    std::thread::scope(|scope| {
        for thread in 0..NUM_THREADS {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                for round in 0..4 {
                    let kept = [thread as f32, round as f32 + 0.5];
                    let (ones, after) = sums_of_ones(kept);
                    assert!(ones.iter().all(|&sum| sum == LANES as f32 * 2.0));
                    assert_eq!(after, kept);
                }
            });
        }
    });
}

/// Multiplies two full tiles of ones, with instructions that no other test executes. Also returns `low` and `high`,
/// which were in vector registers meanwhile.
#[inline(never)]
fn sums_of_ones([mut low, mut high]: [f32; 2]) -> (Vec<f32>, [f32; 2]) {
    let ones = [0x3f80_3f80_u32; LANES * LANES];
    let mut out = vec![0.0; LANES * LANES];
    let mut config = [0u8; 64];
    config[0] = 1;
    for tile in [1, 2, 4] {
        config[16 + 2 * tile] = 4 * LANES as u8;
        config[48 + tile] = LANES as u8;
    }
    // SAFETY: the tiles have the shapes of the matrices, and tiles may be used where their kernels exist.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tilezero tmm1",
            "tileloadd tmm2, [{ones} + {stride}]",
            "tileloadd tmm4, [{ones} + {stride}]",
            "tdpbf16ps tmm1, tmm2, tmm4",
            "tilestored [{out} + {stride}], tmm1",
            "tilerelease",
            config = in(reg) &config, ones = in(reg) ones.as_ptr(), stride = in(reg) 4 * LANES,
            out = in(reg) out.as_mut_ptr(), inout("xmm7") low, inout("xmm15") high,
            options(nostack),
        );
    }
    (out, [low, high])
}

fn flushed(x: f32) -> f32 {
    if x.is_subnormal() {
        0.0_f32.copysign(x)
    } else {
        x
    }
}

/// Returns `sums` plus the products of `a` and `b`, whose rows are not contiguous in memory.
fn multiplied<const IS_BYTES: bool>(
    num_rows: usize,
    num_steps: usize,
    a: &[u32],
    b: &[u32],
    sums: &[u32],
) -> Vec<u32> {
    let a = spread(a, num_steps);
    let b = spread(b, LANES);
    let mut out = spread(sums, LANES);
    let mut config = [0u8; 64];
    config[0] = 1;
    for (tile, rows, row_bytes) in [
        (0, num_rows, 4 * LANES),
        (3, num_rows, 4 * num_steps),
        (6, num_steps, 4 * LANES),
    ] {
        config[16 + 2 * tile] = row_bytes as u8;
        config[48 + tile] = rows as u8;
    }
    let apart = |row_len: usize| 4 * (row_len + GAP);
    // The register numbers use every field of an instruction.
    // SAFETY: the tiles have the shapes of the three matrices, and tiles may be used where their
    // kernels exist.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &config);
        asm!("tilezero tmm0", "tileloadd tmm0, [r13 + r9]", in("r13") out.as_ptr(), in("r9") apart(LANES));
        asm!("tileloadd tmm3, [r12 + rcx*4 - 64]", in("r12") a.as_ptr().wrapping_byte_add(64),
            in("rcx") apart(num_steps) / 4);
        asm!("tileloaddt1 tmm6, [rdx + r12*2 + 512]", in("rdx") b.as_ptr().wrapping_byte_sub(512),
            in("r12") apart(LANES) / 2);
        if IS_BYTES {
            asm!("nop", "tdpbssd tmm0, tmm3, tmm6");
        } else {
            asm!("tdpbf16ps tmm0, tmm3, tmm6", "nop");
        }
        asm!("tilestored [r8 + rax], tmm0", in("r8") out.as_mut_ptr(), in("rax") apart(LANES));
        asm!("tilerelease");
    }
    let rows = out.chunks_exact(LANES + GAP);
    rows.flat_map(|row| {
        assert!(row[LANES..].iter().all(|&gap| gap == u32::MAX));
        row[..LANES].to_vec()
    })
    .collect()
}

fn spread(elements: &[u32], row_len: usize) -> Vec<u32> {
    let rows = elements.chunks_exact(row_len);
    rows.flat_map(|row| [row, &[u32::MAX; GAP]].concat())
        .collect()
}
