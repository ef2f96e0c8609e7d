#!/usr/bin/env python3
"""Make the golden models: tiny random checkpoints, with what Transformers computes from them.

    python -m venv .venv && .venv/bin/pip install -r tests/golden/requirements.txt
    .venv/bin/python tests/golden/make_golden.py [NAME …]

A folder has config.json, weights in safetensors, and golden.json, which has prompts, the logits after each prompt, 64
greedy tokens, and the logits from which the last of these tokens was drawn. Folders of FAMILIES also have golden.f32,
with the logits from which each token was drawn. The file has these logits a second time, with K and V rounded to bf16,
which gives the same tokens. Transformers reads the very folder that is committed, and runs it in f32 with eager
attention on the CPU, each position from scratch. Weights stored as bf16 or f16 are evaluated in f32 too, so that only
the rounding of the stored weights is in a golden.

Greedy tokens can only be compared if the two largest logits of a step are not close. Seeds are tried in order until, at
every step, the best logit leads the second by MIN_MARGIN of the largest magnitude, and the output is not one short
loop.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from golden_shape import FAMILIES, MODELS, PROMPT_LENGTHS_OF
from safetensors.torch import save_file

HERE = Path(__file__).parent
PROMPT_LENGTHS = (1, 17, 64, 150)
NUM_GREEDY = 64
MIN_MARGIN = 5e-4
MIN_DISTINCT = 12

# The same weights in other files: (folder, source folder, dtype, number of shards).
VARIANTS = (
    ("llama-gqa-tied-bf16", "llama-gqa-tied", torch.bfloat16, 1),
    ("llama-gqa-untied-f16", "llama-gqa-untied", torch.float16, 1),
    ("qwen3-gqa-tied-bf16", "qwen3-gqa-tied", torch.bfloat16, 1),
    ("qwen3-gqa-tied-sharded", "qwen3-gqa-tied", torch.float32, 3),
)


def make_module(name, seed):
    """Makes a model of a family with random weights."""
    kind, settings = FAMILIES[name]
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = np.random.default_rng(seed)
    is_gemma4 = name.startswith("gemma4")
    is_wide = name == "gemma4-wide"
    mean = 0.0 if name.startswith("gemma") and not is_gemma4 else 1.0
    # Norms of these families multiply by 1 plus their weights, except for norms after recurrent layers.
    lacks_one = name.startswith(("gemma2", "gemma3", "qwen3-next", "qwen3-5"))
    modules = dict(model.named_modules())

    def draw(name, shape):
        owner = modules.get(name.rpartition(".")[0])
        if name.endswith("bias"):
            return generator.normal(0.0, 0.2, shape)
        if "norm" in name or ".ln_" in name:
            # Without sharp attention, greedy tokens soon end in a loop.
            qk_norms = ("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")
            is_sharp = name.endswith(qk_norms) and not is_gemma4
            norm_mean = 0.0 if lacks_one and "linear_attn" not in name else 1.0
            if is_wide and name.endswith(qk_norms):
                # Scores are not divided by the width of a head. Scores of wide heads would be so large that their
                # rounding to bf16 decides the tokens.
                norm_mean = 0.5
            return generator.normal(norm_mean + 0.8 * is_sharp, 0.2, shape)
        if name.endswith("A_log"):
            # The decay is so slow that a state still has an effect many chunks later.
            return generator.normal(-3.5, 0.7, shape)
        if name.endswith("sinks"):
            return generator.normal(1.0, 1.0, shape)
        if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            return generator.normal(0.9, 0.2, shape)
        if name.endswith("router.proj.weight"):
            # The router's input is divided by the root of its length once more.
            return generator.normal(0.0, 1.5, shape)
        if "embed_tokens_per_layer" in name:
            return generator.normal(0.0, 0.3, shape)
        if isinstance(owner, torch.nn.Embedding):
            # Gemma multiplies embeddings by the root of their length. Larger embeddings alone would decide the tokens.
            gain = 3.0 if mean == 1.0 and not is_gemma4 else 0.7
            return generator.normal(0.0, 0.5 if "wpe" in name else gain / shape[-1] ** 0.5, shape)
        gain = 2.5 if "down" in name or name.endswith(("mlp.c_proj.weight", ".w2.weight")) else 1.5
        gain = 3.0 if "lm_head" in name else gain
        gain = 3.0 if mean == 0.0 and ("q_proj" in name or "k_proj" in name) else gain
        is_transposed = type(owner).__name__ in ("Conv1D", "GptOssExperts")
        inputs = shape[-2] if is_transposed else shape[-1]
        return generator.normal(0.0, gain / inputs**0.5, shape)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = draw(name, tuple(parameter.shape)).astype(np.float32)
            parameter.copy_(torch.from_numpy(values))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                values = draw(name, tuple(buffer.shape)).astype(np.float32)
                buffer.copy_(torch.from_numpy(values))
    return model


def write_module(folder, name, seed):
    make_module(name, seed).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def draw_weights(config, seed):
    """Draws weights so large that layers change the residual stream much, and logits lie far apart."""
    generator = np.random.default_rng(seed)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    biased = {"qwen2": "qkv"}.get(config["model_type"], "qkvo" if config.get("attention_bias") else "")
    query = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    weights = {}

    def matrix(name, rows, columns, gain=1.5):
        weights[name] = generator.normal(0.0, gain / columns**0.5, (rows, columns))

    def vector(name, size, mean=0.0, deviation=0.2):
        weights[name] = generator.normal(mean, deviation, size)

    matrix("model.embed_tokens.weight", config["vocab_size"], hidden, 3.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        vector(prefix + "input_layernorm.weight", hidden, 1.0)
        matrix(prefix + "self_attn.q_proj.weight", query, hidden)
        matrix(prefix + "self_attn.k_proj.weight", kv, hidden)
        matrix(prefix + "self_attn.v_proj.weight", kv, hidden)
        matrix(prefix + "self_attn.o_proj.weight", hidden, query)
        for name, size in (("q", query), ("k", kv), ("v", kv), ("o", hidden)):
            if name in biased:
                vector(prefix + f"self_attn.{name}_proj.bias", size)
        if config["model_type"] == "qwen3":
            vector(prefix + "self_attn.q_norm.weight", head_dim, 1.5)
            vector(prefix + "self_attn.k_norm.weight", head_dim, 1.5)
        vector(prefix + "post_attention_layernorm.weight", hidden, 1.0)
        matrix(prefix + "mlp.gate_proj.weight", ffn, hidden)
        matrix(prefix + "mlp.up_proj.weight", ffn, hidden)
        matrix(prefix + "mlp.down_proj.weight", hidden, ffn, 2.5)
        if config.get("mlp_bias"):
            for name, size in (("gate", ffn), ("up", ffn), ("down", hidden)):
                vector(prefix + f"mlp.{name}_proj.bias", size)
    vector("model.norm.weight", hidden, 1.0)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, 3.0)
    return {k: torch.from_numpy(v.astype(np.float32)) for k, v in weights.items()}


def write_checkpoint(folder, config, weights, dtype, num_shards):
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*"):
        old.unlink()
    config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {k: v.to(dtype) for k, v in weights.items()}
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = list(weights), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(w.numel() * w.element_size() for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class Bf16Cache(transformers.DynamicCache):
    """Rounds K and V to bf16, as an executor with a bf16 KV cache does."""

    def update(self, key_states, value_states, *arguments, **options):
        key_states, value_states = (x.bfloat16().float() for x in (key_states, value_states))
        return super().update(key_states, value_states, *arguments, **options)


@torch.inference_mode()
def evaluate(folder, seed, prompt_lengths=PROMPT_LENGTHS):
    """Returns the content of golden.json, or why this seed cannot be used."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vocab_size = model.config.vocab_size
    generator = np.random.default_rng([seed, 1])
    cases = []
    for length in prompt_lengths:
        prompt = generator.integers(3, vocab_size, length).tolist()
        tokens, logits, least = [], [], np.inf
        for _ in range(NUM_GREEDY):
            last = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            best, second = torch.topk(last, 2).values.tolist()
            least = min(least, (best - second) / last.abs().max().item())
            if least < MIN_MARGIN:
                return f"margin {least:.1e}"
            tokens.append(int(last.argmax()))
            logits.append(last)
        if len(set(tokens)) < MIN_DISTINCT:
            return f"only {len(set(tokens))} distinct tokens"
        inputs = torch.tensor([prompt + tokens[:-1]])
        is_hybrid = not {"linear_attention", "conv"}.isdisjoint(getattr(model.config, "layer_types", None) or [])
        cache = Bf16Cache(config=model.config) if is_hybrid else Bf16Cache()
        rounded = model(inputs, past_key_values=cache).logits[0]
        cases.append(
            {
                "prompt": prompt,
                "tokens": tokens,
                "least_margin": float(f"{least:.3g}"),
                "prompt_logits": as_list(logits[0]),
                "final_logits": as_list(logits[-1]),
                "prompt_logits_bf16_kv": as_list(rounded[len(prompt) - 1]),
                "final_logits_bf16_kv": as_list(rounded[-1]),
                "all_logits": logits,
            }
        )
    return {
        "seed": seed,
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "cases": cases,
    }


def as_list(logits):
    return [float(f"{x:.9g}") for x in logits.tolist()]


def write_golden(folder, golden, has_all_logits=False):
    cases = golden.pop("cases")
    all_logits = [case.pop("all_logits") for case in cases]
    if has_all_logits:
        rows = torch.cat([torch.stack(rows) for rows in all_logits])
        (folder / "golden.f32").write_bytes(rows.numpy().astype("<f4").tobytes())
    lines = [f'  "{key}": {json.dumps(value)},' for key, value in golden.items()]
    lines += ['  "cases": [', ",\n".join("    " + json.dumps(case) for case in cases), "  ]"]
    (folder / "golden.json").write_text("{\n" + "\n".join(lines) + "\n}\n")


def make(name, config, dtype, num_shards):
    def write(folder, seed):
        write_checkpoint(folder, config, draw_weights(config, seed), dtype, num_shards)

    make_with(name, write)


def make_family(name):
    lengths = PROMPT_LENGTHS_OF.get(name, PROMPT_LENGTHS)
    make_with(name, lambda folder, seed: write_module(folder, name, seed), lengths, has_all_logits=True)


def make_with(name, write, prompt_lengths=PROMPT_LENGTHS, has_all_logits=False):
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(1000):
            folder = Path(scratch) / name
            write(folder, seed)
            golden = evaluate(folder, seed, prompt_lengths)
            if isinstance(golden, str):
                print(f"{name}: seed {seed}: {golden}", file=sys.stderr)
                continue
            write_golden(folder, golden, has_all_logits)
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(folder, HERE / name)
            spread = np.std(golden_logits(HERE / name))
            print(f"{name}: seed {seed}, logits spread {spread:.2f}", flush=True)
            return
    sys.exit(f"{name}: no seed will do")


def golden_logits(folder):
    cases = json.loads((folder / "golden.json").read_text())["cases"]
    return [x for case in cases for x in case["prompt_logits"]]


def asked_names(description, known):
    """Returns the names on the command line, or all."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("name", nargs="*", help="folders to make [all]")
    names = parser.parse_args().name
    for name in names:
        if name not in known:
            sys.exit(f"unknown folder {name!r}; use one of {', '.join(known)}")
    return names or known


def set_up_transformers():
    """Silences Transformers, and makes it use one order of sums."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def main():
    jobs = {name: (config, torch.float32, 1) for name, config in MODELS.items()}
    jobs |= {name: (MODELS[of], dtype, shards) for name, of, dtype, shards in VARIANTS}
    names = asked_names(__doc__, [*jobs, *FAMILIES])
    set_up_transformers()
    for name in names:
        if name in FAMILIES:
            make_family(name)
        else:
            make(name, *jobs[name])


if __name__ == "__main__":
    main()
