"""Measures the longest gap between tokens of eight streams while a long prompt prefills, with and without chunks.

    python bench/chunking.py target/release/corella [--mock] [--runs 3]
    python bench/make_model.py small-32k
    python bench/chunking.py target/release/corella bench/models/small-32k [--prompt-tokens 8192]

Without a model, the built-in one computes a prompt of 1,500 tokens. The steps of the mock take as long as those of
Llama 3 8B on an H200 (bench/results/2026-11-27-h200.md).
"""

import argparse
import json
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request

PORT = 8178
URL = f"http://127.0.0.1:{PORT}/v1"
STREAMS = 8
MOCK = ["--device", "mock", "--mock-step-us", "4500", "--mock-token-us", "47", "--mock-decode-us", "90"]


def stream(prompt, max_tokens, times):
    """Reads a stream and appends the arrival time of every token."""
    body = {"model": "it", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    request = urllib.request.Request(f"{URL}/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())


def run(binary, model, prompt_tokens, options):
    """Returns the longest gap of a stream, and the time to the first token of the long prompt, in seconds."""
    server = subprocess.Popen([binary, "serve", *model, "--served-model-name", "it", "--port", str(PORT), "--max-num-seqs", "16",
                               "--no-enable-prefix-caching", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready").read()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        streams = [[] for _ in range(STREAMS)]
        threads = [threading.Thread(target=stream, args=([100 + i] * 16, 400, times)) for i, times in enumerate(streams)]
        for thread in threads:
            thread.start()
        while min(map(len, streams)) < 20:
            time.sleep(0.01)
        began = time.monotonic()
        long = []
        stream([7 + i % 1000 for i in range(prompt_tokens)], 1, long)
        ended = long[0]
        alive = all(times[-1] >= began for times in streams)
        for thread in threads:
            thread.join()
        assert alive and all(times[-1] > ended for times in streams), "the streams ended before the long prompt"
        gaps = [after - before for times in streams for before, after in zip(times, times[1:]) if after >= began and before <= ended]
        return max(gaps), ended - began
    finally:
        server.terminate()
        server.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("model", nargs="?", help="a model folder; without it, the built-in model")
    parser.add_argument("--mock", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--chunk", type=int, default=256)
    options = parser.parse_args()
    options.prompt_tokens = options.prompt_tokens or (8192 if options.model else 1500)
    model = [*([options.model] if options.model else []), *(MOCK if options.mock else [])]
    whole = ["--no-chunked-prefill", "--max-num-batched-tokens", str(options.prompt_tokens + 64)]
    chunked = ["--max-num-batched-tokens", str(options.chunk)]
    pairs = [[run(options.binary, model, options.prompt_tokens, side) for side in (whole, chunked)] for _ in range(options.runs)]
    print(f"{options.prompt_tokens} prompt tokens among {STREAMS} streams, steps of {options.chunk} tokens, medians of {options.runs}\n")
    print("| | whole | chunked | ratio |\n|---|---|---|---|")
    for at, title in enumerate(("longest gap between tokens, s", "time to first token of the long prompt, s")):
        before, after = (statistics.median(pair[side][at] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(pair[1][at] / pair[0][at] for pair in pairs)
        print(f"| {title} | {before:.3f} | {after:.3f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
