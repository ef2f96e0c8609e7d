"""Converts golden models of every family to GGUF with llama.cpp's own converter.

    .venv/bin/python tests/gguf/make_family.py LLAMA_CPP    # llama.cpp's source; needs torch, transformers and gguf

Cohere is left out, since llama.cpp has this family with shared embeddings only. Weights stay f32, so that a file's
numbers are those of its folder. Files have no tokenizer, since golden models have none. The committed files were
written by commit 0c1e57098, which the sdist of llama-cpp-python 0.3.36 contains.
"""

import json
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
# gpt-oss with quantised experts, whose blocks the converter repacks.
MXFP4 = HERE.parent / "quantized" / "mxfp4"
FAMILIES = (
    "ernie4-5",
    "ernie4-5-moe",
    "exaone4",
    "exaone4-full",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "glm4-moe",
    "gpt-oss",
    "gpt2",
    "granite",
    "lfm2-moe-unscaled",
    "lfm2-unbiased",
    "minimax-m2",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "phi3-full",
    "qwen2-moe",
    "qwen3-5",
    "qwen3-5-groups",
    "qwen3-5-moe",
    "qwen3-moe-all",
    "qwen3-next-all",
    "seed-oss",
    "smollm3",
)


def convert(source, name):
    """Converts a golden model of a family."""
    convert_folder(source, GOLDEN / name, HERE / "family" / f"{name}.gguf")


def convert_folder(source, stored, out):
    """Runs the converter in this process, with no vocabulary for the families that would ask for one."""
    name = stored.name
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel

    def without_vocabulary(family):
        family.set_vocab = TextModel._set_vocab_none

    # Families are imported later, when the converter knows which one it needs.
    TextModel.__init_subclass__ = classmethod(without_vocabulary)
    with tempfile.TemporaryDirectory() as copied:
        # The converter names the model after its folder, and looks for a tokenizer beside its weights.
        folder = Path(copied) / name
        shutil.copytree(stored, folder)
        config = json.loads((folder / "config.json").read_text())
        # The published GPT-2 has its context in two fields, and today's Transformers writes only one.
        if "n_positions" in config:
            (folder / "config.json").write_text(json.dumps(config | {"n_ctx": config["n_positions"]}))
        # The converter cuts Gemma 3's embeddings after the last token of the tokenizer.
        if name == "gemma3":
            tokens = {f"<{id}>": id for id in range(config["vocab_size"])}
            tokenizer = {"model": {"vocab": tokens}, "added_tokens": []}
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        if name == "glm":
            write_chatglm(folder, config)
        sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outtype", "f32", "--outfile", str(out)]
        # The converter asks for a draft head, which the golden models lack.
        if name.startswith(("qwen3-next", "qwen3-5")):
            sys.argv.append("--no-nextn")
        runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


def write_chatglm(folder, config):
    """Writes GLM in its first form, ChatGLM, from which the published files were made."""
    from safetensors.torch import load_file, save_file

    changed = config | {
        "architectures": ["ChatGLMModel"],
        "ffn_hidden_size": config["intermediate_size"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "multi_query_group_num": config["num_key_value_heads"],
        "num_layers": config["num_hidden_layers"],
        "seq_length": config["max_position_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(changed))
    weights = load_file(folder / "model.safetensors")
    names = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attn.o_proj.weight": "self_attention.dense.weight",
        "post_attention_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.gate_up_proj.weight": "mlp.dense_h_to_4h.weight",
        "mlp.down_proj.weight": "mlp.dense_4h_to_h.weight",
    }
    encoder = "transformer.encoder."
    renamed = {
        "transformer.embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        f"{encoder}final_layernorm.weight": weights["model.norm.weight"],
        "transformer.output_layer.weight": weights["lm_head.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer, to = f"model.layers.{layer}.", f"{encoder}layers.{layer}."
        renamed |= {to + new: weights[of_layer + old] for old, new in names.items()}
        for kind in ("weight", "bias"):
            parts = [weights[f"{of_layer}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            renamed[f"{to}self_attention.query_key_value.{kind}"] = torch.cat(parts)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def main():
    source = Path(sys.argv[1])
    if len(sys.argv) > 2 and sys.argv[2] == MXFP4.name:
        convert_folder(source, MXFP4, HERE / f"{MXFP4.name}.gguf")
        return
    if len(sys.argv) > 2:
        convert(source, sys.argv[2])
        return
    (HERE / "family").mkdir(exist_ok=True)
    for name in (*FAMILIES, MXFP4.name):
        subprocess.run([sys.executable, __file__, source, name], check=True)


if __name__ == "__main__":
    main()
