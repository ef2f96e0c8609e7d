// Draws tokens: the kernels for draws that need sorted tokens, because of top-k, top-p or log-probabilities of the most
// likely tokens. They run between `sample_weigh` and `sample_finish`.
#include "sample.cuh"

constexpr u32 NO_CLASS = ~0u;
constexpr u64 NO_BOUND = ~0ull;

// Finds the highest bin that, with all bins above it, holds at least `num_wanted` tokens, or else bin 0. Writes the bin
// to found[0], and the number of tokens in the bins above it to found[1]. `groups` has room for NUM_BINS / 32.
DEVICE void find_from_top(const u32* bins, u32 num_wanted, u32* groups, u32* found) {
    const u32 num_groups = NUM_BINS / 32;
    const u32 thread = threadIdx.x;
    if (thread < num_groups) {
        u32 sum = 0;
        // Neighbouring threads begin with different banks.
        for (u32 i = 0; i < 32; i++) sum += bins[thread * 32 + (i + thread) % 32];
        groups[thread] = sum;
    }
    __syncthreads();
    if (thread == 0) {
        u32 above = 0;
        u32 group = num_groups - 1;
        while (group > 0 && above + groups[group] < num_wanted) above += groups[group--];
        u32 bin = group * 32 + 31;
        while (bin > group * 32 && above + bins[bin] < num_wanted) above += bins[bin--];
        found[0] = bin;
        found[1] = above;
    }
    __syncthreads();
}

// Finds the size class in which the nucleus ends, and the last bin of the tokens that must be sorted. Grid: (1, draws).
KERNEL_OF(sample_select, SampleArgs, THREADS, 4) {
    __shared__ double class_sums[CLASS_STRIDE];
    __shared__ u32 bins[NUM_BINS];
    __shared__ u32 groups[NUM_BINS / 32];
    __shared__ u32 found[2];
    __shared__ u32 num_classes;
    const u32 index = blockIdx.y;
    const Draw draw = args.draws[index];
    if (draw.kind == NOTHING) return;
    const SlotParams params = args.slots[draw.slot];
    const Needs needs = needs_of(draw, params, args.vocab_size);
    DrawWork* work = &args.work[index];
    if (!(needs.has_nucleus || needs.num_leading > 0) || error_of(*work) != OK) return;

    const u32 thread = threadIdx.x;
    if (thread == 0) num_classes = 0;
    __syncthreads();
    const u64* classes = args.classes + (u64)index * CLASS_STRIDE;
    if (needs.has_nucleus) {
        u32 end = 0;
        for (u32 i = thread; i < NUM_CLASSES; i += THREADS) {
            u64 packed = classes[i];
            class_sums[i] = packed != 0 ? class_sum(i, packed) : 0.0;
            if (packed != 0) end = i + 1;
        }
        if (end > 0) atomic_max(&num_classes, end);
    }
    if (needs.num_leading > 0) {
        for (u32 i = thread; i < NUM_BINS; i += THREADS) {
            bins[i] = args.bins[(u64)index * NUM_BINS + i];
        }
    }
    __syncthreads();
    if (needs.num_leading > 0) {
        find_from_top(bins, needs.num_leading, groups, found);
        if (thread == 0) {
            work->last_bin = found[0];
            work->collects_leading = found[1] + bins[found[0]] <= LIST;
        }
    }
    // The second warp does this while the first one continues.
    if (needs.has_nucleus && thread == 32) {
        double total = 0.0;
        for (u32 i = 0; i < num_classes; i++) total += class_sums[i];
        double missing = (double)params.top_p * total;
        u32 last = 0;
        while (last < num_classes && !(missing <= class_sums[last])) missing -= class_sums[last++];
        bool is_found = last < num_classes;
        work->missing = missing;
        work->last_class = is_found ? last : NO_CLASS;
        work->collects_members = is_found && (classes[last] >> 40) <= LIST;
    }
}

// Collects the members of the last class and the leading tokens, in any order, where they fit into
// lists. Grid: (ranges, draws).
KERNEL_OF(sample_gather, SampleArgs, THREADS, 4) {
    const u32 index = blockIdx.y;
    const Draw draw = args.draws[index];
    if (draw.kind == NOTHING) return;
    const SlotParams params = args.slots[draw.slot];
    const Needs needs = needs_of(draw, params, args.vocab_size);
    DrawWork* work = &args.work[index];
    if (error_of(*work) != OK) return;
    const bool has_members = needs.has_nucleus && work->collects_members;
    const bool has_leading = needs.num_leading > 0 && work->collects_leading;
    if (!(has_members || has_leading)) return;

    const float* logits = args.logits + (u64)draw.row * args.vocab_size;
    const float max_logit = logit_of(work->best);
    const u32 last_class = work->last_class;
    const u32 last_bin = work->last_bin;
    u64* members = args.lists + (u64)index * 2 * LIST;
    u64* leading = members + LIST;
    const u32 end = min(args.vocab_size, (blockIdx.x + 1) * RANGE);
    for (u32 token = blockIdx.x * RANGE + threadIdx.x; token < end; token += THREADS) {
        float logit = logits[token];
        if (has_members) {
            float weight = weight_at(logit, max_logit, params.temperature);
            if (weight > 0.0f && class_of(weight) == last_class) {
                members[atomic_add(&work->num_members, 1u)] = weight_key(weight, token);
            }
        }
        if (has_leading && logit > float_of(NEG_INF_BITS) && bin_of(logit, max_logit) >= last_bin) {
            leading[atomic_add(&work->num_leading, 1u)] = logit_key(logit, token);
        }
    }
}

// Sorts `count` keys in a list of LIST, the largest first.
DEVICE void sort_keys(u64* list, u32 count) {
    u32 len = 2;
    while (len < count) len *= 2;
    for (u32 i = count + threadIdx.x; i < len; i += THREADS) list[i] = 0;
    __syncthreads();
    for (u32 run = 2; run <= len; run *= 2) {
        for (u32 stride = run / 2; stride > 0; stride /= 2) {
            for (u32 i = threadIdx.x; i < len / 2; i += THREADS) {
                u32 low = i / stride * 2 * stride + i % stride;
                u32 high = low + stride;
                bool is_descending = (low & run) == 0;
                u64 a = list[low];
                u64 b = list[high];
                if ((a < b) == is_descending) {
                    list[low] = b;
                    list[high] = a;
                }
            }
            __syncthreads();
        }
    }
}

// The keys of a row's tokens by logit, without tokens that cannot be drawn.
struct LogitKeys {
    const float* logits;

    __device__ __forceinline__ u64 operator()(u32 token) const {
        float logit = logits[token];
        return logit > float_of(NEG_INF_BITS) ? logit_key(logit, token) : 0;
    }
};

// The keys of the members of a class by weight.
struct MemberKeys {
    const float* logits;
    float max_logit;
    float temperature;
    u32 size_class;

    __device__ __forceinline__ u64 operator()(u32 token) const {
        float weight = weight_at(logits[token], max_logit, temperature);
        return weight > 0.0f && class_of(weight) == size_class ? weight_key(weight, token) : 0;
    }
};

// Shared memory of a search.
struct Search {
    u64* list;
    u32* bins;
    u32* groups;
    u32* found;
    u32* count;
};

// Puts the largest keys below `bound` into the list, in order, and returns their number: `num_wanted`, or fewer if the
// row has fewer. It finds the least of these keys digit by digit.
template <class Keys>
DEVICE u32 next_keys(const Keys& keys, u32 vocab_size, u64 bound, u32 num_wanted,
                         const Search& search) {
    const u32 thread = threadIdx.x;
    u64 prefix = 0;
    u32 num_missing = num_wanted;
    // Keys have 52 bits: digits of 11 bits, then one of 8.
    u32 shift = 52;
    while (shift > 0) {
        u32 width = min(shift, 11u);
        shift -= width;
        __syncthreads();
        for (u32 i = thread; i < NUM_BINS; i += THREADS) search.bins[i] = 0;
        __syncthreads();
        for (u32 token = thread; token < vocab_size; token += THREADS) {
            u64 key = keys(token);
            if (key != 0 && key < bound && key >> shift >> width == prefix) {
                atomic_add(&search.bins[(u32)(key >> shift) & ((1u << width) - 1)], 1u);
            }
        }
        __syncthreads();
        find_from_top(search.bins, num_missing, search.groups, search.found);
        prefix = prefix << width | search.found[0];
        num_missing -= search.found[1];
    }
    if (thread == 0) *search.count = 0;
    __syncthreads();
    for (u32 token = thread; token < vocab_size; token += THREADS) {
        u64 key = keys(token);
        if (key != 0 && key < bound && key >= prefix) {
            search.list[atomic_add(search.count, 1u)] = key;
        }
    }
    __syncthreads();
    u32 count = *search.count;
    sort_keys(search.list, count);
    return count;
}

// Finds the cut of top-p and min-p, draws if top-k is set, and lists the most likely tokens. Lists that `sample_gather`
// could not fill are made here, LIST keys at a time. Grid: (1, draws).
KERNEL_OF(sample_refine, SampleArgs, THREADS, 4) {
    __shared__ u64 list[LIST];
    __shared__ float weights[LIST];
    __shared__ u32 bins[NUM_BINS];
    __shared__ u32 groups[NUM_BINS / 32];
    __shared__ u32 found[2];
    __shared__ u32 count_of_list;
    __shared__ bool is_done;
    const u32 index = blockIdx.y;
    const Draw draw = args.draws[index];
    if (draw.kind == NOTHING) return;
    const SlotParams params = args.slots[draw.slot];
    const u32 vocab_size = args.vocab_size;
    const Needs needs = needs_of(draw, params, vocab_size);
    DrawWork* work = &args.work[index];
    if (!(needs.has_nucleus || needs.num_leading > 0) || error_of(*work) != OK) return;

    const u32 thread = threadIdx.x;
    const float* logits = args.logits + (u64)draw.row * vocab_size;
    const float max_logit = logit_of(work->best);
    const u64* members = args.lists + (u64)index * 2 * LIST;
    const u64* leading = members + LIST;
    const Search search = {list, bins, groups, found, &count_of_list};

    if (needs.has_nucleus) {
        float cut_weight = 0.0f;
        u32 cut_last = ~0u;
        const u32 last_class = work->last_class;
        const bool fits = work->collects_members;
        const MemberKeys keys = {logits, max_logit, params.temperature, last_class};
        double missing = work->missing;
        u64 bound = NO_BOUND;
        if (thread == 0) is_done = last_class == NO_CLASS;
        __syncthreads();
        while (!is_done) {
            u32 count = 0;
            if (fits) {
                count = work->num_members;
                for (u32 i = thread; i < count; i += THREADS) list[i] = members[i];
                sort_keys(list, count);
            } else {
                count = next_keys(keys, vocab_size, bound, LIST, search);
            }
            // Only the first thread adds up the weights; the other threads need the bound.
            if (thread == 0) {
                u32 i = 0;
                while (i < count) {
                    cut_weight = weight_of(list[i]);
                    cut_last = token_of(list[i]);
                    missing -= (double)cut_weight;
                    if (missing <= 0.0) break;
                    i++;
                }
                is_done = i < count || fits || count < LIST;
            }
            bound = count > 0 ? list[count - 1] : 0;
            __syncthreads();
        }
        if (thread == 0) {
            float min_p = min(params.min_p, 1.0f);
            bool is_min_p = min_p > cut_weight;
            work->cut_weight = is_min_p ? min_p : cut_weight;
            work->cut_last = is_min_p ? ~0u : cut_last;
        }
        __syncthreads();
    }
    if (needs.num_leading == 0) return;

    // Three sweeps over the leading tokens, as in the reference: sum all weights, sum the weights within top-p and
    // min-p, find the draw. If one list holds all tokens, it stays for all sweeps.
    const LogitKeys keys = {logits};
    const bool fits = work->collects_leading;
    TopToken* tops = args.tops + (u64)index * args.max_top;
    const u32 num_sweeps = needs.top_k > 0 ? 3 : 1;
    double total = 0.0;
    double kept_sum = 0.0;
    double rest = 0.0;
    u32 num_kept = 0;
    u32 num_ranked = 0;
    u32 drawn = 0;
    for (u32 sweep = 0; sweep < num_sweeps; sweep++) {
        u64 bound = NO_BOUND;
        // The number of tokens in earlier lists of this sweep.
        u32 num_before = 0;
        const double target = (double)params.top_p * total;
        // All threads have seen the end of the previous sweep.
        __syncthreads();
        if (thread == 0) {
            is_done = false;
            if (sweep == 2) {
                rest = uniform(params.seed, params.choice, draw.num_tokens) * kept_sum;
            }
        }
        __syncthreads();
        while (!is_done) {
            const u32 num_wanted = min(needs.num_leading - num_before, LIST);
            const bool is_only = fits || needs.num_leading <= LIST;
            if (is_only && sweep > 0) {
                // The list of the previous sweep.
            } else if (fits) {
                count_of_list = work->num_leading;
                for (u32 i = thread; i < work->num_leading; i += THREADS) list[i] = leading[i];
                sort_keys(list, work->num_leading);
            } else {
                next_keys(keys, vocab_size, bound, num_wanted, search);
            }
            const u32 count = min(count_of_list, num_wanted);
            const u32 num_in_top_k = min(count, needs.top_k - min(needs.top_k, num_before));
            if (!(is_only && sweep > 0)) {
                for (u32 i = thread; i < num_in_top_k; i += THREADS) {
                    weights[i] = weight_at(logits[token_of(list[i])], max_logit, params.temperature);
                }
            }
            if (sweep == 0) {
                for (u32 i = thread; i < count && num_before + i < needs.num_top; i += THREADS) {
                    tops[num_before + i].token = token_of(list[i]);
                }
                num_ranked += count;
            }
            __syncthreads();
            if (thread == 0) {
                u32 i = 0;
                if (sweep == 0) {
                    for (; i < num_in_top_k; i++) total += (double)weights[i];
                } else if (sweep == 1) {
                    for (; i < num_in_top_k; i++) {
                        double weight = (double)weights[i];
                        // The first token is always kept: its weight is 1.
                        bool is_reached = params.top_p < 1.0f && kept_sum >= target;
                        if (num_kept > 0 && (is_reached || weight < (double)params.min_p)) break;
                        num_kept++;
                        kept_sum += weight;
                    }
                } else {
                    for (; i < num_in_top_k && num_before + i < num_kept; i++) {
                        drawn = token_of(list[i]);
                        rest -= (double)weights[i];
                        if (rest < 0.0) break;
                    }
                }
                is_done = i < num_in_top_k || num_before + count >= needs.num_leading ||
                          count < num_wanted;
            }
            if (count > 0) bound = list[count - 1];
            num_before += count;
            __syncthreads();
        }
    }
    if (thread == 0) {
        work->token = drawn;
        work->num_top = min(num_ranked, needs.num_top);
    }
}

// Sums by block the weights that top-p and min-p keep. Grid: (ranges, draws).
KERNEL_OF(sample_weigh_kept, SampleArgs, THREADS, 2) {
    __shared__ double lanes[THREADS];
    const u32 index = blockIdx.y;
    const Draw draw = args.draws[index];
    if (draw.kind == NOTHING) return;
    const SlotParams params = args.slots[draw.slot];
    const Needs needs = needs_of(draw, params, args.vocab_size);
    const DrawWork* work = &args.work[index];
    if (!needs.has_nucleus || error_of(*work) != OK) return;

    const u32 thread = threadIdx.x;
    const u32 first = blockIdx.x * RANGE;
    const float* logits = args.logits + (u64)draw.row * args.vocab_size;
    const float max_logit = logit_of(work->best);
    const float cut_weight = work->cut_weight;
    const u32 cut_last = work->cut_last;
    const u32 lane_first = first + thread / LANES * BLOCK + thread % LANES;
    double sum = 0.0;
    float loaded[BLOCK / LANES];
    load_lane(loaded, logits, lane_first, args.vocab_size);
#pragma unroll
    for (u32 i = 0; i < BLOCK / LANES; i++) {
        u32 token = lane_first + i * LANES;
        float weight = weight_at(loaded[i], max_logit, params.temperature);
        bool is_cut = weight < cut_weight || (weight == cut_weight && token > cut_last);
        sum += is_cut ? 0.0 : (double)weight;
    }
    lanes[thread] = sum;
    __syncthreads();
    u32 block = first / BLOCK + thread;
    if (thread < BLOCKS_PER_RANGE && block < args.num_blocks) {
        args.sums[(u64)index * 2 * args.num_blocks + block] = sum_lanes(&lanes[thread * LANES]);
    }
}
