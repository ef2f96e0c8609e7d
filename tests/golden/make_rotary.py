#!/usr/bin/env python3
"""Make rotary.json: the frequencies of RoPE that Transformers computes, for every kind of scaling.

    .venv/bin/python tests/golden/make_rotary.py

Each case has the settings as config.json has them, the length of a context, the frequency of each
rotated pair, and the factor of cosines and sines.
"""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HEAD_DIM = 32
LONG = {
    "short_factor": [1.0 + 0.02 * i for i in range(12)],
    "long_factor": [1.0 + 0.5 * i * i for i in range(12)],
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
CASES = [
    ({"rope_type": "linear", "factor": 3.0}, 4096),
    ({"rope_type": "dynamic", "factor": 2.0}, 1000),
    ({"rope_type": "dynamic", "factor": 2.0}, 8192),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        2048,
    ),
    (YARN, 2048),
    (YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 0.9}, 2048),
    (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "partial_rotary_factor": 0.5}, 2048),
    ({"rope_type": "longrope", "partial_rotary_factor": 0.75} | LONG, 200),
    ({"rope_type": "longrope", "partial_rotary_factor": 0.75} | LONG, 2048),
]


def make(parameters, context):
    settings = {"max_position_embeddings": 2048, "head_dim": HEAD_DIM, "hidden_size": 4 * HEAD_DIM}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    parameters = {"rope_theta": 10000.0} | parameters
    kind = parameters["rope_type"]
    if kind == "longrope":
        config = Phi3Config(
            **settings, original_max_position_embeddings=256, rope_parameters=dict(parameters), pad_token_id=0
        )
        original = {"original_max_position_embeddings": 256}
    else:
        config = LlamaConfig(**settings, rope_parameters=dict(parameters))
        original = {}
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=context)
    return {
        "config": {"max_position_embeddings": 2048, "rope_parameters": parameters} | original,
        "head_dim": HEAD_DIM,
        "context": context,
        "frequencies": [float(f"{x:.9g}") for x in frequencies.tolist()],
        "magnitude": float(magnitude),
    }


def main():
    cases = [json.dumps(make(*case)) for case in CASES]
    text = "[\n" + ",\n".join(cases) + "\n]\n"
    (Path(__file__).parent / "rotary.json").write_text(text)


if __name__ == "__main__":
    main()
