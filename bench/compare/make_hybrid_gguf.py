"""Writes GGUF files with the weights of folders of bench/make_model.py: shapes of Qwen3.5 and gpt-oss.

    python bench/compare/make_hybrid_gguf.py MODEL OUT.gguf     # needs numpy and gguf (PyPI)

Matrices stay in bf16 and experts in MXFP4, bit for bit; vectors, routers and convolutions become f32 for llama.cpp.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

BF16 = gguf.GGMLQuantizationType.BF16
MXFP4 = gguf.GGMLQuantizationType.MXFP4


def read_tensors(path):
    """Returns the tensors as arrays on the file: bf16 as its 16 bits, and bytes."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", 8 + length)
    tensors = {}
    for name, it in header.items():
        start, end = it["data_offsets"]
        dtype = {"BF16": "<u2", "U8": np.uint8}[it["dtype"]]
        tensors[name] = data[start:end].view(dtype).reshape(it["shape"])
    return tensors


def f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def add_floats(writer, name, values):
    writer.add_tensor(name, np.ascontiguousarray(values, np.float32))


def add_matrix(writer, name, bits):
    writer.add_tensor(name, np.ascontiguousarray(bits).view(np.uint8), raw_dtype=BF16)


# ---- Qwen3.5


def write_qwen35(writer, config, tensors):
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    num_keys = 2 * key_heads * key_dim
    writer.add_uint32("qwen35.rope.dimension_count", int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_float32("qwen35.rope.freq_base", config["rope_parameters"]["rope_theta"])
    for key, value in (
        ("conv_kernel", config["linear_conv_kernel_dim"]),
        ("inner_size", value_heads * value_dim),
        ("state_size", key_dim),
        ("time_step_rank", value_heads),
        ("group_count", key_heads),
    ):
        writer.add_uint32("qwen35.ssm." + key, value)
    writer.add_uint32("qwen35.full_attention_interval", 4)

    def tiled(rows, size):
        """Sorts value heads by their place within their key head, then by key head."""
        heads = rows.reshape(key_heads, value_heads // key_heads, size, -1)
        return heads.swapaxes(0, 1).reshape(rows.shape)

    def tiled_behind_keys(rows):
        return np.concatenate([rows[:num_keys], tiled(rows[num_keys:], value_dim)])

    add_matrix(writer, "token_embd.weight", tensors["model.embed_tokens.weight"])
    add_floats(writer, "output_norm.weight", 1 + f32(tensors["model.norm.weight"]))
    for layer, kind in enumerate(config["layer_types"]):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        add_floats(writer, ours + "attn_norm.weight", 1 + f32(tensors[theirs + "input_layernorm.weight"]))
        add_floats(writer, ours + "post_attention_norm.weight", 1 + f32(tensors[theirs + "post_attention_layernorm.weight"]))
        for name in ("gate", "up", "down"):
            add_matrix(writer, f"{ours}ffn_{name}.weight", tensors[f"{theirs}mlp.{name}_proj.weight"])
        if kind == "full_attention":
            for name, end in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
                add_matrix(writer, f"{ours}attn_{end}.weight", tensors[f"{theirs}self_attn.{name}_proj.weight"])
            for name in ("q_norm", "k_norm"):
                add_floats(writer, f"{ours}attn_{name}.weight", 1 + f32(tensors[f"{theirs}self_attn.{name}.weight"]))
            continue
        theirs += "linear_attn."
        add_matrix(writer, ours + "attn_qkv.weight", tiled_behind_keys(tensors[theirs + "in_proj_qkv.weight"]))
        add_matrix(writer, ours + "attn_gate.weight", tiled(tensors[theirs + "in_proj_z.weight"], value_dim))
        add_matrix(writer, ours + "ssm_alpha.weight", tiled(tensors[theirs + "in_proj_a.weight"], 1))
        add_matrix(writer, ours + "ssm_beta.weight", tiled(tensors[theirs + "in_proj_b.weight"], 1))
        add_floats(writer, ours + "ssm_a", tiled(-np.exp(f32(tensors[theirs + "A_log"])), 1))
        add_floats(writer, ours + "ssm_dt.bias", tiled(f32(tensors[theirs + "dt_bias"]), 1))
        convolution = tensors[theirs + "conv1d.weight"].squeeze(1)
        add_floats(writer, ours + "ssm_conv1d.weight", f32(tiled_behind_keys(convolution)))
        add_floats(writer, ours + "ssm_norm.weight", f32(tensors[theirs + "norm.weight"]))
        outputs = tensors[theirs + "out_proj.weight"]
        add_matrix(writer, ours + "ssm_out.weight", tiled(outputs.T, value_dim).T)


# ---- gpt-oss


def write_gpt_oss(writer, config, tensors):
    scaling = config["rope_scaling"]
    writer.add_float32("gpt-oss.rope.freq_base", config["rope_theta"])
    writer.add_uint32("gpt-oss.rope.dimension_count", config["head_dim"])
    writer.add_string("gpt-oss.rope.scaling.type", "yarn")
    writer.add_float32("gpt-oss.rope.scaling.factor", scaling["factor"])
    writer.add_uint32("gpt-oss.rope.scaling.original_context_length", scaling["original_max_position_embeddings"])
    writer.add_uint32("gpt-oss.attention.sliding_window", config["sliding_window"])
    writer.add_uint32("gpt-oss.expert_count", config["num_local_experts"])
    writer.add_uint32("gpt-oss.expert_used_count", config["num_experts_per_tok"])
    writer.add_uint32("gpt-oss.expert_feed_forward_length", config["intermediate_size"])
    add_matrix(writer, "token_embd.weight", tensors["model.embed_tokens.weight"])
    add_matrix(writer, "output.weight", tensors["lm_head.weight"])
    add_floats(writer, "output_norm.weight", f32(tensors["model.norm.weight"]))
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        add_floats(writer, ours + "attn_norm.weight", f32(tensors[theirs + "input_layernorm.weight"]))
        add_floats(writer, ours + "post_attention_norm.weight", f32(tensors[theirs + "post_attention_layernorm.weight"]))
        for name, end in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
            add_matrix(writer, f"{ours}attn_{end}.weight", tensors[f"{theirs}self_attn.{name}_proj.weight"])
            add_floats(writer, f"{ours}attn_{end}.bias", f32(tensors[f"{theirs}self_attn.{name}_proj.bias"]))
        add_floats(writer, ours + "attn_sinks.weight", f32(tensors[theirs + "self_attn.sinks"]))
        for end in ("weight", "bias"):
            add_floats(writer, f"{ours}ffn_gate_inp.{end}", f32(tensors[f"{theirs}mlp.router.{end}"]))
        theirs += "mlp.experts."
        # Rows of gates alternate with rows of their values.
        for name, source, rows in (
            ("gate", "gate_up_proj", slice(0, None, 2)),
            ("up", "gate_up_proj", slice(1, None, 2)),
            ("down", "down_proj", slice(None)),
        ):
            blocks = tensors[f"{theirs}{source}_blocks"][:, rows]
            scales = tensors[f"{theirs}{source}_scales"][:, rows]
            writer.add_tensor(f"{ours}ffn_{name}_exps.weight", packed(blocks, scales), raw_dtype=MXFP4)
            add_floats(writer, f"{ours}ffn_{name}_exps.bias", f32(tensors[f"{theirs}{source}_bias"][:, rows]))


def packed(blocks, scales):
    """A byte of a folder has two neighbours; a byte of a file has elements 16 apart, after the scale."""
    elements = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    bytes = elements[..., :16] | elements[..., 16:] << 4
    return np.concatenate([scales[..., None], bytes], axis=-1).reshape(*blocks.shape[:2], -1)


# ---- files

FAMILIES = {"qwen3_5_text": ("qwen35", "qwen35", write_qwen35), "gpt_oss": ("gpt-oss", "gpt-4o", write_gpt_oss)}


def write_tokenizer(writer, tokenizer, pre, config):
    model = tokenizer["model"]
    tokens = {id: token for token, id in model["vocab"].items()}
    special = {it["id"]: it["content"] for it in tokenizer["added_tokens"]}
    tokens |= special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens[id] for id in range(config["vocab_size"])])
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[id in special] for id in range(config["vocab_size"])])
    writer.add_token_merges([it if isinstance(it, str) else " ".join(it) for it in model["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main():
    folder, out = map(Path, sys.argv[1:])
    config = json.loads((folder / "config.json").read_text())
    architecture, pre, write = FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), pre, config)
    write(writer, config, read_tensors(folder / "model.safetensors"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
