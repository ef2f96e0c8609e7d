#!/usr/bin/env python3
"""Add hidden.f32 to golden folders: the hidden states that Transformers computes for the folders' prompts.

    .venv/bin/python tests/golden/make_hidden.py [NAME …]

A file has, for each prompt of golden.json, `last_hidden_state` of the last token, then its mean over
all tokens: two vectors of the model's hidden size, in f32.
"""

import json

import torch
from transformers import AutoModelForCausalLM

from make_golden import HERE, asked_names, set_up_transformers


@torch.inference_mode()
def main():
    known = [path.parent.name for path in HERE.glob("*/golden.json")]
    known = sorted(name for name in known if (HERE / name / "config.json").exists())
    names = asked_names(__doc__, known)
    set_up_transformers()
    for name in names:
        folder = HERE / name
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        model = model.eval().base_model
        vectors = []
        for case in json.loads((folder / "golden.json").read_text())["cases"]:
            states = model(torch.tensor([case["prompt"]]), use_cache=False).last_hidden_state[0]
            vectors += [states[-1], states.double().mean(0).float()]
        (folder / "hidden.f32").write_bytes(torch.cat(vectors).numpy().astype("<f4").tobytes())
        print(f"{name}: {len(vectors)} vectors of {len(vectors[0])}", flush=True)


if __name__ == "__main__":
    main()
