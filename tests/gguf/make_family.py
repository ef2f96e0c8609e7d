"""Makes GGUF files of golden models, with the names and the order of rows that llama.cpp's converter has.

    .venv/bin/python tests/gguf/make_family.py

Matrices are rounded to f16. What a GGUF file of a family cannot say, such as which layers of SmolLM3 know
positions, is left out.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
Arch = gguf.MODEL_ARCH
FAMILIES = {
    "gemma2": Arch.GEMMA2,
    "gemma3": Arch.GEMMA3,
    "gpt2": Arch.GPT2,
    "granite": Arch.GRANITE,
    "mixtral": Arch.LLAMA,
    "olmo2": Arch.OLMO2,
    "phi3": Arch.PHI3,
    "smollm3": Arch.SMOLLM3,
}
# Families whose rows the converter turns around, for executors that rotate neighbours.
TURNED = ("granite", "mixtral", "smollm3")


def turn(rows, num_heads):
    """Puts the rows that are rotated together next to each other."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors(name, config):
    stored = load_file(GOLDEN / name / "model.safetensors")
    names = gguf.get_tensor_name_map(FAMILIES[name], config.get("num_hidden_layers", 4))
    experts = {}
    for key, values in stored.items():
        if ".experts." in key:
            _, _, layer, _, _, expert, part, _ = key.split(".")
            experts.setdefault((layer, part), {})[int(expert)] = values
            continue
        if name == "gpt2" and values.ndim == 2 and ".h." in key:
            values = values.T
        if name.startswith("gemma") and "norm" in key:
            values = values + 1
        if name in TURNED and ".q_proj." in key:
            values = turn(values, config["num_attention_heads"])
        if name in TURNED and ".k_proj." in key:
            values = turn(values, config["num_key_value_heads"])
        yield names.get_name(key, try_suffixes=(".weight", ".bias")), values
    parts = {"w1": "gate", "w2": "down", "w3": "up"}
    for (layer, part), matrices in experts.items():
        stacked = np.stack([matrices[expert] for expert in sorted(matrices)])
        yield f"blk.{layer}.ffn_{parts[part]}_exps.weight", stacked


def write_keys(writer, name, config):
    get = config.get
    writer.add_context_length(get("max_position_embeddings", get("n_positions")))
    writer.add_embedding_length(get("hidden_size", get("n_embd")))
    writer.add_block_count(get("num_hidden_layers", get("n_layer")))
    writer.add_feed_forward_length(get("intermediate_size", get("n_inner")))
    writer.add_head_count(get("num_attention_heads", get("n_head")))
    if name == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        rope = config["rope_parameters"]
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
    if name in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if name == "mixtral":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if name == "phi3":
        rope = config["rope_parameters"]
        original = rope["original_max_position_embeddings"]
        growth = config["max_position_embeddings"] / original
        writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(growth) / np.log(original))))
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def make(name):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    writer = gguf.GGUFWriter(HERE / "family" / f"{name}.gguf", gguf.MODEL_ARCH_NAMES[FAMILIES[name]])
    write_keys(writer, name, config)
    for key, values in tensors(name, config):
        dtype = np.float16 if values.ndim > 1 else np.float32
        writer.add_tensor(key, np.ascontiguousarray(values.astype(dtype)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    (HERE / "family").mkdir(exist_ok=True)
    for name in FAMILIES:
        make(name)


if __name__ == "__main__":
    main()
