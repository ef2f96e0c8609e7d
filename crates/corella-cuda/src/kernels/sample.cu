// Draws tokens: the kernels of every draw. `sample_rank.cu` has further kernels for draws that need sorted tokens.
#include "sample.cuh"

constexpr u32 IS_FORBIDDEN = 1u << 30;
constexpr u32 OCCURS = 1u << 31;

// Whether the output ends with all tokens of a banned sequence except its last one.
DEVICE bool bans(const u32* sequence, u32 len, const u32* history, u32 num_prompt_tokens,
                            u32 num_tokens) {
    u32 num_before = len - 1;
    if (num_tokens < num_prompt_tokens + num_before) return false;
    for (u32 i = 0; i < num_before; i++) {
        if (sequence[i] != history[num_tokens - num_before + i]) return false;
    }
    return true;
}

// The logit of a token that occurs in the history, `num_in_output` times in the output.
DEVICE float penalise(float logit, u32 num_in_output, const SlotParams& params) {
    if (logit > 0.0f) {
        logit /= params.repetition_penalty;
    } else {
        logit *= params.repetition_penalty;
    }
    if (num_in_output > 0) {
        logit -= params.frequency_penalty * (float)num_in_output;
        logit -= params.presence_penalty;
    }
    return logit;
}

// Applies masks, token rules and penalties, and finds the largest logit. A logit of minus infinity absorbs additions,
// so bans may be applied last. Grid: (ranges of RANGE tokens, draws).
KERNEL_OF(sample_maximum, SampleArgs, THREADS, 4) {
    // For each token, whether it occurs or is forbidden, and how often it occurs in the output.
    __shared__ u32 states[RANGE];
    __shared__ u64 best_of_thread[THREADS];
    __shared__ u32 bad_of_thread[THREADS];
    const u32 index = blockIdx.y;
    const Draw draw = args.draws[index];
    if (draw.kind == NOTHING) return;
    const SlotParams params = args.slots[draw.slot];
    const Needs needs = needs_of(draw, params, args.vocab_size);
    const u32 thread = threadIdx.x;
    const u32 first = blockIdx.x * RANGE;
    const u32 len = min(args.vocab_size - first, RANGE);
    float* logits = args.logits + (u64)draw.row * args.vocab_size + first;

    if (needs.has_nucleus) {
        u64* classes = args.classes + (u64)index * CLASS_STRIDE;
        for (u32 i = blockIdx.x * THREADS + thread; i < CLASS_STRIDE; i += gridDim.x * THREADS) {
            classes[i] = 0;
        }
    }
    if (needs.num_leading > 0) {
        u32* bins = args.bins + (u64)index * NUM_BINS;
        for (u32 i = blockIdx.x * THREADS + thread; i < NUM_BINS; i += gridDim.x * THREADS) {
            bins[i] = 0;
        }
    }

    const u32 num_words = (args.vocab_size + 31) / 32;
    const u32* history = args.history + (u64)draw.slot * args.max_model_len;
    const u32* masked_until = params.rules + (params.flags & HAS_ALLOWED ? num_words : 0);
    const u32* bias_tokens = masked_until + params.num_masked_until_min_tokens;
    const u32* biases = bias_tokens + params.num_biases;
    const u32* starts = biases + params.num_biases;
    const u32* sequences = starts + params.num_banned + 1;
    const bool waits = draw.num_tokens < params.num_prompt_tokens + params.min_tokens;
    const u32 num_masked_until = waits ? params.num_masked_until_min_tokens : 0;
    const bool has_penalties = params.flags & HAS_PENALTIES;
    const bool has_states =
        needs.is_drawn && (has_penalties || num_masked_until > 0 || params.num_banned > 0);
    if (has_states) {
        for (u32 i = thread; i < RANGE; i += THREADS) states[i] = 0;
        __syncthreads();
        for (u32 i = thread; i < num_masked_until; i += THREADS) {
            u32 token = masked_until[i] - first;
            if (token < len) states[token] = IS_FORBIDDEN;
        }
        for (u32 i = thread; i < params.num_banned; i += THREADS) {
            const u32* sequence = sequences + starts[i];
            u32 num = starts[i + 1] - starts[i];
            u32 token = sequence[num - 1] - first;
            if (token < len &&
                bans(sequence, num, history, params.num_prompt_tokens, draw.num_tokens)) {
                states[token] = IS_FORBIDDEN;
            }
        }
        __syncthreads();
        if (has_penalties) {
            u32 num_prompt = min(params.num_prompt_tokens, draw.num_tokens);
            for (u32 i = thread; i < num_prompt; i += THREADS) {
                u32 token = history[i] - first;
                // All threads that write here concurrently write the same value.
                if (token < len) states[token] |= OCCURS;
            }
            __syncthreads();
            for (u32 i = num_prompt + thread; i < draw.num_tokens; i += THREADS) {
                u32 token = history[i] - first;
                if (token < len) atomic_add(&states[token], 1u);
            }
            __syncthreads();
        }
    }
    if (needs.is_drawn && params.num_biases > 0) {
        for (u32 i = thread; i < params.num_biases; i += THREADS) {
            u32 token = bias_tokens[i] - first;
            // The first of several biases of a token adds all of them, in their order.
            if (token >= len || (i > 0 && bias_tokens[i - 1] == bias_tokens[i])) continue;
            float logit = logits[token];
            for (u32 j = i; j < params.num_biases && bias_tokens[j] == bias_tokens[i]; j++) {
                logit += float_of(biases[j]);
            }
            logits[token] = logit;
        }
        __syncthreads();
    }

    const u32* allowed =
        needs.is_drawn && (params.flags & HAS_ALLOWED) ? params.rules + first / 32 : nullptr;
    const u32* mask = needs.is_drawn && (draw.flags & IS_MASKED)
                          ? args.masks + (u64)draw.slot * num_words + first / 32
                          : nullptr;
    const bool changes = has_states || allowed || mask;
    u64 best = 0;
    u32 bad = 0;
    // Loads of several logits are under way at a time.
    constexpr u32 AT_ONCE = 8;
    for (u32 i = thread; i < len; i += AT_ONCE * THREADS) {
        float loaded[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            loaded[j] = i + j * THREADS < len ? logits[i + j * THREADS] : 0.0f;
        }
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            u32 at = i + j * THREADS;
            if (at >= len) break;
            float logit = loaded[j];
            if (changes) {
                u32 state = has_states ? states[at] : 0;
                bool is_forbidden = state & IS_FORBIDDEN;
                if (allowed) is_forbidden |= !(allowed[at / 32] >> (at % 32) & 1);
                if (mask) is_forbidden |= !(mask[at / 32] >> (at % 32) & 1);
                if (is_forbidden) {
                    logit = float_of(NEG_INF_BITS);
                } else if (state != 0) {
                    logit = penalise(logit, state & ~OCCURS, params);
                }
                if (is_forbidden || state != 0) logits[at] = logit;
            }
            if (logit < float_of(INF_BITS)) {
                best = max(best, logit_key(logit, first + at));
            } else {
                bad = max(bad, ~(first + at));
            }
        }
    }
    best_of_thread[thread] = best;
    bad_of_thread[thread] = bad;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) {
            best_of_thread[thread] = max(best_of_thread[thread], best_of_thread[thread + half]);
            bad_of_thread[thread] = max(bad_of_thread[thread], bad_of_thread[thread + half]);
        }
    }
    if (thread == 0) {
        DrawWork* work = &args.work[index];
        atomic_max(&work->best, best_of_thread[0]);
        if (bad_of_thread[0] != 0) atomic_max(&work->bad, bad_of_thread[0]);
    }
}

// Sums weights by block and by size class, and counts logits by bin. Grid: (ranges, draws).
KERNEL_OF(sample_weigh, SampleArgs, THREADS, 4) {
    __shared__ double lanes[2][THREADS];
    __shared__ u32 class_counts[CLASS_STRIDE];
    __shared__ u32 class_rests[CLASS_STRIDE];
    __shared__ u32 bin_counts[NUM_BINS];
    __shared__ u32 num_before;
    const u32 index = blockIdx.y;
    const Draw draw = args.draws[index];
    if (draw.kind == NOTHING) return;
    const SlotParams params = args.slots[draw.slot];
    const Needs needs = needs_of(draw, params, args.vocab_size);
    DrawWork* work = &args.work[index];
    const bool sums_blocks = needs.weighs && !needs.has_nucleus;
    const bool has_bins = needs.num_leading > 0;
    if (!(needs.weighs || needs.has_logprobs || has_bins) || error_of(*work) != OK) return;

    const u32 thread = threadIdx.x;
    if (needs.has_nucleus || has_bins) {
        for (u32 i = thread; i < CLASS_STRIDE; i += THREADS) {
            class_counts[i] = 0;
            class_rests[i] = 0;
            bin_counts[i] = 0;
        }
    }
    if (thread == 0) num_before = 0;
    __syncthreads();

    const u32 first = blockIdx.x * RANGE;
    const float* logits = args.logits + (u64)draw.row * args.vocab_size;
    const bool is_scored = draw.kind == SCORE;
    const float own = is_scored ? logits[draw.token] : 0.0f;
    const float max_logit = logit_of(work->best);
    const float min_weight = min(params.min_p, 1.0f);
    const u32 lane_first = first + thread / LANES * BLOCK + thread % LANES;
    double sum = 0.0;
    double sum_of_one = 0.0;
    u32 before = 0;
    float loaded[BLOCK / LANES];
    load_lane(loaded, logits, lane_first, args.vocab_size);
#pragma unroll
    for (u32 i = 0; i < BLOCK / LANES; i++) {
        u32 token = lane_first + i * LANES;
        if (token >= args.vocab_size) break;
        float logit = loaded[i];
        if (needs.weighs) {
            float weight = weight_at(logit, max_logit, params.temperature);
            if (sums_blocks) {
                sum += weight < min_weight ? 0.0 : (double)weight;
            } else if (weight > 0.0f) {
                u32 below = ONE_BITS - bits_of(weight);
                atomic_add(&class_counts[below >> 19], 1u);
                // A range has less than 2^13 tokens, each with less than 2^19 here.
                atomic_add(&class_rests[below >> 19], below & ((1u << 19) - 1));
            }
        }
        if (needs.has_logprobs) sum_of_one += (double)exponential(logit - max_logit);
        if (has_bins && logit > float_of(NEG_INF_BITS)) {
            atomic_add(&bin_counts[bin_of(logit, max_logit)], 1u);
        }
        before += is_scored && (token < draw.token ? logit >= own : logit > own);
    }
    lanes[0][thread] = sum;
    lanes[1][thread] = sum_of_one;
    if (before > 0) atomic_add(&num_before, before);
    __syncthreads();

    if (thread < 2 * BLOCKS_PER_RANGE) {
        u32 block_in_range = thread % BLOCKS_PER_RANGE;
        u32 which = thread / BLOCKS_PER_RANGE;
        u32 block = first / BLOCK + block_in_range;
        if (block < args.num_blocks && (which == 0 ? sums_blocks : needs.has_logprobs)) {
            args.sums[((u64)index * 2 + which) * args.num_blocks + block] =
                sum_lanes(&lanes[which][block_in_range * LANES]);
        }
    }
    if (thread == 0 && num_before > 0) atomic_add(&work->num_before, num_before);
    if (needs.has_nucleus) {
        u64* classes = args.classes + (u64)index * CLASS_STRIDE;
        for (u32 i = thread; i < CLASS_STRIDE; i += THREADS) {
            u64 packed = (u64)class_counts[i] << 40 | class_rests[i];
            if (packed != 0) atomic_add(&classes[i], packed);
        }
    }
    if (has_bins) {
        u32* bins = args.bins + (u64)index * NUM_BINS;
        for (u32 i = thread; i < NUM_BINS; i += THREADS) {
            if (bin_counts[i] != 0) atomic_add(&bins[i], bin_counts[i]);
        }
    }
}

// Draws, and writes results. Dynamic shared memory: two doubles for each block of weights.
// Grid: (1, draws).
KERNEL_OF(sample_finish, SampleArgs, THREADS, 4) {
    __shared__ float weights[BLOCK];
    __shared__ double rest;
    __shared__ double log_total;
    __shared__ u32 chosen;
    __shared__ u32 drawn;
    __shared__ u32 num_before;
    const u32 index = blockIdx.y;
    const Draw draw = args.draws[index];
    if (draw.kind == NOTHING) return;
    const SlotParams params = args.slots[draw.slot];
    const Needs needs = needs_of(draw, params, args.vocab_size);
    const DrawWork work = args.work[index];
    const u32 thread = threadIdx.x;
    const float* logits = args.logits + (u64)draw.row * args.vocab_size;
    const u32 error = error_of(work);
    const u32 num_blocks = args.num_blocks;
    const double* sums = args.sums + (u64)index * 2 * num_blocks;
    double* block_sums = (double*)dynamic_shared();

    // Every thread has copied the draw's work by now, so the work is reset for the next launch.
    __syncthreads();
    if (thread == 0) {
        DrawWork* next = &args.work[index];
        next->best = 0;
        next->bad = 0;
        next->num_before = 0;
        next->num_members = 0;
        next->num_leading = 0;
    }
    if (error == OK) {
        if (needs.weighs) {
            for (u32 i = thread; i < num_blocks; i += THREADS) block_sums[i] = sums[i];
        }
        if (needs.has_logprobs) {
            for (u32 i = num_blocks + thread; i < 2 * num_blocks; i += THREADS) {
                block_sums[i] = sums[i];
            }
        }
    }
    __syncthreads();

    const float max_logit = error == OK ? logit_of(work.best) : 0.0f;
    if (error == OK && needs.weighs && thread == 0) {
        double total = 0.0;
        u32 last_block = 0;
        for (u32 i = 0; i < num_blocks; i++) {
            total += block_sums[i];
            if (block_sums[i] > 0.0) last_block = i;
        }
        double left = uniform(params.seed, params.choice, draw.num_tokens) * total;
        // Rounding may leave a remainder at the end of the last block. The last token of the block is then drawn.
        u32 block = 0;
        while (block < last_block && !(left < block_sums[block])) {
            left -= block_sums[block];
            block++;
        }
        chosen = block;
        rest = left;
    }
    // The second warp does this while the first one continues.
    if (error == OK && needs.has_logprobs && thread == 32) {
        double total = 0.0;
        for (u32 i = 0; i < num_blocks; i++) total += block_sums[num_blocks + i];
        log_total = logarithm(total);
    }
    __syncthreads();

    if (error == OK && needs.weighs) {
        u32 token = chosen * BLOCK + thread;
        float weight = 0.0f;
        if (token < args.vocab_size) {
            weight = weight_at(logits[token], max_logit, params.temperature);
            float cut_weight = needs.has_nucleus ? work.cut_weight : min(params.min_p, 1.0f);
            u32 cut_last = needs.has_nucleus ? work.cut_last : ~0u;
            if (weight < cut_weight || (weight == cut_weight && token > cut_last)) weight = 0.0f;
        }
        weights[thread] = weight;
    }
    __syncthreads();

    if (thread == 0) {
        if (error != OK) {
            drawn = 0;
        } else if (draw.kind == SCORE) {
            drawn = draw.token;
        } else if (needs.weighs) {
            double left = rest;
            u32 token = 0;
            for (u32 i = 0; i < BLOCK; i++) {
                if (weights[i] > 0.0f) {
                    token = chosen * BLOCK + i;
                    left -= (double)weights[i];
                    if (left < 0.0) break;
                }
            }
            drawn = token;
        } else if (needs.top_k > 0) {
            drawn = work.token;
        } else {
            drawn = token_of(work.best);
        }
        num_before = work.num_before;
    }
    __syncthreads();

    // A drawn token is known only now. In most cases it is the most likely one.
    const bool is_ranked = error == OK && needs.has_logprobs && draw.kind == DRAW;
    if (is_ranked && drawn != token_of(work.best)) {
        const float own = logits[drawn];
        u32 before = 0;
        for (u32 token = thread; token < args.vocab_size; token += THREADS) {
            before += token < drawn ? logits[token] >= own : logits[token] > own;
        }
        if (before > 0) atomic_add(&num_before, before);
    }
    __syncthreads();

    TopToken* tops = args.tops + (u64)index * args.max_top;
    const u32 num_top = error == OK && needs.num_top > 0 ? work.num_top : 0;
    for (u32 i = thread; i < num_top; i += THREADS) {
        double logit = (double)logits[tops[i].token];
        tops[i].logprob = (float)(logit - (double)max_logit - log_total + 0.0);
    }
    if (thread != 0) return;
    Result result;
    result.error = error;
    result.token = error == NOT_FINITE ? ~work.bad : drawn;
    result.value = error == NOT_FINITE ? logits[~work.bad] : 0.0f;
    result.logprob = 0.0f;
    if (error == OK && needs.has_logprobs) {
        double logit = (double)logits[drawn];
        result.logprob = (float)(logit - (double)max_logit - log_total + 0.0);
    }
    result.rank = 1 + num_before;
    result.num_top = num_top;
    args.results[index] = result;
    if (draw.kind == DRAW && !(draw.flags & IS_BEHIND_DRAFT)) args.drawn[draw.slot] = drawn;
}
