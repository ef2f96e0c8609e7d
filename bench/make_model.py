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
import sys
from pathlib import Path

from model_shape import SHAPES, cut
from model_tokenizer import tokenizer_config, write_tokenizer
from model_weights import write_weights


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
