// Measures ik_llama.cpp through its library: prefill of one prompt, and decode of some sequences.
//
//     clang++ -std=c++17 -O2 -I ik_llama.cpp/include -I ik_llama.cpp/ggml/include bench/compare/ik_bench.cpp
//         -L build/src -lllama -L build/ggml/src -lggml -o ik_bench
//     ik_bench FILE THREADS REPACK PROMPT,… BATCH,… CONTEXT DECODED
//
// Its own llama-batched-bench gives all sequences the same tokens, which then choose the same experts, and mixes the prompts
// of sequences in one step, which its recurrent layers refuse. These have a part of the graph for each sequence, and the graph
// has a limit: IK_MOST_TOGETHER splits steps of more sequences. Prints a JSON object of tokens/s.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

static std::vector<int> numbers(const char *text) {
    std::vector<int> found;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');)
        if (!part.empty()) found.push_back(std::stoi(part));
    return found;
}

static double seconds_of(const std::function<void()> &work) {
    auto began = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

static void add(llama_batch &batch, int position, int sequence, bool wants_logits) {
    int at = batch.n_tokens++;
    batch.token[at] = std::rand() % 1000;
    batch.pos[at] = position;
    batch.n_seq_id[at] = 1;
    batch.seq_id[at][0] = sequence;
    batch.logits[at] = wants_logits;
}

static void compute(llama_context *context, llama_batch &batch) {
    if (llama_decode(context, batch) != 0) {
        std::fprintf(stderr, "llama_decode failed\n");
        std::exit(1);
    }
    llama_synchronize(context);
    batch.n_tokens = 0;
}

static void prefill(llama_context *context, llama_batch &batch, int length, int sequence) {
    for (int at = 0; at < length; ++at) add(batch, at, sequence, at == length - 1);
    compute(context, batch);
}

int main(int, char **argv) {
    const int threads = std::atoi(argv[2]), context_len = std::atoi(argv[6]), decoded = std::atoi(argv[7]);
    const auto prompts = numbers(argv[4]), batches = numbers(argv[5]);
    const char *limit = std::getenv("IK_MOST_TOGETHER");
    const int most_together = limit ? std::atoi(limit) : 512;
    int most = 1, longest = 0;
    for (int batch : batches) most = std::max(most, batch);
    for (int prompt : prompts) longest = std::max(longest, prompt);

    llama_backend_init();
    auto model_params = llama_model_default_params();
    // Interleaved rows, which it calls run-time repacking.
    model_params.repack_tensors = std::strcmp(argv[3], "repack") == 0;
    llama_model *model = llama_model_load_from_file(argv[1], model_params);
    auto params = llama_context_default_params();
    params.n_ctx = std::max(longest + 16, most * (context_len + decoded));
    params.n_seq_max = most;
    params.n_threads = params.n_threads_batch = threads;
    params.type_k = params.type_v = GGML_TYPE_BF16;
    llama_context *context = model ? llama_init_from_model(model, params) : nullptr;
    if (!context) return 1;

    llama_batch batch = llama_batch_init(params.n_ctx, 0, 1);
    prefill(context, batch, 16, 0);
    std::string out;
    auto report = [&](const std::string &what, double speed) {
        out += (out.empty() ? "{\"" : ", \"") + what + "\": " + std::to_string(speed);
    };
    for (int length : prompts) {
        llama_kv_cache_clear(context);
        report("prefill " + std::to_string(length), length / seconds_of([&] { prefill(context, batch, length, 0); }));
    }
    for (int size : batches) {
        llama_kv_cache_clear(context);
        for (int sequence = 0; sequence < size; ++sequence) prefill(context, batch, context_len, sequence);
        double took = seconds_of([&] {
            for (int step = 0; step < decoded; ++step) {
                for (int sequence = 0; sequence < size; ++sequence) {
                    add(batch, context_len + step, sequence, true);
                    if (batch.n_tokens == most_together || sequence == size - 1) compute(context, batch);
                }
            }
        });
        report("decode b" + std::to_string(size), size * decoded / took);
    }
    std::printf("%s}\n", out.c_str());
    llama_free(context);
    llama_free_model(model);
}
