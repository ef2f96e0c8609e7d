// Checks the bits of linear_hopper.cu's variants, and times them beside the other kernels.
//
//     hopper CUBINS order                    whether the order of 16 inputs matters to a product's bits
//     hopper CUBINS check VARIANT            against linear_narrow.cu, which is compared with sums in f64
//     hopper CUBINS time KERNEL [LIBRARY]    wide, narrow, cublas (of that library) or a variant
//     hopper CUBINS one VARIANT CASE ROWS PARTS    launches, for a profiler
#include <cmath>

#include "layer.hpp"

struct FillArgs {
    u64 at, num;
    float scale;
    u32 seed;
};
struct CompareArgs {
    u64 a, b, num, count;
};
struct ReferenceArgs {
    u64 input, weight, bias, out, before, count, row;
    u32 n, k, epilogue, is_gated;
    float scale, soft_cap;
};
struct OrderArgs {
    u64 a, b, out;
    u32 k, order;
};

// How many words or outputs are wrong, and the first of them.
struct Wrong {
    u64 count, first;
};

class Harness {
  public:
    explicit Harness(const std::string& folder) : gpu(folder), kernels(gpu), counters(gpu.allocate(64)) {
        std::ifstream file(folder + "/variants.txt");
        Variant v;
        while (file >> v.name >> v.channels >> v.rows >> v.stages >> v.blocks >> v.is_persistent >> v.shared_by) {
            variants.push_back(v);
        }
    }

    const Variant* find(const std::string& name) const {
        for (const Variant& variant : variants) {
            if (variant.name == name) return &variant;
        }
        return nullptr;
    }

    void orders();
    int check(const Variant& variant);
    void time(const std::string& what, const char* library);
    void one(const Variant& variant, const char* name, u32 rows, u32 parts);

  private:
    driver::Gpu gpu;
    Kernels kernels;
    u64 counters;
    std::vector<Variant> variants;

    void fill(u64 at, u64 num, float scale, u32 seed, const char* kernel = "fill_bf16") {
        FillArgs args = {at, num, scale, seed};
        gpu.launch(gpu.kernel("helper", kernel), 1056, 1, 1, 512, 0, &args);
    }

    void fill_floats(u64 at, u64 num, float scale, u32 seed) { fill(at, num, scale, seed, "fill_float"); }

    void clear_counters() {
        OK(cuMemsetD8Async(counters, 0, 8, gpu.stream()));
        OK(cuMemsetD8Async(counters + 8, 0xff, 8, gpu.stream()));
    }

    Wrong read_counters() {
        Wrong wrong;
        gpu.synchronize();
        OK(cuMemcpyDtoH_v2(&wrong, counters, sizeof wrong));
        return wrong;
    }

    Wrong compare(u64 a, u64 b, u64 words) {
        clear_counters();
        CompareArgs args = {a, b, words, counters};
        gpu.launch(gpu.kernel("helper", "compare"), 1056, 1, 1, 512, 0, &args);
        return read_counters();
    }

    // What of a row is far from sums in f64.
    Wrong far_from_sums(const Layer& layer, u64 input, u64 out, u64 before, u32 row) {
        const Case& shape = *layer.shape;
        clear_counters();
        ReferenceArgs args = {input,          layer.weight, layer.bias,    out,     before,
                              counters,       row,          shape.n,       shape.k, shape.epilogue,
                              shape.is_gated, shape.scale,  shape.soft_cap};
        gpu.launch(gpu.kernel("helper", "reference"), 528, 1, 1, 256, 0, &args);
        return read_counters();
    }

    template <class Launch>
    float milliseconds(Launch launch, int repeats);
    int check_narrow(const Layer& layer, u64 input, u64 expected, u64 actual, u64 before, u32 rows);
    void poison(const Case& shape, u64 out, u32 rows);
};

static u64 words_of(const Case& shape, u32 rows) { return (out_bytes(shape, rows) + 65535) / 4; }

// What follows the outputs must stay as it is. What is added to is the same each time.
void Harness::poison(const Case& shape, u64 out, u32 rows) {
    OK(cuMemsetD8Async(out, 0xff, words_of(shape, rows) * 4, gpu.stream()));
    if (shape.epilogue == ADD_FLOAT) fill_floats(out, out_bytes(shape, rows) / 4, 1.0f, 9);
}

// Narrow kernels of each size beside each other and beside sums in f64.
int Harness::check_narrow(const Layer& layer, u64 input, u64 expected, u64 actual, u64 before, u32 rows) {
    const Case& shape = *layer.shape;
    const u64 words = words_of(shape, rows);
    int bad = 0;
    for (const u32 tiles : {1u, 2u}) {
        poison(shape, actual, rows);
        kernels.narrow(layer, input, actual, rows, tiles, true);
        const Wrong wrong = compare(expected, actual, words);
        if (wrong.count == 0) continue;
        bad++;
        printf("  narrow %u %s rows %u: %llu of %llu words differ, first %llu\n", tiles, shape.name, rows, wrong.count,
               words, wrong.first);
    }
    if (rows == 64 && shape.k % 128 == 0) {
        poison(shape, actual, rows);
        kernels.narrow(layer, input, actual, rows, 4, false);
        const Wrong wrong = compare(expected, actual, words);
        printf(
            "  control %s: %llu of %llu words differ where lanes do not exchange; 0 would mean that the check is "
            "blind\n",
            shape.name, wrong.count, words);
    }
    for (const u32 row : {0u, rows - 1}) {
        const Wrong wrong = far_from_sums(layer, input, expected, before, row);
        if (wrong.count == 0) continue;
        bad++;
        printf("  narrow %s rows %u row %u: %llu are far from sums in f64, first channel %llu\n", shape.name, rows, row,
               wrong.count, wrong.first);
    }
    return bad;
}

int Harness::check(const Variant& variant) {
    u64 largest = 0;
    for (const Case& shape : CASES) largest = std::max(largest, out_bytes(shape, shape.max_rows) + 65536);
    const u64 input = gpu.allocate(2048ull * 14336 * 2), bias = gpu.allocate(151936 * 4);
    const u64 weight = gpu.allocate(128256ull * 4096 * 2);
    const u64 expected = gpu.allocate(largest), actual = gpu.allocate(largest), before = gpu.allocate(largest);
    fill_floats(bias, 151936, 0.5f, 77);
    const bool is_first = variant.name == variants[0].name;
    int bad = 0, num = 0;
    u32 seed = 1;
    for (const Case& shape : CASES) {
        fill(input, 2048ull * shape.k, 1.0f, seed++);
        fill(weight, u64(shape.n) * shape.k, 1.0f / std::sqrt(float(shape.k)), seed++);
        const Layer layer = {&shape, weight, shape.has_bias ? bias : 0};
        for (const u32 wanted : {33u, 64u, 1u, 8u, 65u, 128u, 129u, 200u, 2048u}) {
            const u32 rows = std::min(wanted, shape.max_rows);
            const u64 words = words_of(shape, rows);
            poison(shape, expected, rows);
            if (shape.epilogue == ADD_FLOAT) fill_floats(before, out_bytes(shape, rows) / 4, 1.0f, 9);
            kernels.narrow(layer, input, expected, rows, 4, true);
            if (is_first && rows <= 200) bad += check_narrow(layer, input, expected, actual, before, rows);
            for (u32 parts = 1; parts <= 8; parts *= 2) {
                if (!Kernels::can_share(variant, layer, parts) || (rows > 300 && parts > 1)) continue;
                poison(shape, actual, rows);
                kernels.hopper(variant, layer, input, actual, rows, parts);
                const Wrong wrong = compare(expected, actual, words);
                num++;
                if (wrong.count == 0) continue;
                if (++bad < 12) {
                    printf("  %s %s rows %u parts %u: %llu of %llu words differ, first %llu\n", variant.name.c_str(),
                           shape.name, rows, parts, wrong.count, words, wrong.first);
                    fflush(stdout);
                }
            }
            if (rows < wanted) break;
        }
    }
    printf("check %-7s %d of %d bad\n", variant.name.c_str(), bad, num);
    return bad;
}

// The median of three runs of many launches.
template <class Launch>
float Harness::milliseconds(Launch launch, int repeats) {
    static driver::Event begin = nullptr, end = nullptr;
    if (!begin) {
        OK(cuEventCreate(&begin, 0));
        OK(cuEventCreate(&end, 0));
    }
    for (int i = 0; i < 3; i++) launch(i);
    std::vector<float> times;
    for (int round = 0; round < 3; round++) {
        OK(cuEventRecord(begin, gpu.stream()));
        for (int i = 0; i < repeats; i++) launch(i);
        OK(cuEventRecord(end, gpu.stream()));
        gpu.synchronize();
        float time;
        OK(cuEventElapsedTime(&time, begin, end));
        times.push_back(time / repeats);
    }
    std::sort(times.begin(), times.end());
    return times[1];
}

// cuBLAS, if there is one.
class Blas {
  public:
    Blas(driver::Gpu& gpu, const char* path) {
        void* library = path ? dlopen(path, RTLD_NOW | RTLD_GLOBAL) : nullptr;
        if (!library) return;
        const auto create = reinterpret_cast<int (*)(void**)>(dlsym(library, "cublasCreate_v2"));
        const auto take_stream = reinterpret_cast<int (*)(void*, void*)>(dlsym(library, "cublasSetStream_v2"));
        const auto take_memory =
            reinterpret_cast<int (*)(void*, void*, size_t)>(dlsym(library, "cublasSetWorkspace_v2"));
        gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
        if (!create || !take_stream || !take_memory || !gemm || create(&handle)) return;
        const u64 num_bytes = 64 << 20;
        is_open = take_stream(handle, gpu.stream()) == 0 &&
                  take_memory(handle, reinterpret_cast<void*>(gpu.allocate(num_bytes)), num_bytes) == 0;
    }

    bool is_open = false;

    void multiply(const Layer& layer, u64 input, u64 out, u32 rows) const {
        constexpr int TRANSPOSED = 1, AS_IT_IS = 0, BF16 = 14, F32 = 0, COMPUTE_F32 = 68, DEFAULT = -1;
        const int n = layer.shape->n, k = layer.shape->k;
        const float one = 1, zero = 0;
        const int result = gemm(handle, TRANSPOSED, AS_IT_IS, n, rows, k, &one, reinterpret_cast<void*>(layer.weight),
                                BF16, k, reinterpret_cast<void*>(input), BF16, k, &zero, reinterpret_cast<void*>(out),
                                layer.shape->epilogue == STORE_ELEMENT ? BF16 : F32, n, COMPUTE_F32, DEFAULT);
        if (result == 0) return;
        printf("ERROR cuBLAS answers %d\n", result);
        _Exit(3);
    }

  private:
    using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                         const void*, void*, int, int, int, int);
    void* handle = nullptr;
    Gemm gemm = nullptr;
};

void Harness::time(const std::string& what, const char* library) {
    const Variant* variant = find(what);
    const bool is_narrow = what == "narrow", is_blas = what == "cublas";
    const Blas blas(gpu, is_blas ? library : nullptr);
    if (is_blas && !blas.is_open) {
        printf("ERROR there is no cuBLAS\n");
        return;
    }
    if (!variant && !is_narrow && !is_blas && what != "wide") {
        printf("ERROR there is no kernel %s\n", what.c_str());
        return;
    }
    // Weights are read from places by turns, so that none is in a cache.
    const u64 pool_bytes = 1200ull << 20;
    const u64 pool = gpu.allocate(pool_bytes), input = gpu.allocate(2048ull * 14336 * 2);
    const u64 out = gpu.allocate(2048ull * 28672 * 4), bias = gpu.allocate(151936 * 4);
    const u64 partials = gpu.allocate(16ull * 256 * 28672 * 4);
    fill(input, 2048ull * 14336, 1.0f, 1);
    fill(pool, pool_bytes / 2, 1.0f / 64, 2);
    fill_floats(bias, 151936, 0.5f, 77);
    std::vector<u32> row_counts = {2048, 64, 128, 256};
    if (is_narrow) row_counts = {1, 8, 32};
    if (variant) {
        if (variant->is_persistent)
            row_counts = {2048, 512, 256};
        else if (variant->rows == 64)
            row_counts = {64, 128};
        else
            row_counts = {64, 128, 256};
    }
    for (const u32 rows : row_counts) {
        // Milliseconds, bytes of weights and operations of each model's matrices but the head; those of the narrow
        // kernel without an exchange beside them.
        double total[NUM_MODELS] = {}, bytes[NUM_MODELS] = {}, before[NUM_MODELS] = {};
        for (u32 index = 0; index < NUM_MODELS * MODEL_CASES; index++) {
            const Case& shape = CASES[index];
            const bool is_head = index % MODEL_CASES == HEAD;
            if (is_head && rows > 128) continue;
            const u64 weight_bytes = u64(shape.n) * shape.k * 2;
            const u64 copies = std::max(1ull, std::min(pool_bytes / weight_bytes, (300ull << 20) / weight_bytes + 1));
            const auto layer = [&](int i) {
                return Layer{&shape, pool + i % copies * weight_bytes, shape.has_bias ? bias : 0};
            };
            const int repeats = rows >= 512 ? 8 : std::max(8, std::min(48, int((2000ull << 20) / weight_bytes)));
            const auto report = [&](const std::string& how, float time) {
                const double flops = 2.0 * rows * shape.n * shape.k;
                const u64 moved = weight_bytes + u64(rows) * shape.k * 2 +
                                  out_bytes(shape, rows) * (shape.epilogue == ADD_FLOAT ? 2 : 1);
                printf("%-8s %-7s rows %-4u %-9s %9.2f us %7.1f TFLOP/s %7.0f GB/s\n", what.c_str(), shape.name, rows,
                       how.c_str(), time * 1e3, flops / time * 1e-9, moved / time * 1e-6);
                fflush(stdout);
            };
            float best = 1e9f, without = 0;
            if (is_narrow) {
                const u32 tiles = rows <= 8 ? 1 : 4;
                const auto run = [&](bool exchange) {
                    return milliseconds([&](int i) { kernels.narrow(layer(i), input, out, rows, tiles, exchange); },
                                        repeats);
                };
                without = run(false);
                report("before", without);
                best = run(true);
                report("exchange", best);
            } else if (is_blas) {
                best = milliseconds([&](int i) { blas.multiply(layer(i), input, out, rows); }, repeats);
                report("", best);
            } else if (!variant) {
                std::string how;
                best = milliseconds([&](int i) { how = kernels.wide(layer(i), input, out, partials, rows); }, repeats);
                report(how, best);
            } else {
                for (u32 parts = 1; parts <= 8; parts *= 2) {
                    const bool is_planned = parts == kernels.planned_parts(*variant, layer(0), rows);
                    if (!Kernels::can_share(*variant, layer(0), parts) || (rows > 128 && !is_planned)) continue;
                    const float time = milliseconds(
                        [&](int i) { kernels.hopper(*variant, layer(i), input, out, rows, parts); }, repeats);
                    report("parts " + std::to_string(parts) + (is_planned ? "*" : ""), time);
                    best = std::min(best, time);
                }
            }
            if (is_head) continue;
            const u32 model = index / MODEL_CASES;
            total[model] += best;
            before[model] += without;
            bytes[model] += weight_bytes;
        }
        printf("TABLE %-8s rows %-4u:", what.c_str(), rows);
        const char* names[NUM_MODELS] = {"Llama layer", " Qwen layer"};
        for (u32 model = 0; model < NUM_MODELS; model++) {
            printf(" %s %8.1f us %6.1f TFLOP/s %5.0f GB/s", names[model], total[model] * 1e3,
                   rows * bytes[model] / total[model] * 1e-9, bytes[model] / total[model] * 1e-6);
            if (is_narrow) printf(" (%.1f us without exchange)", before[model] * 1e3);
        }
        printf("\n");
    }
}

void Harness::orders() {
    const u32 blocks = 2048, k = 1024, num_sums = blocks * 16 * 8;
    const u64 a = gpu.allocate(u64(blocks) * 16 * k * 2), b = gpu.allocate(u64(blocks) * 8 * k * 2);
    const u64 out[2] = {gpu.allocate(num_sums * 4), gpu.allocate(num_sums * 4)};
    fill(a, u64(blocks) * 16 * k, 1, 3);
    fill(b, u64(blocks) * 8 * k, 1, 4);
    for (const u32 order : {1u, 2u, 3u, 4u}) {
        for (const u32 which : {0u, 1u}) {
            OrderArgs args = {a, b, out[which], k, which ? order : 0};
            gpu.launch(gpu.kernel("helper", "order"), blocks, 1, 1, 32, 0, &args);
        }
        const Wrong wrong = compare(out[0], out[1], num_sums);
        printf("TABLE order %u of 16 inputs: %llu of %u sums differ\n", order, wrong.count, num_sums);
    }
}

void Harness::one(const Variant& variant, const char* name, u32 rows, u32 parts) {
    for (const Case& shape : CASES) {
        if (strcmp(shape.name, name)) continue;
        const u64 input = gpu.allocate(u64(rows) * shape.k * 2), weight = gpu.allocate(u64(shape.n) * shape.k * 2);
        const u64 out = gpu.allocate(out_bytes(shape, rows));
        fill(input, u64(rows) * shape.k, 1, 1);
        fill(weight, u64(shape.n) * shape.k, 0.02f, 2);
        for (int i = 0; i < 2; i++) kernels.hopper(variant, {&shape, weight, 0}, input, out, rows, parts);
        gpu.synchronize();
    }
}

int main(int argc, char** argv) {
    if (argc < 3) return 9;
    Harness harness(argv[1]);
    const std::string mode = argv[2];
    const Variant* variant = argc > 3 ? harness.find(argv[3]) : nullptr;
    if (mode == "order") {
        harness.orders();
        return 0;
    }
    if (mode == "time" && argc > 3) {
        harness.time(argv[3], argc > 4 ? argv[4] : nullptr);
        return 0;
    }
    if (mode == "check" && variant) return harness.check(*variant) != 0;
    if (mode == "one" && variant && argc > 6) {
        harness.one(*variant, argv[4], u32(atoi(argv[5])), u32(atoi(argv[6])));
        return 0;
    }
    return 9;
}
