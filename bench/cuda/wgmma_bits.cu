// Compares the bits of the two ways in which a Hopper GPU multiplies bf16 matrices: mma.sync, by which all kernels
// multiply so far, and wgmma, which is about 1.6 times as fast. If a chain of products has the same bits either way,
// prompts can take wgmma and still equal decode steps.
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a -o /tmp/wgmma_bits bench/cuda/wgmma_bits.cu && /tmp/wgmma_bits
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

constexpr int STEPS = 64, K = 16 * STEPS, ROWS = 64, COLUMNS = 8;

// a is [64][K], b is [8][K], both in bf16; out is [2][64][8].
__global__ void multiply(const uint16_t* a, const uint16_t* b, float* out) {
    // Two core matrices of 8 columns and 16 bytes: inputs 0 to 7 of a step, then 8 to 15.
    __shared__ __align__(128) uint16_t tile[2][8][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row = 16 * warp + g;
    float sync[4] = {}, group[4] = {};
    for (int step = 0; step < STEPS; step++) {
        const int k = 16 * step;
        auto pair = [](const uint16_t* at) { return *reinterpret_cast<const uint32_t*>(at); };
        uint32_t x[4] = {pair(a + row * K + k + 2 * t), pair(a + (row + 8) * K + k + 2 * t),
                         pair(a + row * K + k + 2 * t + 8), pair(a + (row + 8) * K + k + 2 * t + 8)};
        uint32_t y[2] = {pair(b + g * K + k + 2 * t), pair(b + g * K + k + 2 * t + 8)};
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(sync[0]), "+f"(sync[1]), "+f"(sync[2]), "+f"(sync[3])
                     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
        __syncthreads();
        if (threadIdx.x < 128) {
            const int half = threadIdx.x / 64, column = threadIdx.x / 8 % 8, i = threadIdx.x % 8;
            tile[half][column][i] = b[column * K + k + 8 * half + i];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        const uint64_t address = __cvta_generic_to_shared(tile);
        // Core matrices follow each other along k after 128 bytes; there is one along n.
        const uint64_t descriptor = (address >> 4 & 0x3fff) | uint64_t(128 >> 4) << 16 | uint64_t(256 >> 4) << 32;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
                     : "+f"(group[0]), "+f"(group[1]), "+f"(group[2]), "+f"(group[3])
                     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(descriptor));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        const int at = (row + i / 2 * 8) * COLUMNS + 2 * t + i % 2;
        out[at] = sync[i];
        out[ROWS * COLUMNS + at] = group[i];
    }
}

static uint16_t random_bf16(int range) {
    // A normal-like sum of uniforms, with exponents spread over 2^range.
    double value = 0;
    for (int i = 0; i < 4; i++) value += rand() / double(RAND_MAX) - 0.5;
    float number = float(value * (range ? 1 << (rand() % range) : 1));
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return uint16_t(bits >> 16);
}

int main() {
    uint16_t *a, *b;
    float* out;
    cudaMallocHost(&a, ROWS * K * 2);
    cudaMallocHost(&b, COLUMNS * K * 2);
    cudaMallocHost(&out, 2 * ROWS * COLUMNS * 4);
    long differ = 0, wrong = 0, all = 0;
    for (int round = 0; round < 400; round++) {
        const int range = round % 4 * 6;
        for (int i = 0; i < ROWS * K; i++) a[i] = random_bf16(range);
        for (int i = 0; i < COLUMNS * K; i++) b[i] = random_bf16(range);
        multiply<<<1, 128>>>(a, b, out);
        cudaError_t error = cudaDeviceSynchronize();
        if (error != cudaSuccess) return printf("error: %s\n", cudaGetErrorString(error)), 1;
        for (int i = 0; i < ROWS * COLUMNS; i++) {
            auto value = [](uint16_t bits) {
                uint32_t wide = uint32_t(bits) << 16;
                float number;
                memcpy(&number, &wide, 4);
                return double(number);
            };
            double exact = 0, magnitude = 0;
            for (int k = 0; k < K; k++) {
                const double term = value(a[i / COLUMNS * K + k]) * value(b[i % COLUMNS * K + k]);
                exact += term, magnitude += term < 0 ? -term : term;
            }
            for (int way = 0; way < 2; way++) {
                const double error = out[way * ROWS * COLUMNS + i] - exact;
                if (!((error < 0 ? -error : error) <= 1e-5 * magnitude)) wrong++;
            }
            if (memcmp(&out[i], &out[ROWS * COLUMNS + i], 4) != 0) differ++;
            all++;
        }
    }
    printf("%ld of %ld sums differ in bits between mma.sync and wgmma; %ld are far from exact sums\n", differ, all, wrong);
    return wrong != 0;
}
