#!/usr/bin/env python3
"""Make tiny quantised checkpoints, with what Transformers computes from their dequantised weights.

    .venv/bin/pip install -r tests/golden/requirements.txt -r tests/quantized/requirements.txt
    .venv/bin/python tests/quantized/make_quantized.py [NAME …]

Folders are like those in tests/golden. The compressed-tensors package writes and reads its own
folders. GPTQ and AWQ folders are packed here, after the papers and the descriptions of files by
AutoGPTQ and AutoAWQ, and the package's own converter must read the AWQ ones in the same way. The
goldens are those of a plain checkpoint with the dequantised weights in bf16, as any 16-bit kernel
sees them; activations are not rounded.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "golden"))
import make_golden  # noqa: E402
from golden_shape import llama, qwen3  # noqa: E402
from make_golden import asked_names, draw_weights, set_up_transformers  # noqa: E402


def small(**changes):
    return llama(num_hidden_layers=1, vocab_size=96, tie_word_embeddings=False) | changes


def compressed(weights, activations=None, ignore=("lm_head",), form="pack-quantized"):
    return {
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
        "format": form,
        "ignore": list(ignore),
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def integers(bits, group_len=None, symmetric=True):
    strategy = {"strategy": "channel"} if group_len is None else {"strategy": "group", "group_size": group_len}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False} | strategy


PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

# name: (configuration, quantization_config, dtype of other tensors and of scales)
FOLDERS = {
    "int4-g32": (small(), compressed(integers(4, 32)), torch.float32),
    "int4-g64-asymmetric": (
        qwen3(num_hidden_layers=1, vocab_size=96, intermediate_size=128),
        compressed(integers(4, 64, symmetric=False)),
        torch.bfloat16,
    ),
    "int4-g128": (
        small(hidden_size=128, intermediate_size=128, vocab_size=64),
        # The output projection is not quantised.
        compressed(integers(4, 128), ignore=["lm_head", "re:.*o_proj"]),
        torch.bfloat16,
    ),
    "int4-channel-head": (small(), compressed(integers(4, None, symmetric=False), ignore=[]), torch.float16),
    "int8": (small(), compressed(integers(8), PER_TOKEN, form="int-quantized"), torch.bfloat16),
    "int8-g32": (small(), compressed(integers(8, 32)), torch.float32),
    "gptq": (small(), GPTQ, torch.float16),
    "gptq-reordered": (small(), GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}, torch.float16),
    "gptq-symmetric": (small(), GPTQ | {"sym": True, "group_size": -1}, torch.float32),
    "awq": (small(), AWQ, torch.float16),
}


def is_quantised(name, quantization):
    if not name.endswith("_proj.weight") and name != "lm_head.weight":
        return False
    if quantization["quant_method"] != "compressed-tensors":
        return name != "lm_head.weight"
    ignore = quantization["ignore"]
    return not (name == "lm_head.weight" and "lm_head" in ignore or "o_proj" in name and len(ignore) > 1)


def quantise_compressed(weight, quantization, dtype):
    """Returns the tensors that the package makes of a matrix, and the matrix that it reads from them."""
    group = quantization["config_groups"]["group_0"]
    weights = QuantizationArgs(**group["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    weight = weight.to(dtype)
    groups = weight.reshape(weight.shape[0], -1, weights.group_size or weight.shape[1])
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
    state = {"weight": weight, "weight_scale": scale.to(dtype)}
    if not weights.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(quantization["format"])
    packed = compressor.compress(state, scheme)
    # The product is computed in f32, so that it is rounded only once.
    wide = packed | {"weight_scale": packed["weight_scale"].float()}
    return packed, compressor.decompress(wide, scheme)["weight"]


def find_integers(weight, group_of, num_groups, symmetric, dtype):
    """Returns integers from 0 to 15 as [out, in], and scales and zero points as [out, groups]."""
    scales = np.zeros((weight.shape[0], num_groups), np.float32)
    zeros = np.full((weight.shape[0], num_groups), 8, np.int64)
    for group in range(num_groups):
        part = weight[:, group_of == group]
        if symmetric:
            scales[:, group] = np.abs(part).max(1) / 7.5
            continue
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, group] = (high - low) / 15
        # Files store a zero point less 1, so it is at least 1.
        zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 1, 15)
    scales = torch.from_numpy(scales).to(dtype)
    wide = scales.float().numpy()[:, group_of]
    quants = np.clip(np.round(weight / wide) + zeros[:, group_of], 0, 15).astype(np.int64)
    return quants, scales, zeros, (quants - zeros[:, group_of]).astype(np.float32) * wide


def pack(values, order=range(8)):
    """Packs eight elements of the last axis into each word. Element `order[0]` has the lowest bits."""
    words = np.zeros((*values.shape[:-1], values.shape[-1] // 8), np.uint32)
    for position, index in enumerate(order):
        words |= values[..., index::8].astype(np.uint32) << np.uint32(4 * position)
    return torch.from_numpy(words.view(np.int32))


def quantise_columns(weight, quantization, dtype, generator):
    """Packs GPTQ words along the inputs, and AWQ words along the outputs with even numbers first."""
    weight = weight.numpy()
    num_columns = weight.shape[1]
    group_len = quantization["group_size"] if quantization["group_size"] > 0 else num_columns
    group_of = np.arange(num_columns) // group_len
    if quantization.get("desc_act"):
        generator.shuffle(group_of)
    quants, scales, zeros, values = find_integers(
        weight, group_of, num_columns // group_len, quantization.get("sym", False), dtype
    )
    tensors = {"scales": scales.T.contiguous()}
    if quantization["quant_method"] == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors["qweight"] = pack(quants.T, order)
        tensors["qzeros"] = pack(zeros.T, order)
        package = AutoAWQConverter(group_size=group_len)
        theirs, _, their_zeros = package._convert_gemm_module(
            tensors["qweight"], tensors["scales"], tensors["qzeros"]
        )
        assert (theirs.numpy() + 8 == quants).all() and (their_zeros.numpy() + 8 == zeros).all()
    else:
        version = quantization.get("checkpoint_format", "gptq")
        tensors["qweight"] = pack(quants).T.contiguous()
        tensors["qzeros"] = pack((zeros - (version == "gptq")).T)
        tensors["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        # The first programs that wrote this format gave every layer a bias.
        tensors["bias"] = torch.zeros(weight.shape[0], dtype=dtype)
    return tensors, torch.from_numpy(values)


def write(folder, name, seed):
    """Makes the quantised folder, and a plain one with the same weights."""
    config, quantization, dtype = FOLDERS[name]
    generator = np.random.default_rng([seed, 2])
    plain, tensors = {}, {}
    for key, weight in draw_weights(config, seed).items():
        stem = key.removesuffix(".weight")
        if not is_quantised(key, quantization):
            tensors[key] = weight.to(dtype)
            plain[key] = tensors[key].float()
            continue
        if quantization["quant_method"] == "compressed-tensors":
            parts, values = quantise_compressed(weight, quantization, dtype)
        else:
            parts, values = quantise_columns(weight, quantization, dtype, generator)
        tensors |= {f"{stem}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        plain[key] = values.bfloat16().float()
    make_golden.write_checkpoint(folder / "plain", config, plain, torch.float32, 1)
    quantised = folder / name
    quantised.mkdir(exist_ok=True)
    config = config | {"torch_dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization}
    (quantised / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})


def make(name):
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for seed in range(1000):
            write(scratch, name, seed)
            golden = make_golden.evaluate(scratch / "plain", seed)
            if isinstance(golden, str):
                print(f"{name}: seed {seed}: {golden}", file=sys.stderr)
                continue
            make_golden.write_golden(scratch / name, golden)
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(scratch / name, HERE / name)
            print(f"{name}: seed {seed}", flush=True)
            return
    sys.exit(f"{name}: no seed will do")


def main():
    names = asked_names(__doc__, FOLDERS)
    set_up_transformers()
    for name in names:
        make(name)


if __name__ == "__main__":
    main()
