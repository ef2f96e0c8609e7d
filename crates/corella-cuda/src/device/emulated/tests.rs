//! The emulated device against plain computations, and the errors that it must notice.

use half::bf16;

use super::*;
use crate::device::{DeviceBuffer, Element, PinnedBuffer};

const PREAMBLE: &str = "#include \"prelude.cuh\"\n";

fn source(text: &'static str, defines: &[(&'static str, &str)]) -> ModuleSource {
    let defines = defines.iter().map(|&(name, value)| (name, value.into()));
    ModuleSource {
        name: "test.cu",
        text,
        defines: defines.collect(),
    }
}

fn load(device: &SharedDevice, text: &'static str, name: &str) -> Kernel {
    device.load(&source(text, &[]), &[name]).unwrap()[0]
}

fn grid(blocks: u32, threads: u32) -> Grid {
    Grid {
        blocks: [blocks, 1, 1],
        threads,
        shared_bytes: 0,
    }
}

/// Launches a kernel whose parameters are pointers.
fn launch(
    device: &SharedDevice,
    kernel: Kernel,
    grid: Grid,
    pointers: &[DevicePointer],
) -> Result<(), DeviceError> {
    let args: Vec<u8> = pointers.iter().flat_map(|p| p.0.to_le_bytes()).collect();
    // SAFETY: each test passes the pointers that its kernel takes, to buffers of its own.
    unsafe { device.launch(Stream::Compute, kernel, grid, &args) }
}

fn pinned<T: Copy>(device: &SharedDevice, values: &[T]) -> PinnedBuffer<T> {
    let mut buffer = PinnedBuffer::new(device, values.len()).unwrap();
    // SAFETY: the device has no work yet.
    unsafe { buffer.as_mut_slice() }.copy_from_slice(values);
    buffer
}

fn read<T: Copy>(buffer: &PinnedBuffer<T>) -> Vec<T> {
    // SAFETY: the emulated device has finished all its work.
    unsafe { buffer.as_slice() }.to_vec()
}

/// Numbers between -1 and 1 that look random, with few bits, so that their sums are exact.
fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2654435761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 24) as f32 / 128.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn barriers_order_what_threads_write_and_read() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct RotateArgs { u32* out; };\n",
        "KERNEL(rotate, RotateArgs) {\n",
        "    __shared__ u32 values[256];\n",
        "    values[threadIdx.x] = threadIdx.x;\n",
        "    for (u32 round = 0; round < 100; ++round) {\n",
        "        __syncthreads();\n",
        "        u32 next = values[(threadIdx.x + 1) % blockDim.x];\n",
        "        __syncthreads();\n",
        "        values[threadIdx.x] = next;\n",
        "    }\n",
        "    args.out[blockIdx.x * blockDim.x + threadIdx.x] = values[threadIdx.x];\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "rotate");
    for threads in [32, 64, 224, 256] {
        let out = pinned(&device, &vec![0_u32; 3 * threads]);
        launch(&device, kernel, grid(3, threads as u32), &[out.pointer()]).unwrap();
        let expected: Vec<u32> = (0..3 * threads)
            .map(|i| ((i % threads + 100) % threads) as u32)
            .collect();
        assert_eq!(read(&out), expected);
    }
}

#[test]
fn a_missing_barrier_shows_in_one_of_two_blocks() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct RacyArgs { float* out; };\n",
        "KERNEL(racy, RacyArgs) {\n",
        "    __shared__ float values[64];\n",
        "    values[threadIdx.x] = 1.0f;\n",
        "    args.out[blockIdx.x * 64 + threadIdx.x] = values[(threadIdx.x + 63) % 64];\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "racy");
    let out = pinned(&device, &[0.0_f32; 128]);
    launch(&device, kernel, grid(2, 64), &[out.pointer()]).unwrap();
    let num_unwritten = |values: &[f32]| values.iter().filter(|v| v.is_nan()).count();
    let values = read(&out);
    assert_eq!(num_unwritten(&values[..64]), 1);
    assert_eq!(num_unwritten(&values[64..]), 63);
}

#[test]
fn lanes_exchange_what_they_should() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct LanesArgs { u32* out; float* sums; };\n",
        "KERNEL(lanes, LanesArgs) {\n",
        "    u32* out = args.out + threadIdx.x * 6;\n",
        "    const u32 lane = threadIdx.x % 32;\n",
        "    out[0] = shuffle(threadIdx.x, (lane * 5 + 3) % 32);\n",
        "    out[1] = shuffle_xor(threadIdx.x, 9);\n",
        "    out[2] = shuffle_down(threadIdx.x, 3);\n",
        "    out[3] = ballot(lane % 3 == 0);\n",
        "    out[4] = vote_any(threadIdx.x == 40);\n",
        "    __syncwarp();\n",
        "    float negative = shuffle(-static_cast<float>(threadIdx.x), 7u);\n",
        "    out[5] = __float_as_uint(negative);\n",
        "    const float value = 1.0f / static_cast<float>(threadIdx.x + 1);\n",
        "    float sum = value;\n",
        "    for (u32 d = 16; d > 0; d /= 2) sum += shuffle_xor(sum, d);\n",
        "    float* sums = args.sums + threadIdx.x * 5;\n",
        "    sums[0] = sum;\n",
        "    sums[1] = warp_sum(value);\n",
        "    sums[2] = warp_max(value);\n",
        "    sums[3] = block_sum(value);\n",
        "    sums[4] = block_max(-value);\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "lanes");
    let out = pinned(&device, &[0_u32; 6 * 96]);
    let sums = pinned(&device, &[0.0_f32; 5 * 96]);
    launch(
        &device,
        kernel,
        grid(1, 96),
        &[out.pointer(), sums.pointer()],
    )
    .unwrap();
    let (out, sums) = (read(&out), read(&sums));
    let warp_sum = |warp: usize| {
        let mut values: Vec<f32> = (0..32).map(|i| 1.0 / (warp * 32 + i + 1) as f32).collect();
        while values.len() > 1 {
            let half = values.len() / 2;
            values = (0..half).map(|i| values[i] + values[i + half]).collect();
        }
        values[0]
    };
    for thread in 0..96 {
        let (warp, lane) = (thread / 32, thread % 32);
        let down = if lane + 3 < 32 { thread + 3 } else { thread };
        let expected = [
            (warp * 32 + (lane * 5 + 3) % 32) as u32,
            (thread ^ 9) as u32,
            down as u32,
            0x4924_9249,
            (warp == 1) as u32,
            (-((warp * 32 + 7) as f32)).to_bits(),
        ];
        assert_eq!(out[thread * 6..][..6], expected, "thread {thread}");
        let expected = [
            warp_sum(warp),
            warp_sum(warp),
            1.0 / (warp * 32 + 1) as f32,
            warp_sum(0) + warp_sum(1) + warp_sum(2),
            -1.0 / 96.0,
        ];
        assert_eq!(sums[thread * 5..][..5], expected, "thread {thread}");
    }
}

#[test]
fn fragments_multiply_as_matrices_do() {
    // The kernel gathers its fragments from row-major matrices as the instruction's documentation lays them out.
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct ProductArgs { const u16* a; const u16* b; float* d; };\n",
        "KERNEL(product, ProductArgs) {\n",
        "    const u32 lane = threadIdx.x, group = lane >> 2, in_group = lane % 4;\n",
        "    u32 a[4], b[2];\n",
        "    for (u32 i = 0; i < 8; ++i) {\n",
        "        u32 row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;\n",
        "        u32 column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);\n",
        "        u32 bits = args.a[row * 16 + column];\n",
        "        a[i / 2] = i % 2 ? a[i / 2] | bits << 16 : bits;\n",
        "    }\n",
        "    for (u32 i = 0; i < 4; ++i) {\n",
        "        u32 row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);\n",
        "        u32 bits = args.b[row * 8 + group];\n",
        "        b[i / 2] = i % 2 ? b[i / 2] | bits << 16 : bits;\n",
        "    }\n",
        "    float d[4];\n",
        "    for (u32 i = 0; i < 4; ++i) {\n",
        "        u32 row = i < 2 ? group : group + 8;\n",
        "        d[i] = args.d[row * 8 + in_group * 2 + (i & 1)];\n",
        "    }\n",
        "    mma_16x8x16(d, a, b);\n",
        "    for (u32 i = 0; i < 4; ++i) {\n",
        "        u32 row = i < 2 ? group : group + 8;\n",
        "        args.d[row * 8 + in_group * 2 + (i & 1)] = d[i];\n",
        "    }\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "product");
    let (a, b, d) = (numbers(256, 1), numbers(128, 2), numbers(128, 3));
    let bits = |values: &[f32]| -> Vec<u16> {
        values
            .iter()
            .map(|&v| bf16::from_f32(v).to_bits())
            .collect()
    };
    let buffers = (pinned(&device, &bits(&a)), pinned(&device, &bits(&b)));
    let out = pinned(&device, &d);
    let pointers = [buffers.0.pointer(), buffers.1.pointer(), out.pointer()];
    launch(&device, kernel, grid(1, 32), &pointers).unwrap();
    let mut expected = d;
    for row in 0..16 {
        for column in 0..8 {
            for k in 0..16 {
                expected[row * 8 + column] += a[row * 16 + k] * b[k * 8 + column];
            }
        }
    }
    assert_eq!(read(&out), expected);
}

#[test]
fn matrices_are_loaded_by_row_and_by_column() {
    // Matrix j is rows 8j to 8j + 7 of an array with the elements 100 row + column.
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct MatricesArgs { u32* out; };\n",
        "KERNEL(matrices, MatricesArgs) {\n",
        "    u16* rows = reinterpret_cast<u16*>(dynamic_shared());\n",
        "    for (u32 c = 0; c < 8; ++c) rows[threadIdx.x * 24 + c] = 100 * threadIdx.x + c;\n",
        "    __syncwarp();\n",
        "    load_matrix_x4(args.out + threadIdx.x * 8, rows + threadIdx.x * 24);\n",
        "    load_matrix_x4_transposed(args.out + threadIdx.x * 8 + 4, rows + threadIdx.x * 24);\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "matrices");
    let out = pinned(&device, &[0_u32; 32 * 8]);
    let mut grid = grid(1, 32);
    grid.shared_bytes = 32 * 48;
    launch(&device, kernel, grid, &[out.pointer()]).unwrap();
    let out = read(&out);
    for lane in 0..32_u32 {
        let (major, minor) = (lane / 4, lane % 4 * 2);
        for matrix in 0..4 {
            let element = |row: u32, column: u32| 100 * (8 * matrix + row) + column;
            let by_row = (element(major, minor + 1) << 16) | element(major, minor);
            let by_column = (element(minor + 1, major) << 16) | element(minor, major);
            let index = (lane * 8 + matrix) as usize;
            assert_eq!(
                (out[index], out[index + 4]),
                (by_row, by_column),
                "{lane} {matrix}"
            );
        }
    }
}

#[test]
fn asynchronous_copies_arrive_when_their_group_was_waited_for() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct CopiesArgs { const float* from; float* out; };\n",
        "KERNEL(copies, CopiesArgs) {\n",
        "    __shared__ __align__(16) float a[4 * 32], b[4 * 32], c[4 * 32];\n",
        "    const u32 at = threadIdx.x * 4;\n",
        "    for (u32 i = 0; i < 4; ++i) a[at + i] = b[at + i] = c[at + i] = -1.0f;\n",
        "    copy_async_16(a + at, args.from + at);\n",
        "    copy_async_commit();\n",
        "    copy_async_16(b + at, args.from + at, threadIdx.x % 2 == 0);\n",
        "    copy_async_commit();\n",
        "    copy_async_16(c + at, args.from + at);\n",
        "    copy_async_commit();\n",
        "    copy_async_wait<1>();\n",
        "    float* out = args.out + threadIdx.x * 4;\n",
        "    out[0] = a[at]; out[1] = b[at + 3]; out[2] = c[at];\n",
        "    copy_async_wait<0>();\n",
        "    out[3] = c[at + 2];\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "copies");
    let from = pinned(&device, &numbers(128, 4));
    let out = pinned(&device, &[0.0_f32; 128]);
    launch(
        &device,
        kernel,
        grid(1, 32),
        &[from.pointer(), out.pointer()],
    )
    .unwrap();
    let (from, out) = (read(&from), read(&out));
    for thread in 0..32 {
        let at = 4 * thread;
        let b = if thread % 2 == 0 { from[at + 3] } else { 0.0 };
        assert_eq!(
            [out[at], out[at + 1], out[at + 3]],
            [from[at], b, from[at + 2]]
        );
        assert!(out[at + 2].is_nan(), "the copy was not waited for");
    }
}

#[test]
fn floats_round_as_a_device_rounds() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct RoundArgs { const float* from; bf16* a; f16* b; u32* pairs; };\n",
        "KERNEL(round_all, RoundArgs) {\n",
        "    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;\n",
        "    args.a[i] = from_float<bf16>(args.from[i]);\n",
        "    args.b[i] = from_float<f16>(args.from[i]);\n",
        "    args.pairs[i] = pack2_bf16(args.from[i], to_float(from_float<f16>(args.from[i])));\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "round_all");
    // Every exponent, with halves between two values and their neighbours.
    let values: Vec<f32> = (0..1 << 16)
        .map(|i: u32| f32::from_bits(((i & 0xff80) << 16) | ((i & 0x7f) * 0x1_0421)))
        .filter(|value| !value.is_nan())
        .collect();
    let len = values.len() / 32 * 32;
    let from = pinned(&device, &values);
    let a = pinned(&device, &vec![bf16::ZERO; len]);
    let b = pinned(&device, &vec![half::f16::ZERO; len]);
    let pairs = pinned(&device, &vec![0_u32; len]);
    let pointers = [from.pointer(), a.pointer(), b.pointer(), pairs.pointer()];
    launch(&device, kernel, grid(len as u32 / 32, 32), &pointers).unwrap();
    let (a, b, pairs) = (read(&a), read(&b), read(&pairs));
    for (i, &value) in values[..len].iter().enumerate() {
        let (expected_a, expected_b) = (bf16::from_f32(value), half::f16::from_f32(value));
        assert_eq!(a[i].to_bits(), expected_a.to_bits(), "{value}");
        assert_eq!(b[i].to_bits(), expected_b.to_bits(), "{value}");
        let high = bf16::from_f32(expected_b.to_f32()).to_bits() as u32;
        assert_eq!(
            pairs[i],
            (high << 16) | expected_a.to_bits() as u32,
            "{value}"
        );
    }
}

#[test]
fn a_barrier_that_a_thread_does_not_reach_is_named() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct LostArgs { u64 how; };\n",
        "KERNEL(lost, LostArgs) {\n",
        "    if (args.how == 0 && blockIdx.x == 1 && threadIdx.x == 37) return;\n",
        "    if (args.how == 1 && threadIdx.x == 5) return;\n",
        "    if (args.how == 2 && threadIdx.x % 32 < 16) __syncwarp();\n",
        "    if (args.how == 3 && threadIdx.x == 9) __syncthreads();\n",
        "    warp_sum(1.0f);\n",
        "    __syncthreads();\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "lost");
    let error = |how: u64| {
        let error = launch(&device, kernel, grid(2, 64), &[DevicePointer(how)]).unwrap_err();
        error.0
    };
    assert_eq!(
        error(0),
        "kernel lost, block (1, 0, 0): thread 32 waits at warp_sum, \
         which thread 37 never reaches: it is at the end"
    );
    assert!(error(1).contains("thread 5 never reaches: it is at the end"));
    // The order of the lanes depends on the block that runs first.
    let places = [("warp_sum", "__syncwarp"), ("__syncwarp", "warp_sum")];
    let mixed = error(2);
    assert!(
        places.iter().any(|(one, other)| mixed.contains(&format!(
            "at {one} while other lanes of its warp wait at {other}"
        ))),
        "{mixed}"
    );
    assert!(error(3).contains("which thread 9 never reaches: it is at __syncthreads"));
    assert_eq!(
        launch(&device, kernel, grid(2, 64), &[DevicePointer(4)]),
        Ok(())
    );
}

#[test]
fn blocks_run_in_rising_and_in_falling_order() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct OrderArgs { u32* counter; u32* order; };\n",
        "KERNEL(order, OrderArgs) {\n",
        "    const u32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;\n",
        "    if (threadIdx.x == 0) args.order[atomic_add(args.counter, 1)] = block;\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "order");
    let blocks = Grid {
        blocks: [2, 3, 4],
        ..grid(1, 32)
    };
    let mut orders = [(); 2].map(|()| {
        let counter = pinned(&device, &[0_u32]);
        let order = pinned(&device, &[0_u32; 24]);
        let pointers = [counter.pointer(), order.pointer()];
        launch(&device, kernel, blocks, &pointers).unwrap();
        read(&order)
    });
    orders.sort();
    assert_eq!(orders[0], (0..24).collect::<Vec<_>>());
    assert_eq!(orders[1], (0..24).rev().collect::<Vec<_>>());
}

#[test]
fn addresses_that_an_instruction_does_not_take_are_named() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct WrongArgs { float* memory; u64 how; };\n",
        "KERNEL(wrong, WrongArgs) {\n",
        "    __shared__ __align__(16) float shared[64];\n",
        "    u32 r[4];\n",
        "    if (args.how == 0) copy_async_16(shared + 1, args.memory);\n",
        "    if (args.how == 1) copy_async_16(args.memory, args.memory);\n",
        "    if (args.how == 2) load_matrix_x4(r, args.memory);\n",
        "    if (args.how == 3) load_streaming_16(args.memory + 2);\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "wrong");
    let memory = DeviceBuffer::new(&device, 64).unwrap();
    let expected = [
        "the destination of copy_async_16 is not aligned to 16 bytes",
        "the destination of copy_async_16 is not in shared memory",
        "the row of load_matrix_x4 is not in shared memory",
        "the source of load_streaming_16 is not aligned to 16 bytes",
    ];
    for (how, expected) in expected.into_iter().enumerate() {
        let pointers = [memory.pointer(), DevicePointer(how as u64)];
        let error = launch(&device, kernel, grid(1, 32), &pointers).unwrap_err();
        assert!(error.0.ends_with(expected), "{error}");
    }
}

#[test]
fn wrong_launches_are_refused() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct SmallArgs { u64 a; u32 b; };\n",
        "KERNEL_OF(small, SmallArgs, 128, 2) {}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "small");
    let launch = |grid: Grid, num_bytes: usize| {
        // SAFETY: the kernel is empty.
        unsafe { device.launch(Stream::Compute, kernel, grid, &vec![0; num_bytes]) }
    };
    assert_eq!(launch(grid(1, 128), 16), Ok(()));
    let refused = [
        (grid(1, 128), 12, "its parameters have 16 bytes, not 12"),
        (grid(1, 48), 16, "a block of 48 threads"),
        (grid(1, 160), 16, "at most 128"),
        (grid(0, 32), 16, "none may be 0"),
    ];
    for (grid, num_bytes, reason) in refused {
        let error = launch(grid, num_bytes).unwrap_err();
        assert!(error.0.contains(reason), "{error}");
    }
    let too_much = Grid {
        shared_bytes: 1 << 18,
        ..grid(1, 32)
    };
    assert!(
        launch(too_much, 16)
            .unwrap_err()
            .0
            .contains("dynamic shared memory")
    );
}

#[test]
fn a_source_that_does_not_compile_is_shown_with_the_compilers_reason() {
    let device = EmulatedDevice::open();
    let text = "struct AArgs {}; KERNEL(a, AArgs) { return MISSING; }";
    let error = device.load(&source(text, &[]), &["a"]).unwrap_err();
    assert!(error.0.starts_with("test.cu does not compile:"), "{error}");
    assert!(error.0.contains("MISSING"), "{error}");
    let text = "struct AArgs { u64 a; }; KERNEL(a, AArgs) {}";
    let text: &'static str = format!("{PREAMBLE}{text}").leak();
    let error = device.load(&source(text, &[]), &["b"]).unwrap_err();
    assert_eq!(error.0, "test.cu has no kernel b");
}

#[test]
fn devices_share_no_state() {
    // Many launches of one source, from several threads and devices, with macros of their own.
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct SumArgs { const float* from; float* out; };\n",
        "KERNEL(sum, SumArgs) {\n",
        "    float value = args.from[blockIdx.x * blockDim.x + threadIdx.x] * FACTOR;\n",
        "    value = block_sum(value);\n",
        "    if (threadIdx.x == 0) args.out[blockIdx.x] = value;\n",
        "}\n",
    );
    std::thread::scope(|scope| {
        for seed in 0..4_u32 {
            scope.spawn(move || {
                let device = EmulatedDevice::open();
                let factor = seed % 2 + 1;
                let source = source(TEXT, &[("FACTOR", &factor.to_string())]);
                let kernel = device.load(&source, &["sum"]).unwrap()[0];
                let values = numbers(64 * 256, seed);
                let from = pinned(&device, &values);
                let out = pinned(&device, &[0.0_f32; 64]);
                for _ in 0..20 {
                    let pointers = [from.pointer(), out.pointer()];
                    launch(&device, kernel, grid(64, 256), &pointers).unwrap();
                }
                let sums = values.chunks(256).map(|chunk| chunk.iter().sum::<f32>());
                let expected: Vec<f32> = sums.map(|sum| sum * factor as f32).collect();
                assert_eq!(read(&out), expected);
            });
        }
    });
}

#[test]
#[should_panic(expected = "something wrote at byte 10 of an allocation of 10 bytes")]
fn a_write_behind_an_allocation_is_found() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct BehindArgs { u8* bytes; };\n",
        "KERNEL(behind, BehindArgs) {\n",
        "    if (threadIdx.x < 11) args.bytes[threadIdx.x] = 1;\n",
        "}\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "behind");
    let memory = DeviceBuffer::new(&device, 10).unwrap();
    launch(&device, kernel, grid(1, 32), &[memory.pointer()]).unwrap();
}

#[test]
fn copies_stay_within_allocations() {
    let device = EmulatedDevice::open();
    let memory = DeviceBuffer::new(&device, 1000).unwrap();
    let host = pinned(&device, &(0..250).collect::<Vec<u32>>());
    let back = pinned(&device, &[0_u32; 250]);
    let copy = |to, from, num_bytes| {
        // SAFETY: these buffers have no other use.
        unsafe { device.copy(Stream::Pages, to, from, num_bytes) }
    };
    copy(memory.pointer().add(40), host.pointer(), 960).unwrap();
    copy(back.pointer(), memory.pointer(), 1000).unwrap();
    let expected: Vec<u32> = std::iter::repeat_n(0, 10).chain(0..240).collect();
    assert_eq!(read(&back), expected);
    let error = copy(memory.pointer().add(41), host.pointer(), 960).unwrap_err();
    assert!(
        error
            .0
            .starts_with("the destination of a copy of 960 bytes")
    );
    assert!(copy(memory.pointer(), host.pointer().add(8), 1000).is_err());
    assert_eq!(copy(DevicePointer::NULL, host.pointer(), 0), Ok(()));
}

#[test]
fn memory_is_limited_and_comes_back() {
    let device = EmulatedDevice::open();
    let half = device.properties().total_bytes / 2;
    let first = DeviceBuffer::new(&device, half).unwrap();
    let second = DeviceBuffer::new(&device, half).unwrap();
    assert!(DeviceBuffer::new(&device, 1).is_err());
    drop((first, second));
    assert!(DeviceBuffer::new(&device, 2 * half).is_ok());
}

#[test]
fn products_are_right_and_their_bits_depend_on_the_number_of_rows() {
    let device = EmulatedDevice::open();
    let (n, k) = (5, 67);
    let mut rows = Vec::new();
    for m in [1, 2, 3, 7] {
        for element in [Element::F32, Element::Bf16] {
            let values: Vec<f32> = numbers(m * k, 9).iter().map(|v| v / 3.0).collect();
            let weights = numbers(n * k, 10);
            let rounded = |values: &[f32]| -> Vec<f32> {
                match element {
                    Element::F32 => values.to_vec(),
                    Element::Bf16 => values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect(),
                }
            };
            let upload = |values: &[f32]| match element {
                Element::F32 => pinned(&device, bytes_of(values)),
                Element::Bf16 => {
                    let values: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
                    pinned(&device, bytes_of(&values))
                }
            };
            let (input, weight) = (upload(&values), upload(&weights));
            let out = pinned(&device, &vec![0.5_f32; m * 8]);
            let product = Product {
                m,
                n,
                k,
                input: input.pointer(),
                weight: weight.pointer(),
                out: out.pointer(),
                out_stride: 8,
                element,
                out_element: Element::F32,
                adds: true,
            };
            // SAFETY: the buffers have the product's sizes, and no other use.
            unsafe { device.multiply(&product) }.unwrap();
            let out = read(&out);
            let (values, weights) = (rounded(&values), rounded(&weights));
            for row in 0..m {
                for column in 0..n {
                    let pairs = (0..k).map(|i| (values[row * k + i], weights[column * k + i]));
                    let expected: f64 = pairs.map(|(a, b)| a as f64 * b as f64).sum();
                    let error = (out[row * 8 + column] as f64 - expected - 0.5).abs();
                    assert!(error < 1e-5, "{m} {element:?} {row} {column}: {error}");
                }
                assert_eq!(
                    out[row * 8 + n..][..8 - n],
                    [0.5; 3],
                    "columns beyond the product"
                );
            }
            if element == Element::F32 {
                rows.push(out[..n].to_vec());
            }
            let product = Product { n: 9, ..product };
            // SAFETY: the product is refused, as its output is larger than its buffer.
            assert!(unsafe { device.multiply(&product) }.is_err());
        }
    }
    assert_ne!(rows[0], rows[1]);
    assert_ne!(rows[1], rows[2]);
}

fn bytes_of<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: the values are plain numbers.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

#[test]
fn a_graph_does_again_what_was_captured() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct CountArgs { u32* counter; };\n",
        "KERNEL(count, CountArgs) { atomic_add(args.counter, 2); }\n",
    );
    let device = EmulatedDevice::open();
    let kernel = load(&device, TEXT, "count");
    let counter = pinned(&device, &[0_u32]);
    let copy = pinned(&device, &[0_u32]);
    let value = || (read(&counter)[0], read(&copy)[0]);
    device.begin_capture().unwrap();
    assert!(device.begin_capture().is_err());
    launch(&device, kernel, grid(2, 32), &[counter.pointer()]).unwrap();
    // SAFETY: both buffers outlive the graph's launches.
    unsafe { device.copy(Stream::Compute, copy.pointer(), counter.pointer(), 4) }.unwrap();
    assert!(device.record(Stream::Compute).is_err());
    let graph = device.end_capture().unwrap();
    assert_eq!(value(), (0, 0), "what is captured does not run");
    for round in 1..4 {
        // SAFETY: as above.
        unsafe { device.launch_graph(graph) }.unwrap();
        assert_eq!(value(), (128 * round, 128 * round));
    }
}

#[test]
fn events_are_forgotten_when_they_were_waited_for() {
    let device = EmulatedDevice::open();
    let event = device.record(Stream::Compute).unwrap();
    assert_eq!(device.is_done(event), Ok(true));
    assert_eq!(device.wait_on(Stream::Pages, event), Ok(()));
    assert_eq!(device.synchronize(event), Ok(()));
    assert!(device.synchronize(event).is_err());
    assert!(device.wait_on(Stream::Pages, event).is_err());
}

/// Runs a test again in a process of its own, where the test calls `launch` and must fail. Returns the text that this
/// process writes to standard error; `None` in the process itself.
fn message_of_fault(test: &str, launch: impl FnOnce(&SharedDevice)) -> Option<String> {
    const VARIABLE: &str = "CORELLA_TEST_FAULT";
    if std::env::var_os(VARIABLE).is_some() {
        launch(&EmulatedDevice::open());
        return None;
    }
    let path = format!("device::emulated::tests::{test}");
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &path, "--nocapture"])
        .env(VARIABLE, "1")
        .output()
        .unwrap();
    assert!(!output.status.success());
    Some(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_fault_names_the_kernel() {
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct AstrayArgs { float* memory; };\n",
        "KERNEL(astray, AstrayArgs) {\n",
        "    if (blockIdx.x == 1 && threadIdx.x == 33) args.memory[64] = 1.0f;\n",
        "}\n",
    );
    let message = message_of_fault("a_fault_names_the_kernel", |device| {
        let kernel = load(device, TEXT, "astray");
        let memory = DeviceBuffer::new(device, 256).unwrap();
        let _ = launch(device, kernel, grid(2, 64), &[memory.pointer()]);
    });
    if let Some(message) = message {
        let expected = "kernel astray, block (1, 0, 0), thread 33: there is no memory at";
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_load_that_is_not_aligned_is_a_fault() {
    // Each half of the 8 bytes is aligned for itself, which suffices for the host.
    const TEXT: &str = concat!(
        "#include \"prelude.cuh\"\n",
        "struct CrookedArgs { u32* memory; };\n",
        "KERNEL(crooked, CrookedArgs) {\n",
        "    const uint2 pair = *reinterpret_cast<const uint2*>(args.memory + threadIdx.x);\n",
        "    args.memory[threadIdx.x] = pair.x ^ pair.y;\n",
        "}\n",
    );
    let message = message_of_fault("a_load_that_is_not_aligned_is_a_fault", |device| {
        let kernel = load(device, TEXT, "crooked");
        let memory = DeviceBuffer::new(device, 256).unwrap();
        let _ = launch(device, kernel, grid(1, 32), &[memory.pointer()]);
    });
    if let Some(message) = message {
        let expected = "kernel crooked, block (0, 0, 0), thread 1: an address is not aligned";
        assert!(message.contains(expected), "{message}");
    }
}
