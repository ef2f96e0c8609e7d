#!/usr/bin/env python3
"""Make a tiny gpt-oss with experts in MXFP4, like the published models, with what Transformers computes from it.

    .venv/bin/pip install -r tests/golden/requirements.txt
    .venv/bin/python tests/quantized/make_mxfp4.py

Transformers reads the very folder that is committed, and dequantises the experts itself. All other tensors are bf16.
The experts are rounded to the nearest of the values that the OCP's specification of microscaling formats lists.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "golden"))
import golden_shape  # noqa: E402
import make_golden  # noqa: E402

NAME = "mxfp4"
GROUP_LEN = 32
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

golden_shape.FAMILIES[NAME] = (
    "GptOssConfig",
    golden_shape.small(
        hidden_size=64,
        intermediate_size=96,
        head_dim=32,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=golden_shape.WINDOW,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 8.0,
            "rope_theta": 30000.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    ),
)


def quantise(weight):
    """Returns the blocks and the scales of matrices [expert, in, out], which are stored as [expert, out, in]."""
    groups = weight.transpose(0, 2, 1).reshape(weight.shape[0], weight.shape[2], -1, GROUP_LEN)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scaled = groups / np.exp2(exponents)[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - LEVELS).argmin(-1) + 8 * (scaled < 0)
    codes = codes.astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def write(folder, seed):
    model = make_golden.make_module(NAME, seed)
    tensors = {}
    for name, values in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            # Rows of different magnitudes have different scales.
            spread = 2.0 ** (np.arange(values.shape[-1]) % 5 - 2)
            blocks, scales = quantise(values.numpy() * spread)
            parts = {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors |= {key: torch.from_numpy(np.ascontiguousarray(part)) for key, part in parts.items()}
        else:
            tensors[name] = values.bfloat16()
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    config = model.config.to_dict() | {"dtype": "bfloat16", "quantization_config": quantization}
    config["architectures"] = ["GptOssForCausalLM"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main():
    make_golden.set_up_transformers()
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(1000):
            folder = Path(scratch) / NAME
            write(folder, seed)
            golden = make_golden.evaluate(folder, seed)
            if isinstance(golden, str):
                print(f"seed {seed}: {golden}", file=sys.stderr)
                continue
            make_golden.write_golden(folder, golden)
            shutil.rmtree(HERE / NAME, ignore_errors=True)
            shutil.copytree(folder, HERE / NAME)
            print(f"seed {seed}")
            return
    sys.exit("no seed will do")


if __name__ == "__main__":
    main()
