"""Measures the cost of adapters and constrained output for a batch of eight: tokens/s with and without, by turns.

    python bench/make_model.py qwen3-0.6b
    python bench/features.py adapters target/release/corella bench/models/qwen3-0.6b [--rounds 5]
    python bench/features.py schema target/release/corella bench/models/qwen3-0.6b [--rounds 5]

adapters: four LoRA adapters of rank 16 on all projections, two requests with each. schema: answers that are JSON arrays
of strings. Options after `--` go to `corella serve`. Needs numpy.
"""

import argparse
import contextlib
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

PORT = 8179
NUM_REQUESTS = 8
NUM_TOKENS = 200
ADAPTERS = ["red", "green", "blue", "grey"]
RANK = 16
# An array that cannot end within NUM_TOKENS.
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": NUM_TOKENS}


def make_adapter(folder, model, seed):
    """Makes a PEFT folder with random weights for all projections of the model."""
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, ffn),
        "mlp.up_proj": (hidden, ffn),
        "mlp.down_proj": (ffn, hidden),
    }
    random = np.random.default_rng(seed)
    header, parts, end = {}, [], 0
    for layer in range(config["num_hidden_layers"]):
        for name, (num_in, num_out) in shapes.items():
            for side, shape in (("A", (RANK, num_in)), ("B", (num_out, RANK))):
                values = (random.standard_normal(shape, np.float32) * 0.02).tobytes()
                header[f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"] = {
                    "dtype": "F32",
                    "shape": shape,
                    "data_offsets": [end, end + len(values)],
                }
                parts.append(values)
                end += len(values)
    folder.mkdir()
    header = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"".join(parts))
    modules = [name.split(".")[1] for name in shapes]
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def post(body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request)


def stream(body, times):
    """Reads a stream and appends the arrival time of every token."""
    with post({"stream": True, **body}) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())


def decode_speed(bodies):
    """Returns tokens/s of all requests together, from the start of the last request to the end of the first."""
    streams = [[] for _ in bodies]
    threads = [threading.Thread(target=stream, args=pair) for pair in zip(bodies, streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    shortest = min(map(len, streams))
    assert shortest > NUM_TOKENS // 2, f"an answer has {shortest} tokens only"
    return sum(begin < at <= end for times in streams for at in times) / (end - begin)


@contextlib.contextmanager
def server(binary, model, options):
    command = [binary, "serve", model, "--served-model-name", "it", "--port", str(PORT), "--max-num-seqs", str(NUM_REQUESTS)]
    command += ["--no-enable-prefix-caching", "--max-model-len", "1024", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                sys.exit(f"{' '.join(map(str, command))} has ended")
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready").read()
                break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def bodies(feature):
    """Returns the requests without the feature, and with it."""
    common = {"model": "it", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1, "prompt": None}
    plain = [{**common, "prompt": [100 + index] * 16, "seed": index} for index in range(NUM_REQUESTS)]
    if feature == "adapters":
        return plain, [{**body, "model": ADAPTERS[index % len(ADAPTERS)]} for index, body in enumerate(plain)]
    return plain, [{**body, "structured_outputs": {"json": SCHEMA}} for body in plain]


def main():
    parser = argparse.ArgumentParser(usage="%(prog)s adapters|schema BINARY MODEL [--rounds N] [-- OPTIONS]")
    parser.add_argument("feature", choices=["adapters", "schema"])
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    arguments, options = parser.parse_args(given[:at]), given[at + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.feature == "adapters":
            for seed, name in enumerate(ADAPTERS):
                make_adapter(Path(folder) / name, arguments.model, seed)
                options += ["--lora-modules", f"{name}={Path(folder) / name}"]
        with server(arguments.binary, arguments.model, options):
            sides = bodies(arguments.feature)
            for side in sides:
                decode_speed(side)
            rounds = [[decode_speed(side) for side in sides] for _ in range(arguments.rounds)]
    ratios = [with_it / without for without, with_it in rounds]
    print(f"{NUM_REQUESTS} requests, {arguments.rounds} rounds by turns, tokens/s\n")
    print(f"| without | with {arguments.feature} | ratio, median (lowest to highest) |\n|---|---|---|")
    without, with_it = (statistics.median(side) for side in zip(*rounds))
    print(f"| {without:.1f} | {with_it:.1f} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |")


if __name__ == "__main__":
    main()
