"""Random weights of a model: a safetensors file that depends on the seed and the names of tensors only."""

import json
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def tensors(config):
    if config["model_type"] == "gpt2":
        return gpt2_tensors(config)
    if config["model_type"] == "lfm2":
        return lfm2_tensors(config)
    if config["model_type"] == "gpt_oss":
        return gpt_oss_tensors(config)
    return llama_tensors(config)


def llama_tensors(config):
    hidden, ffn, head_dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    query = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    is_gemma = config["model_type"] == "gemma2"
    is_hybrid = config["model_type"] == "qwen3_5_text"
    # The norms of Gemma and Qwen3.5 multiply by 1 + weight.
    gain = "matrix" if is_gemma or is_hybrid else "gain"
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), "matrix"
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,), gain
        if is_hybrid and config["layer_types"][layer] == "linear_attention":
            yield from delta_tensors(prefix + "linear_attn.", config)
        else:
            # A hybrid's attention has a gate beside each query head.
            yield prefix + "self_attn.q_proj.weight", (query * (1 + is_hybrid), hidden), "matrix"
            yield prefix + "self_attn.k_proj.weight", (kv, hidden), "matrix"
            yield prefix + "self_attn.v_proj.weight", (kv, hidden), "matrix"
            yield prefix + "self_attn.o_proj.weight", (hidden, query), "matrix"
            if is_hybrid or config["model_type"] in ("qwen3", "qwen3_moe"):
                yield prefix + "self_attn.q_norm.weight", (head_dim,), gain
                yield prefix + "self_attn.k_norm.weight", (head_dim,), gain
        yield prefix + "post_attention_layernorm.weight", (hidden,), gain
        if is_gemma:
            yield prefix + "pre_feedforward_layernorm.weight", (hidden,), gain
            yield prefix + "post_feedforward_layernorm.weight", (hidden,), gain
        if num_experts := config.get("num_experts"):
            yield prefix + "mlp.gate.weight", (num_experts, hidden), "matrix"
            for expert in range(num_experts):
                yield from gated(f"{prefix}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
        else:
            yield from gated(prefix + "mlp.", hidden, ffn)
    yield "model.norm.weight", (hidden,), gain
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden), "matrix"


def gated(prefix, hidden, ffn):
    yield prefix + "gate_proj.weight", (ffn, hidden), "matrix"
    yield prefix + "up_proj.weight", (ffn, hidden), "matrix"
    yield prefix + "down_proj.weight", (hidden, ffn), "matrix"


def delta_tensors(prefix, config):
    """A gated delta network."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    yield prefix + "in_proj_qkv.weight", (channels, hidden), "matrix"
    yield prefix + "in_proj_z.weight", (values, hidden), "matrix"
    yield prefix + "in_proj_a.weight", (heads, hidden), "matrix"
    yield prefix + "in_proj_b.weight", (heads, hidden), "matrix"
    yield prefix + "A_log", (heads,), "gain"
    yield prefix + "dt_bias", (heads,), "gain"
    yield prefix + "conv1d.weight", (channels, 1, config["linear_conv_kernel_dim"]), "matrix"
    yield prefix + "norm.weight", (config["linear_value_head_dim"],), "gain"
    yield prefix + "out_proj.weight", (hidden, values), "matrix"


def lfm2_tensors(config):
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    multiple = config["block_multiple_of"]
    ffn = -(-(2 * config["intermediate_size"] // 3) // multiple) * multiple
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), "matrix"
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "operator_norm.weight", (hidden,), "gain"
        if kind == "conv":
            yield prefix + "conv.in_proj.weight", (3 * hidden, hidden), "matrix"
            yield prefix + "conv.conv.weight", (hidden, 1, config["conv_L_cache"]), "matrix"
            yield prefix + "conv.out_proj.weight", (hidden, hidden), "matrix"
        else:
            yield prefix + "self_attn.q_proj.weight", (query, hidden), "matrix"
            yield prefix + "self_attn.k_proj.weight", (kv, hidden), "matrix"
            yield prefix + "self_attn.v_proj.weight", (kv, hidden), "matrix"
            yield prefix + "self_attn.out_proj.weight", (hidden, query), "matrix"
            yield prefix + "self_attn.q_layernorm.weight", (head_dim,), "gain"
            yield prefix + "self_attn.k_layernorm.weight", (head_dim,), "gain"
        yield prefix + "ffn_norm.weight", (hidden,), "gain"
        for name, shape in (("w1", (ffn, hidden)), ("w3", (ffn, hidden)), ("w2", (hidden, ffn))):
            yield f"{prefix}feed_forward.{name}.weight", shape, "matrix"
    yield "model.embedding_norm.weight", (hidden,), "gain"


def gpt_oss_tensors(config):
    hidden, ffn, experts = (config[k] for k in ("hidden_size", "intermediate_size", "num_local_experts"))
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), "matrix"
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,), "gain"
        for name, outputs, inputs in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.router", experts, hidden),
        ):
            yield f"{prefix}{name}.weight", (outputs, inputs), "matrix"
            yield f"{prefix}{name}.bias", (outputs,), "matrix"
        yield prefix + "self_attn.sinks", (config["num_attention_heads"],), "matrix"
        yield prefix + "post_attention_layernorm.weight", (hidden,), "gain"
        for name, outputs, inputs in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
            of_experts = f"{prefix}mlp.experts.{name}"
            yield of_experts + "_blocks", (experts, outputs, inputs // 32, 16), "blocks"
            yield of_experts + "_scales", (experts, outputs, inputs // 32), "scales"
            yield of_experts + "_bias", (experts, outputs), "matrix"
    yield "model.norm.weight", (hidden,), "gain"
    yield "lm_head.weight", (config["vocab_size"], hidden), "matrix"


def gpt2_tensors(config):
    hidden = config["n_embd"]
    yield "transformer.wte.weight", (config["vocab_size"], hidden), "matrix"
    yield "transformer.wpe.weight", (config["n_positions"], hidden), "matrix"
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}."
        for norm in ("ln_1", "ln_2"):
            yield prefix + norm + ".weight", (hidden,), "gain"
            yield prefix + norm + ".bias", (hidden,), "matrix"
        # GPT-2 keeps its matrices as [in, out].
        for name, rows, columns in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, 4 * hidden),
            ("mlp.c_proj", 4 * hidden, hidden),
        ):
            yield prefix + name + ".weight", (rows, columns), "matrix"
            yield prefix + name + ".bias", (columns,), "matrix"
    yield "transformer.ln_f.weight", (hidden,), "gain"
    yield "transformer.ln_f.bias", (hidden,), "matrix"


# Tensors of bytes. Random 4-bit floats are about 2.9 in size, and a scale of 2^-7 makes that 0.02.
BYTES = {"blocks": (0, 255), "scales": (119, 121)}


def draw(seed, name, shape, kind):
    """Returns random floats, or random bytes."""
    generator = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    if kind in BYTES:
        low, high = BYTES[kind]
        return generator.integers(low, high, shape, dtype=np.uint8, endpoint=True)
    normal = generator.standard_normal(shape, dtype=np.float32)
    return 1.0 + 0.05 * normal if kind == "gain" else 0.02 * normal


def stored_bytes(array):
    """Rounds floats to bf16, to nearest with ties to even."""
    if array.dtype == np.uint8:
        return array.tobytes()
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_weights(path, config, seed):
    """Writes the file. Each core has one tensor in memory at a time."""
    plan = list(tensors(config))
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, kind in plan:
        dtype, size = ("U8", 1) if kind in BYTES else ("BF16", 2)
        start, end = end, end + size * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        num_threads = os.cpu_count() or 1
        with ThreadPoolExecutor(num_threads) as pool:
            for start in range(0, len(plan), num_threads):
                group = plan[start : start + num_threads]
                for data in pool.map(lambda tensor: stored_bytes(draw(seed, *tensor)), group):
                    file.write(data)
    return end
