"""Writes a run as a Hugging Face folder: config.json, weights in bf16.

The weights are the mean of some that the plan names (`mean_of`): those that its last part began
with, and those at its end. It reads wordings that training had not better than either of them. A
checkpoint that is named is written as it is.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from model import CONFIG, mean_state

HERE = Path(__file__).parent


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--checkpoint", help="instead of the mean")
    args.add_argument("--folder", default=str(HERE))
    args = args.parse_args()
    folder = Path(args.folder)
    folder.mkdir(exist_ok=True)
    steps = json.loads((HERE / "plan.json").read_text())["mean_of"]
    paths = [args.checkpoint] if args.checkpoint else [HERE / "run" / f"state_{step}.pt" for step in steps]
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in mean_state(paths).items()}
    temporary = folder / "model.safetensors.tmp"
    save_file(weights, str(temporary), metadata={"format": "pt"})
    os.replace(temporary, folder / "model.safetensors")
    ends = {"eos_token_id": [2, 0], "bos_token_id": None, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **ends}, indent=2) + "\n")
    # Hotter draws mix up the stories of so small a model.
    sampling = {"do_sample": True, "temperature": 0.4, "top_p": 0.8}
    (folder / "generation_config.json").write_text(json.dumps({**ends, **sampling}, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if folder.resolve() != HERE:
            (folder / name).write_text((HERE / name).read_text())
    print(f"{[path.name for path in map(Path, paths)]}: {sum(v.numel() for v in weights.values())} parameters, "
          f"{(folder / 'model.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main()
