#!/usr/bin/env python3
"""Print which output head Transformers uses, for what config.json and the files may say of it.

    .venv/bin/python tests/golden/make_head.py

`the_head_is_the_one_in_the_files` in crates/corella-model/src/checkpoint/tests/head.rs expects the same.
"""

import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "pad_token_id": 0,
}


def head(is_tied, stored):
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=is_tied)).save_pretrained(folder)
        tensors = load_file(f"{folder}/model.safetensors")
        tensors.pop("lm_head.weight", None)
        embed = tensors["model.embed_tokens.weight"]
        if stored == "copy":
            tensors["lm_head.weight"] = embed.clone()
        elif stored == "other":
            tensors["lm_head.weight"] = torch.full_like(embed, 0.5)
        elif stored == "only":
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(folder)
        used = model.lm_head.weight
        if used.data_ptr() == model.model.embed_tokens.weight.data_ptr():
            return "the embedding"
        if "lm_head.weight" not in tensors:
            return "none: it is left at random"
        return "its own" if torch.equal(used, tensors["lm_head.weight"]) else "another"


def main():
    for is_tied in (True, False):
        for stored in (None, "copy", "other", "only"):
            print(f"tie_word_embeddings {is_tied}, lm_head in the file: {stored}: {head(is_tied, stored)}")


if __name__ == "__main__":
    main()
