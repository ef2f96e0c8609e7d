#!/usr/bin/env python3
"""Make rotary.json: the frequencies of RoPE that Transformers computes, for every kind of scaling.

    .venv/bin/python tests/golden/make_rotary.py

Each case has the settings as config.json has them, the length of a context, the frequency of each
rotated pair, and the factor of cosines and sines.

rotary_config.json has whole configurations instead, with fields that contradict each other or are missing. It has the
same numbers for the first and the last layer, from the model's own RoPE.
"""

import importlib
import json
from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, Phi3Config
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


PLAIN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 6,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
    "max_position_embeddings": 40960,
}
# The scaling that Qwen's model cards add for longer contexts, and its spelling in older ones.
QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
OLD_QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEFAULT = {"rope_type": "default", "rope_theta": 1000000.0}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
}
# The name of a family's class, its model_type, and the fields of a case.
CONFIGURATIONS = [
    ("Qwen3", "qwen3", {"rope_theta": 1000000, "rope_scaling": QWEN}),
    ("Qwen2", "qwen2", {"rope_theta": 1000000.0, "rope_scaling": OLD_QWEN, "max_position_embeddings": 32768}),
    ("Qwen3", "qwen3", {"rope_parameters": DEFAULT | QWEN}),
    # The older field replaces the whole newer object: settings that the field lacks are not taken from the object.
    ("Qwen3", "qwen3", {"rope_parameters": DEFAULT, "rope_scaling": QWEN}),
    ("Qwen3", "qwen3", {"rope_theta": 5000000.0, "rope_parameters": DEFAULT, "rope_scaling": QWEN}),
    ("Qwen3", "qwen3", {"rope_parameters": DEFAULT, "rope_scaling": QWEN | {"rope_theta": 3000.0}}),
    ("Qwen3", "qwen3", {"rope_parameters": DEFAULT | QWEN, "rope_scaling": {}}),
    ("Qwen3", "qwen3", {"rope_parameters": DEFAULT | QWEN, "rope_scaling": None}),
    ("Llama", "llama", {"rope_parameters": DEFAULT | QWEN, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    # In Gemma 3, the older field is added to the settings of layers without a window.
    ("Gemma3", "gemma3_text", {"rope_parameters": BY_TYPE, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("Gemma3", "gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 300000.0}),
    # max_position_embeddings is already the context that YaRN reaches.
    ("Qwen3", "qwen3", {"rope_scaling": QWEN, "max_position_embeddings": 131072}),
    # The defaults of the classes.
    ("Llama", "llama", {}),
    ("Mistral", "mistral", {}),
    ("Mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("Cohere", "cohere", {}),
    ("SmolLM3", "smollm3", {"no_rope_layers": [1] * 6}),
    ("Olmo3", "olmo3", {}),
    ("Exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 6}),
    ("SeedOss", "seed_oss", {}),
    ("Glm", "glm", {}),
    ("Glm4", "glm4", {}),
    ("Glm4", "glm4", {"rope_theta": 500000.0, "partial_rotary_factor": 0.25}),
    ("Glm4Moe", "glm4_moe", EXPERTS | {"n_routed_experts": 4}),
    ("Qwen2Moe", "qwen2_moe", EXPERTS | {"num_experts": 4}),
    ("Ernie4_5", "ernie4_5", {}),
    ("Ernie4_5_Moe", "ernie4_5_moe", EXPERTS | {"moe_num_experts": 4, "moe_k": 2}),
    ("MiniMaxM2", "minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("MiniMaxM2", "minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16}),
]


def make_configuration(family, model_type, fields):
    fields = PLAIN | fields
    if family == "Gemma3":
        fields |= {"sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32}
    if family != "Cohere":
        fields |= {"head_dim": 32}
    config = AutoConfig.for_model(model_type, **json.loads(json.dumps(fields)))
    name = model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rotary = getattr(module, f"{family}RotaryEmbedding")(config)
    layers = []
    for index in range(fields["num_hidden_layers"]):
        kind = f"{config.layer_types[index]}_" if family in ("Gemma3", "Olmo3") else ""
        frequencies = getattr(rotary, f"{kind}inv_freq").tolist()
        layers.append(
            {
                "frequencies": [float(f"{x:.9g}") for x in frequencies],
                "magnitude": float(getattr(rotary, f"{kind}attention_scaling")),
            }
        )
    return {
        "config": {"architectures": [f"{family}ForCausalLM"], "model_type": model_type} | fields,
        "first": layers[0],
        "last": layers[-1],
    }


def main():
    configurations = [json.dumps(make_configuration(*case)) for case in CONFIGURATIONS]
    text = "[\n" + ",\n".join(configurations) + "\n]\n"
    (Path(__file__).parent / "rotary_config.json").write_text(text)
    cases = [json.dumps(make(*case)) for case in CASES]
    text = "[\n" + ",\n".join(cases) + "\n]\n"
    (Path(__file__).parent / "rotary.json").write_text(text)


if __name__ == "__main__":
    main()
