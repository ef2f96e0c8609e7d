// Linear layers of models, and how each kernel is launched for them, as `linear.rs` plans it.
#pragma once
#include <algorithm>
#include <vector>

#include "driver.hpp"

// Parameters, as in linear_args.cuh and linear_hopper.cu.
struct LinearArgs {
    u64 input, weight, group_scales, group_minimums, channel_scales, bias, out, partials;
    u32 rows, n, k, num_splits, epilogue;
    float scale, soft_cap;
    u32 num_parts, zero, padding;
};
static_assert(sizeof(LinearArgs) == 104, "");
struct alignas(64) HopperArgs {
    driver::TensorMap weights, inputs;
    LinearArgs linear;
    u32 padding[6];
};
static_assert(sizeof(HopperArgs) == 384, "");

enum Epilogue : u32 { STORE_ELEMENT, STORE_FLOAT, ADD_FLOAT };

struct Case {
    const char* name;
    u32 n, k;
    bool is_gated;
    Epilogue epilogue;
    bool has_bias;
    float scale, soft_cap;
    // A prompt's in a layer, few in a head.
    u32 max_rows;
};

// Llama 3 8B (L) and Qwen3-0.6B (Q), their heads last, and shapes that fill no tile.
static const Case CASES[] = {
    {"L.qkv", 6144, 4096, false, STORE_ELEMENT, false, 1, 0, 2048},
    {"L.o", 4096, 4096, false, ADD_FLOAT, false, 1, 0, 2048},
    {"L.gate", 28672, 4096, true, STORE_ELEMENT, false, 1, 0, 2048},
    {"L.down", 4096, 14336, false, ADD_FLOAT, false, 0.5f, 0, 2048},
    {"L.head", 128256, 4096, false, STORE_FLOAT, false, 1, 0, 200},
    {"Q.qkv", 4096, 1024, false, STORE_ELEMENT, true, 1, 0, 2048},
    {"Q.o", 1024, 2048, false, ADD_FLOAT, true, 1, 0, 2048},
    {"Q.gate", 6144, 1024, true, STORE_ELEMENT, true, 1, 0, 2048},
    {"Q.down", 1024, 3072, false, ADD_FLOAT, false, 1, 0, 2048},
    {"Q.head", 151936, 1024, false, STORE_FLOAT, false, 1, 30, 200},
    {"odd", 1000, 1032, false, STORE_ELEMENT, true, 1, 0, 300},
    {"odd.n", 1001, 520, false, ADD_FLOAT, true, 1.5f, 0, 300},
    {"tiny", 72, 136, false, STORE_FLOAT, true, 2, 5, 300},
    {"odd.gate", 1008, 1112, true, STORE_ELEMENT, true, 1, 0, 300},
};
// Matrices of each model, the head among them.
constexpr u32 NUM_MODELS = 2, MODEL_CASES = 5, HEAD = 4;

// A line of variants.txt: one way to compile linear_hopper.cu.
struct Variant {
    std::string name;
    u32 channels, rows, stages, blocks, is_persistent, shared_by;
};

static u32 div_up(u32 a, u32 b) { return (a + b - 1) / b; }

static u64 out_bytes(const Case& layer, u32 rows) {
    return u64(rows) * (layer.is_gated ? layer.n / 2 : layer.n) * (layer.epilogue == STORE_ELEMENT ? 2 : 4);
}

// `num_splits` of linear.rs.
static u32 num_splits(u32 n, u32 k) {
    const u32 units = div_up(k, 128), tiles = div_up(n, 16), most = std::min(units / 2, 16u);
    u32 splits = 1;
    while (2 * splits <= most && (splits < 4 || splits * tiles < 12 * 132)) splits *= 2;
    return splits;
}

struct Layer {
    const Case* shape;
    u64 weight, bias;

    u32 splits() const { return num_splits(shape->n, shape->k); }

    LinearArgs args(u64 input, u64 out, u32 rows) const {
        LinearArgs args = {};
        args.input = input;
        args.weight = weight;
        args.bias = bias;
        args.out = out;
        args.rows = rows;
        args.n = shape->n;
        args.k = shape->k;
        args.num_splits = splits();
        args.epilogue = shape->epilogue;
        args.scale = shape->scale;
        args.soft_cap = shape->soft_cap;
        args.num_parts = 1;
        return args;
    }

    std::string suffix() const { return shape->is_gated ? "_gated" : "_plain"; }
};

class Kernels {
  public:
    explicit Kernels(driver::Gpu& gpu) : gpu(gpu) {}

    // Rows in blocks of 8 `tiles`.
    void narrow(const Layer& layer, u64 input, u64 out, u32 rows, u32 tiles, bool lanes_exchange) {
        LinearArgs args = layer.args(input, out, rows);
        const std::string units = layer.shape->k % 128 == 0 ? "_whole" : "_odd";
        const std::string order = lanes_exchange ? "_exchange" : "_before";
        const auto kernel =
            gpu.kernel("narrow_" + std::to_string(tiles) + layer.suffix() + units + order, "linear_narrow");
        const u32 shared_bytes = layer.splits() * 8 * tiles * 20 * 4;
        gpu.launch(kernel, div_up(args.n, 16), div_up(rows, 8 * tiles), 1, 32 * layer.splits(), shared_bytes, &args);
    }

    // Returns which tile was taken, and how many blocks share one.
    std::string wide(const Layer& layer, u64 input, u64 out, u64 partials, u32 rows) {
        LinearArgs args = layer.args(input, out, rows);
        args.partials = partials;
        const bool is_large = rows > 64 && 4 * div_up(rows, 128) * div_up(args.n, 128) >= 3 * gpu.num_multiprocessors();
        const u32 tile = is_large ? 128 : 64, stages = is_large ? 3 : 5;
        const u32 row_tiles = div_up(rows, tile), tiles = row_tiles * div_up(args.n, tile);
        u32 parts = 1;
        while (!is_large && 2 * parts <= layer.splits() && 2 * parts * tiles <= 4 * gpu.num_multiprocessors())
            parts *= 2;
        args.num_parts = parts;
        const u32 bands = parts == 1 ? div_up(row_tiles, 16) : 1;
        const std::string size = is_large ? "large" : "small";
        gpu.launch(gpu.kernel("wide_" + size + layer.suffix(), "linear_wide"), div_up(row_tiles, bands),
                   div_up(args.n, tile), bands * parts, 128, stages * 2 * tile * 64 + tile * tile * 4, &args);
        if (parts > 1) {
            gpu.launch(gpu.kernel("finish" + layer.suffix(), "linear_finish"), rows, div_up(args.n, 1024), 1, 128, 0,
                       &args);
        }
        return size + "/" + std::to_string(parts);
    }

    // Whether `parts` blocks may share a tile: each keeps the sums of two splits at most.
    static bool can_share(const Variant& variant, const Layer& layer, u32 parts) {
        if (parts == 1) return true;
        return !variant.is_persistent && parts <= std::min(8u, layer.splits()) && layer.splits() <= 2 * parts;
    }

    // Among how many blocks `hopper.rs` divides a tile.
    u32 planned_parts(const Variant& variant, const Layer& layer, u32 rows) const {
        const u32 tiles = div_up(rows, variant.rows) * div_up(layer.shape->n, variant.channels);
        u32 best = 1;
        for (u32 parts = 2; parts <= 8; parts *= 2) {
            const bool has_places = parts * tiles <= 2 * variant.blocks * gpu.num_multiprocessors();
            if (can_share(variant, layer, parts) && has_places) best = parts;
        }
        return best;
    }

    void hopper(const Variant& variant, const Layer& layer, u64 input, u64 out, u32 rows, u32 parts) {
        HopperArgs args = {};
        args.weights = weights(variant, layer);
        const u64 lens[] = {layer.shape->k, rows}, strides[] = {layer.shape->k * 2ull};
        const u32 box[] = {64, variant.rows};
        args.inputs = driver::Gpu::tensor_map(input, 2, lens, strides, box);
        args.linear = layer.args(input, out, rows);
        args.linear.num_parts = parts;
        const u32 cluster = variant.shared_by * parts, warpgroups = variant.channels / 64;
        u32 clusters = div_up(rows, variant.rows * variant.shared_by) * div_up(layer.shape->n, variant.channels);
        if (variant.is_persistent) clusters = std::min(clusters, variant.blocks * gpu.num_multiprocessors() / cluster);
        const u32 stage_bytes = (variant.channels + variant.rows) * 128 + 16;
        const u32 result_bytes = variant.is_persistent * warpgroups * 32 * 68 * 4;
        gpu.launch(gpu.kernel("hopper_" + variant.name + layer.suffix(), "linear_hopper"), clusters * cluster, 1, 1,
                   128 * (warpgroups + 1), 1024 + variant.stages * stage_bytes + result_bytes, &args, cluster);
    }

  private:
    driver::Gpu& gpu;
    std::map<std::string, driver::TensorMap> maps;

    driver::TensorMap weights(const Variant& variant, const Layer& layer) {
        const u64 n = layer.shape->n, k = layer.shape->k;
        const std::string key = variant.name + " " + std::to_string(layer.weight) + " " + layer.shape->name;
        const auto found = maps.find(key);
        if (found != maps.end()) return found->second;
        const u32 channels = variant.channels / variant.shared_by;
        if (!layer.shape->is_gated) {
            const u64 lens[] = {k, n}, strides[] = {k * 2};
            const u32 box[] = {64, channels};
            return maps[key] = driver::Gpu::tensor_map(layer.weight, 2, lens, strides, box);
        }
        // 8 gates, then the 8 values that they gate.
        const u64 lens[] = {k, 8, 2, n / 16}, strides[] = {k * 2, n / 2 * k * 2, k * 16};
        const u32 box[] = {64, 8, 2, channels / 16};
        return maps[key] = driver::Gpu::tensor_map(layer.weight, 4, lens, strides, box);
    }
};
