#!/usr/bin/env python3
"""Make Hugging Face model folders of real shapes with seeded random weights.

    python bench/make_model.py qwen3-0.6b small-32k        # into bench/models/
    python bench/make_model.py --list

The models are for benchmarks and load tests, because speed depends on shapes and bytes, not on
the values of weights. Needs numpy and tokenizers. A folder has config.json,
generation_config.json, model.safetensors (bf16), tokenizer.json and
tokenizer_config.json with a chat template.

Weights depend on the seed and the tensor's name only. The tokenizer is byte-level BPE in
the family's style, trained on the source text of Python's standard library, so it is the
same wherever the same Python release is; its digest is printed for use in reports.
"""

import argparse
import hashlib
import json
import os
import struct
import sys
import sysconfig
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

# ---- shapes: (config, generation config, tokenizer family, special tokens)


def qwen3(layers, hidden, ffn, heads, kv_heads, head_dim, vocab, context, specials):
    end_of_text, im_start, im_end = specials
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": im_end,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": context,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    generation = {
        "bos_token_id": end_of_text,
        "eos_token_id": [im_end, end_of_text],
        "pad_token_id": end_of_text,
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    tokens = {
        "<|endoftext|>": end_of_text,
        "<|im_start|>": im_start,
        "<|im_end|>": im_end,
    }
    return config, generation, "qwen", tokens


def qwen3_06b():
    return qwen3(28, 1024, 3072, 16, 8, 128, 151936, 40960, (151643, 151644, 151645))


def small_32k():
    """A model of 6.8 M parameters, to measure the scheduler and attention over long contexts."""
    return qwen3(6, 256, 768, 4, 2, 64, 8192, 32768, (8189, 8190, 8191))


def small_24l():
    """A model of 24 layers and 21 M parameters, to measure transfers beside the layers that are still computed."""
    return qwen3(24, 256, 768, 4, 2, 64, 8192, 32768, (8189, 8190, 8191))


def llama32_1b():
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    }
    generation = {
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    tokens = {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
    }
    return config, generation, "llama", tokens


def llama3_8b():
    config, generation, family, tokens = llama32_1b()
    config |= {
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_hidden_layers": 32,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    }
    return config, generation, family, tokens


def gpt2():
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": None,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 50257,
    }
    generation = {"bos_token_id": 50256, "eos_token_id": 50256}
    return config, generation, "gpt2", {"<|endoftext|>": 50256}


def gemma2_2b():
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 255997,
        "cache_implementation": "hybrid",
        "eos_token_id": 255999,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "pad_token_id": 255997,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 256000,
    }
    tokens = {"<|endoftext|>": 255997, "<|im_start|>": 255998, "<|im_end|>": 255999}
    generation = {"bos_token_id": 255997, "eos_token_id": [255999, 255997]}
    return config, generation, "qwen", tokens


def qwen3_moe():
    """Qwen3-30B-A3B's layers, but 28 of them, and a quarter of the experts, so that it fits in 24 GB."""
    config, generation, family, tokens = qwen3(
        28, 2048, 6144, 32, 4, 128, 151936, 40960, (151643, 151644, 151645)
    )
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    return config, generation, family, tokens


def lfm2(hidden, ffn, heads, kv_heads, vocab, specials):
    """Short convolutions with six layers of attention between them."""
    config, generation, family, tokens = qwen3(16, hidden, ffn, heads, kv_heads, 64, vocab, 32768, specials)
    attention = (2, 5, 8, 10, 12, 14)
    config |= {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["full_attention" if layer in attention else "conv" for layer in range(16)],
        "norm_eps": 1e-5,
    }
    return config, generation, family, tokens


def lfm2_350m():
    return lfm2(1024, 6656, 16, 8, 65536, (65533, 65534, 65535))


def small_lfm2():
    """A model of 45 M parameters, to measure the prefix cache over long contexts."""
    return lfm2(512, 1536, 8, 4, 8192, (8189, 8190, 8191))


def qwen35(layers, hidden, ffn, heads, kv_heads, head_dim, delta_heads, vocab, specials, value_heads=None):
    """Three gated delta networks to each layer of attention. `delta_heads` heads have keys, and as many values unless given."""
    config, generation, family, tokens = qwen3(
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab, 32768, specials
    )
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config |= {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": kinds * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": delta_heads,
        "linear_num_value_heads": value_heads or delta_heads,
        "linear_value_head_dim": 128,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    }
    return config, generation, family, tokens


def qwen35_08b():
    return qwen35(24, 1024, 3584, 8, 2, 256, 16, 248320, (248069, 248070, 248071))


def qwen35_4b():
    return qwen35(32, 2560, 9216, 16, 4, 256, 16, 248320, (248069, 248070, 248071), value_heads=32)


def gpt_oss_20b():
    """Experts are 4-bit floats, of which 32 share a power of two."""
    layers, end_of_text, end_of_turn = 24, 199999, 200002
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": end_of_turn,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "pad_token_id": end_of_text,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 201088,
    }
    generation = {"eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text}
    tokens = {"<|endoftext|>": end_of_text, "<|im_start|>": 200001, "<|im_end|>": end_of_turn}
    return config, generation, "qwen", tokens


def small_qwen35():
    """A model of 49 M parameters, to measure the prefix cache over long contexts."""
    return qwen35(16, 512, 1024, 4, 2, 128, 4, 8192, (8189, 8190, 8191))


SHAPES = {
    "qwen3-0.6b": qwen3_06b,
    "gemma-2-2b": gemma2_2b,
    "lfm2-350m": lfm2_350m,
    "qwen3-moe": qwen3_moe,
    "qwen3.5-0.8b": qwen35_08b,
    "qwen3.5-4b": qwen35_4b,
    "gpt-oss-20b": gpt_oss_20b,
    "llama-3.2-1b": llama32_1b,
    "llama-3-8b": llama3_8b,
    "gpt2": gpt2,
    "small-32k": small_32k,
    "small-24l": small_24l,
    "small-lfm2": small_lfm2,
    "small-qwen3.5": small_qwen35,
}

# ---- tensors: (name, shape, kind) in file order


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
    # Norms of Gemma and Qwen3.5 multiply by one more than their weights.
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
    """Returns floats, or bytes."""
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
    """Writes the file with one tensor for each core in memory at a time."""
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


# ---- tokenizer

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"qwen": r"\p{N}", "llama": r"\p{N}{1,3}"}
MAX_MERGED_VOCAB = 24_000
TEXT_BYTES = 12 << 20

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
LLAMA_CHAT = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] + '<|eot_id|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)
PLAIN_CHAT = (
    "{%- for message in messages -%}{{- message['role'] + ': ' + message['content'] + '\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
)


def tokenizer_config(family, context):
    common = {"model_max_length": context, "clean_up_tokenization_spaces": False}
    if family == "qwen":
        return common | {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "chat_template": CHATML,
        }
    if family == "llama":
        return common | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "chat_template": LLAMA_CHAT,
        }
    return common | {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
        "chat_template": PLAIN_CHAT,
    }


def training_text():
    left = TEXT_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py")
    ):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        left -= len(text)
        if left <= 0:
            return


def write_tokenizer(path, family, vocab_size, specials):
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    byte_level = processors.ByteLevel(trim_offsets=False)
    if family == "gpt2":
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        words = Regex(WORDS.replace("DIGITS", DIGITS[family]))
        splitter = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = splitter
    trained.train_from_iterator(
        training_text(),
        trainers.BpeTrainer(
            vocab_size=min(MAX_MERGED_VOCAB, min(specials.values())),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in state["merges"]]

    # The rest of the vocabulary are tokens that text never produces. A random model draws them all
    # the time, and they decode to their own names.
    vocab = state["vocab"] | specials
    used = set(vocab.values())
    vocab |= {f"<|unused_{i}|>": i for i in range(vocab_size) if i not in used}
    assert sorted(vocab.values()) == list(range(vocab_size)), "token ids have gaps or overlap"

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=family == "llama"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = byte_level
    if family == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    if family == "llama":
        bos = "<|begin_of_text|>"
        tokenizer.post_processor = processors.Sequence(
            [
                byte_level,
                processors.TemplateProcessing(
                    single=f"{bos} $A",
                    pair=f"{bos} $A {bos}:1 $B:1",
                    special_tokens=[(bos, specials[bos])],
                ),
            ]
        )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    assert tokenizer.get_vocab_size() == vocab_size
    tokenizer.save(str(path))


# ---- folders


def cut(config, generation, specials, divisor):
    """Divides the layers and the vocabulary, so that the head keeps its share of the bytes. Special tokens stay the last."""
    config["num_hidden_layers"] //= divisor
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    removed = config["vocab_size"] - config["vocab_size"] // divisor
    config["vocab_size"] -= removed
    for fields in (config, generation, specials):
        for field, value in fields.items():
            if field.endswith("token_id") or fields is specials:
                fields[field] = [id - removed for id in value] if isinstance(value, list) else value - removed


def make(name, folder, seed, divisor=1):
    config, generation, family, specials = SHAPES[name]()
    if divisor > 1:
        cut(config, generation, specials, divisor)
    context = config.get("max_position_embeddings") or config["n_positions"]
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config(family, context)),
    ):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer = folder / "tokenizer.json"
    write_tokenizer(tokenizer, family, config["vocab_size"], specials)
    num_bytes = write_weights(folder / "model.safetensors", config, seed)
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()[:12]
    print(
        f"{folder}: {num_bytes / 1e9:.3f} GB, "
        f"tokenizer {digest}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", metavar="NAME", help="shapes to make [all]")
    parser.add_argument("--list", action="store_true", help="print the shapes and exit")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cut", type=int, default=1, metavar="N",
                        help="an Nth of the layers and of the vocabulary, for shapes whose config.json lists kinds of layers")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(SHAPES))
        return
    for name in arguments.name:
        if name not in SHAPES:
            sys.exit(f"unknown shape {name!r}; use one of {', '.join(SHAPES)}")
    for name in arguments.name or SHAPES:
        folder = name if arguments.cut == 1 else f"{name}-cut{arguments.cut}"
        make(name, arguments.out / folder, arguments.seed, arguments.cut)


if __name__ == "__main__":
    main()
