#!/usr/bin/env python3
"""Make the golden models: tiny random checkpoints, with what Transformers computes from them.

    python -m venv .venv && .venv/bin/pip install -r tests/golden/requirements.txt
    .venv/bin/python tests/golden/make_golden.py [NAME …]

A folder has config.json, weights in safetensors, and golden.json, which has prompts, the logits
after each prompt, 64 greedy tokens, and the logits that the last of them was drawn from. Folders of
FAMILIES also have golden.f32, with the logits that each of the tokens was drawn from. It has
these logits a second time with K and V rounded to bf16, which gives the same tokens. Transformers
reads the very folder that is committed, and runs it in f32 with eager attention on the CPU, each
position from scratch. Weights stored as bf16 or f16 are evaluated in f32 too, so that only the
rounding of the stored weights is in a golden.

Greedy tokens can only be compared if no two logits are close. Seeds are tried in order until, at
every step, the best logit leads the second by MIN_MARGIN of the largest magnitude, and the output
is not one short loop.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
PROMPT_LENGTHS = (1, 17, 64, 150)
NUM_GREEDY = 64
MIN_MARGIN = 5e-4
MIN_DISTINCT = 12


def llama(**changes):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": 256,
    } | changes


def qwen3(**changes):
    config = llama(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        sliding_window=None,
        use_sliding_window=False,
    )
    del config["mlp_bias"]
    return config | changes


def qwen2(**changes):
    config = qwen3(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=10000.0)
    for key in ("attention_bias", "head_dim"):
        del config[key]
    return config | changes


def without_rope_keys(config):
    return {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}


# Wavelengths from 6 to 20,000 fall into all three bands, whose limits are 64 / 4 and 64 / 1.
LLAMA3_ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Together they have every combination of tied/untied embeddings and grouped/ungrouped heads, each
# option of the decoder that a config can switch, sizes that are no multiple of a vector, and both
# spellings of the rotary settings.
MODELS = {
    "llama-gqa-tied": llama(hidden_size=60, num_attention_heads=6),
    "llama-gqa-untied": llama(
        tie_word_embeddings=False,
        rope_scaling=LLAMA3_ROPE_SCALING,
    ),
    "llama-mha-tied": without_rope_keys(llama(num_key_value_heads=4))
    | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama-mha-untied": llama(
        num_key_value_heads=4, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "qwen2-gqa-untied": qwen2(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        vocab_size=64,
        tie_word_embeddings=False,
    ),
    "qwen3-gqa-tied": qwen3(head_dim=32, hidden_size=48),
    "qwen3-gqa-untied": without_rope_keys(
        qwen3(num_key_value_heads=1, tie_word_embeddings=False, num_hidden_layers=3, hidden_size=48)
    )
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "qwen3-mha-tied": qwen3(num_key_value_heads=4, attention_bias=True),
    "qwen3-mha-untied": qwen3(
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=24,
        hidden_size=56,
        intermediate_size=100,
        vocab_size=251,
        tie_word_embeddings=False,
    ),
}

# The same weights in other files: (folder, source folder, dtype, number of shards).
VARIANTS = (
    ("llama-gqa-tied-bf16", "llama-gqa-tied", torch.bfloat16, 1),
    ("llama-gqa-untied-f16", "llama-gqa-untied", torch.float16, 1),
    ("qwen3-gqa-tied-bf16", "qwen3-gqa-tied", torch.bfloat16, 1),
    ("qwen3-gqa-tied-sharded", "qwen3-gqa-tied", torch.float32, 3),
)


# A window, and a length from which on RoPE is scaled, that most prompts are longer than.
WINDOW = 24
ORIGINAL = 16

SMALL = {
    "architectures": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 80,
}


def small(**changes):
    return {key: value for key, value in (SMALL | changes).items() if value is not None}


GEMMA4_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}

# One model for each family, by the name of its configuration class in Transformers, with settings for
# which nothing that the family computes otherwise than Llama is without effect.
FAMILIES = {
    "cohere": ("CohereConfig", small(layer_norm_eps=1e-3, logit_scale=0.4, attention_bias=True, use_qk_norm=False)),
    "smollm3": (
        "SmolLM3Config",
        small(no_rope_layers=[1, 0, 1, 0], rope_parameters={"rope_type": "default", "rope_theta": 50000.0}),
    ),
    "olmo2": ("Olmo2Config", small(rope_parameters={"rope_type": "default", "rope_theta": 30000.0})),
    "granite": (
        "GraniteConfig",
        small(
            embedding_multiplier=0.7,
            attention_multiplier=0.2,
            residual_multiplier=1.3,
            logits_scaling=1.7,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "mistral": ("MistralConfig", small(sliding_window=WINDOW, head_dim=12)),
    # All prompts are longer than the original context: Transformers takes other frequencies for shorter
    # ones, and Corella those of the longest context that is served.
    "phi3": (
        "Phi3Config",
        small(
            sliding_window=WINDOW,
            original_max_position_embeddings=ORIGINAL,
            partial_rotary_factor=0.75,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.0, 1.9, 5.0],
                "original_max_position_embeddings": ORIGINAL,
            },
        ),
    ),
    "phi3-full": ("Phi3Config", small(sliding_window=None, tie_word_embeddings=True)),
    "gpt2": (
        "GPT2Config",
        {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 4,
            "n_positions": 256,
            "layer_norm_epsilon": 1e-3,
            "scale_attn_by_inverse_layer_idx": True,
            "vocab_size": 80,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        small(
            attn_logit_softcapping=8.0,
            final_logit_softcapping=1.5,
            query_pre_attn_scalar=20,
            sliding_window=WINDOW,
            tie_word_embeddings=True,
        ),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        small(
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=5,
            sliding_window=WINDOW,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
            tie_word_embeddings=True,
        ),
    ),
    # Like the model with 31 billion parameters: heads of layers without a window have another length and number,
    # and their keys are their values.
    "gemma4": (
        "Gemma4TextConfig",
        small(
            layer_types=GEMMA4_LAYER_TYPES,
            num_hidden_layers=5,
            attention_k_eq_v=True,
            global_head_dim=16,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            sliding_window=WINDOW,
            final_logit_softcapping=3.0,
            rope_parameters=GEMMA4_ROPE,
            tie_word_embeddings=True,
        ),
    ),
    # Heads of both lengths fit matrix tiles, and several layers with windows have the keys and values of one without.
    "gemma4-wide": (
        "Gemma4TextConfig",
        small(
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            num_hidden_layers=3,
            num_key_value_heads=1,
            attention_k_eq_v=True,
            head_dim=32,
            global_head_dim=64,
            num_global_key_value_heads=2,
            hidden_size_per_layer_input=0,
            sliding_window=WINDOW,
            final_logit_softcapping=3.0,
            rope_parameters=GEMMA4_ROPE,
            tie_word_embeddings=True,
        ),
    ),
    # Like the model for phones: each layer has embeddings of its own, and the last ones read the keys and values of
    # those before.
    "gemma4-per-layer": (
        "Gemma4TextConfig",
        small(
            layer_types=GEMMA4_LAYER_TYPES + ["sliding_attention", "full_attention"],
            num_hidden_layers=7,
            num_key_value_heads=1,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            global_head_dim=16,
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=SMALL["vocab_size"],
            sliding_window=WINDOW,
            final_logit_softcapping=3.0,
            rope_parameters=GEMMA4_ROPE,
            tie_word_embeddings=True,
        ),
    ),
    "gemma4-experts": (
        "Gemma4TextConfig",
        small(
            layer_types=GEMMA4_LAYER_TYPES,
            num_hidden_layers=5,
            attention_k_eq_v=True,
            global_head_dim=16,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=2,
            moe_intermediate_size=12,
            sliding_window=WINDOW,
            final_logit_softcapping=3.0,
            rope_parameters=GEMMA4_ROPE,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        small(
            moe_intermediate_size=12,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            intermediate_size=40,
        ),
    ),
    # llama.cpp has no layers without experts in this family.
    "qwen3-moe-all": (
        "Qwen3MoeConfig",
        small(moe_intermediate_size=12, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True),
    ),
    "olmo3": (
        "Olmo3Config",
        small(
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=WINDOW,
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "rope_theta": 30000.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 30000.0},
            },
        ),
    ),
    "exaone4": (
        "Exaone4Config",
        small(
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=WINDOW,
            rope_parameters=LLAMA3_ROPE_SCALING | {"rope_theta": 30000.0},
        ),
    ),
    # Without windows, all layers have RoPE.
    "exaone4-full": (
        "Exaone4Config",
        small(layer_types=["full_attention"] * 4, tie_word_embeddings=True) | {"sliding_window": None},
    ),
    "seed-oss": (
        "SeedOssConfig",
        small(head_dim=12, attention_bias=True, attention_out_bias=True, mlp_bias=True),
    ),
    "glm": ("GlmConfig", small(attention_bias=True)),
    "glm4": (
        "Glm4Config",
        small(
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 30000.0, "partial_rotary_factor": 0.75},
        ),
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        small(
            head_dim=12,
            attention_bias=True,
            use_qk_norm=True,
            first_k_dense_replace=1,
            moe_intermediate_size=12,
            n_routed_experts=6,
            n_shared_experts=2,
            num_experts_per_tok=2,
            routed_scaling_factor=1.7,
        ),
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        small(
            moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=False,
        ),
    ),
    "ernie4-5": ("Ernie4_5Config", small(use_bias=True)),
    "ernie4-5-moe": (
        "Ernie4_5_MoeConfig",
        small(
            moe_intermediate_size=12,
            moe_k=2,
            moe_layer_interval=2,
            moe_layer_start_index=1,
            moe_num_experts=6,
            moe_num_shared_experts=2,
        ),
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        small(intermediate_size=12, num_local_experts=6, num_experts_per_tok=2, head_dim=12, rotary_dim=6),
    ),
    "gpt-oss": (
        "GptOssConfig",
        small(
            intermediate_size=20,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            swiglu_limit=1.5,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 30000.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        ),
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        small(
            head_dim=12,
            attention_bias=True,
            partial_rotary_factor=0.5,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=12,
            linear_value_head_dim=10,
            linear_conv_kernel_dim=3,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            intermediate_size=40,
        ),
    ),
    "qwen3-5": (
        "Qwen3_5TextConfig",
        small(
            head_dim=16,
            linear_num_key_heads=1,
            linear_num_value_heads=3,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            full_attention_interval=2,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-5-moe": (
        "Qwen3_5MoeTextConfig",
        small(
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=16,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
            num_experts=6,
            num_experts_per_tok=2,
            intermediate_size=None,
        ),
    ),
    # Key heads with several value heads each, which GGUF files have in another order.
    "qwen3-5-groups": (
        "Qwen3_5TextConfig",
        small(
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=12,
            linear_value_head_dim=10,
            full_attention_interval=2,
        ),
    ),
    # Experts in all layers, as GGUF files have them.
    "qwen3-next-all": (
        "Qwen3NextConfig",
        small(
            head_dim=12,
            attention_bias=True,
            partial_rotary_factor=0.5,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            linear_value_head_dim=10,
            linear_conv_kernel_dim=3,
            layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        ),
    ),
    # The size of MLPs is made of these settings: 2 / 3 of 48, times 1.3, up to a multiple of 4.
    "lfm2": (
        "Lfm2Config",
        small(
            rms_norm_eps=None,
            norm_eps=1e-3,
            head_dim=None,
            layer_types=["conv", "full_attention", "conv", "conv"],
            conv_bias=True,
            conv_L_cache=4,
            block_ffn_dim_multiplier=1.3,
            block_multiple_of=4,
            rope_parameters={"rope_type": "default", "rope_theta": 30000.0},
        ),
    ),
    # What GGUF files can say: convolutions without biases, and experts whose weights are not scaled.
    "lfm2-unbiased": (
        "Lfm2Config",
        small(
            rms_norm_eps=None,
            norm_eps=1e-3,
            head_dim=None,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            conv_L_cache=3,
            block_ffn_dim_multiplier=1.3,
            block_multiple_of=4,
            rope_parameters={"rope_type": "default", "rope_theta": 30000.0},
        ),
    ),
    "lfm2-moe-unscaled": (
        "Lfm2MoeConfig",
        small(
            rms_norm_eps=None,
            norm_eps=1e-4,
            head_dim=None,
            layer_types=["conv", "conv", "full_attention", "conv"],
            conv_L_cache=4,
            num_dense_layers=2,
            moe_intermediate_size=12,
            num_experts=6,
            num_experts_per_tok=2,
            tie_word_embeddings=True,
        ),
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        small(
            rms_norm_eps=None,
            norm_eps=1e-5,
            head_dim=None,
            layer_types=["conv", "conv", "full_attention", "conv"],
            num_dense_layers=1,
            moe_intermediate_size=12,
            num_experts=6,
            num_experts_per_tok=2,
            routed_scaling_factor=1.7,
            tie_word_embeddings=True,
        ),
    ),
    # Queries grow at each multiple of the original context, which all prompts but one are longer than.
    "ministral3": (
        "Ministral3Config",
        small(
            head_dim=12,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 30000.0,
                "original_max_position_embeddings": ORIGINAL,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.2,
            },
        ),
    ),
    "mixtral": (
        "MixtralConfig",
        small(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    ),
}
PROMPT_LENGTHS_OF = {"phi3": (17, 30, 64, 150)}


def make_module(name, seed):
    """Makes a model of a family with random weights."""
    kind, settings = FAMILIES[name]
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = np.random.default_rng(seed)
    is_gemma4 = name.startswith("gemma4")
    is_wide = name == "gemma4-wide"
    mean = 0.0 if name.startswith("gemma") and not is_gemma4 else 1.0
    # Norms multiply by 1 plus their weights, but for those behind recurrent layers.
    lacks_one = name.startswith(("gemma2", "gemma3", "qwen3-next", "qwen3-5"))
    modules = dict(model.named_modules())

    def draw(name, shape):
        owner = modules.get(name.rpartition(".")[0])
        if name.endswith("bias"):
            return generator.normal(0.0, 0.2, shape)
        if "norm" in name or ".ln_" in name:
            # Without sharp attention, greedy tokens end in a loop soon.
            qk_norms = ("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")
            is_sharp = name.endswith(qk_norms) and not is_gemma4
            norm_mean = 0.0 if lacks_one and "linear_attn" not in name else 1.0
            if is_wide and name.endswith(qk_norms):
                # Scores are not divided by the width of a head: those of wide ones would be so large that roundings
                # to bf16 decide.
                norm_mean = 0.5
            return generator.normal(norm_mean + 0.8 * is_sharp, 0.2, shape)
        if name.endswith("A_log"):
            # Slow enough that a state is felt many chunks later.
            return generator.normal(-3.5, 0.7, shape)
        if name.endswith("sinks"):
            return generator.normal(1.0, 1.0, shape)
        if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            return generator.normal(0.9, 0.2, shape)
        if name.endswith("router.proj.weight"):
            # Its input is divided by the root of its length once more.
            return generator.normal(0.0, 1.5, shape)
        if "embed_tokens_per_layer" in name:
            return generator.normal(0.0, 0.3, shape)
        if isinstance(owner, torch.nn.Embedding):
            # Gemma multiplies embeddings by the root of their length. Larger ones would decide alone
            # what is generated.
            gain = 3.0 if mean == 1.0 and not is_gemma4 else 0.7
            return generator.normal(0.0, 0.5 if "wpe" in name else gain / shape[-1] ** 0.5, shape)
        gain = 2.5 if "down" in name or name.endswith(("mlp.c_proj.weight", ".w2.weight")) else 1.5
        gain = 3.0 if "lm_head" in name else gain
        gain = 3.0 if mean == 0.0 and ("q_proj" in name or "k_proj" in name) else gain
        is_transposed = type(owner).__name__ in ("Conv1D", "GptOssExperts")
        inputs = shape[-2] if is_transposed else shape[-1]
        return generator.normal(0.0, gain / inputs**0.5, shape)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = draw(name, tuple(parameter.shape)).astype(np.float32)
            parameter.copy_(torch.from_numpy(values))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                values = draw(name, tuple(buffer.shape)).astype(np.float32)
                buffer.copy_(torch.from_numpy(values))
    return model


def write_module(folder, name, seed):
    make_module(name, seed).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def draw_weights(config, seed):
    """Draws weights whose scale lets layers change the residual stream much and spreads the logits."""
    generator = np.random.default_rng(seed)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    biased = {"qwen2": "qkv"}.get(config["model_type"], "qkvo" if config.get("attention_bias") else "")
    query = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    weights = {}

    def matrix(name, rows, columns, gain=1.5):
        weights[name] = generator.normal(0.0, gain / columns**0.5, (rows, columns))

    def vector(name, size, mean=0.0, deviation=0.2):
        weights[name] = generator.normal(mean, deviation, size)

    matrix("model.embed_tokens.weight", config["vocab_size"], hidden, 3.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        vector(prefix + "input_layernorm.weight", hidden, 1.0)
        matrix(prefix + "self_attn.q_proj.weight", query, hidden)
        matrix(prefix + "self_attn.k_proj.weight", kv, hidden)
        matrix(prefix + "self_attn.v_proj.weight", kv, hidden)
        matrix(prefix + "self_attn.o_proj.weight", hidden, query)
        for name, size in (("q", query), ("k", kv), ("v", kv), ("o", hidden)):
            if name in biased:
                vector(prefix + f"self_attn.{name}_proj.bias", size)
        if config["model_type"] == "qwen3":
            vector(prefix + "self_attn.q_norm.weight", head_dim, 1.5)
            vector(prefix + "self_attn.k_norm.weight", head_dim, 1.5)
        vector(prefix + "post_attention_layernorm.weight", hidden, 1.0)
        matrix(prefix + "mlp.gate_proj.weight", ffn, hidden)
        matrix(prefix + "mlp.up_proj.weight", ffn, hidden)
        matrix(prefix + "mlp.down_proj.weight", hidden, ffn, 2.5)
        if config.get("mlp_bias"):
            for name, size in (("gate", ffn), ("up", ffn), ("down", hidden)):
                vector(prefix + f"mlp.{name}_proj.bias", size)
    vector("model.norm.weight", hidden, 1.0)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, 3.0)
    return {k: torch.from_numpy(v.astype(np.float32)) for k, v in weights.items()}


def write_checkpoint(folder, config, weights, dtype, num_shards):
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*"):
        old.unlink()
    config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {k: v.to(dtype) for k, v in weights.items()}
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = list(weights), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(w.numel() * w.element_size() for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class Bf16Cache(transformers.DynamicCache):
    """Rounds K and V to bf16, as an executor with a bf16 KV cache does."""

    def update(self, key_states, value_states, *arguments, **options):
        key_states, value_states = (x.bfloat16().float() for x in (key_states, value_states))
        return super().update(key_states, value_states, *arguments, **options)


@torch.inference_mode()
def evaluate(folder, seed, prompt_lengths=PROMPT_LENGTHS):
    """Returns the content of golden.json, or why this seed cannot be used."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vocab_size = model.config.vocab_size
    generator = np.random.default_rng([seed, 1])
    cases = []
    for length in prompt_lengths:
        prompt = generator.integers(3, vocab_size, length).tolist()
        tokens, logits, least = [], [], np.inf
        for _ in range(NUM_GREEDY):
            last = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
            best, second = torch.topk(last, 2).values.tolist()
            least = min(least, (best - second) / last.abs().max().item())
            if least < MIN_MARGIN:
                return f"margin {least:.1e}"
            tokens.append(int(last.argmax()))
            logits.append(last)
        if len(set(tokens)) < MIN_DISTINCT:
            return f"only {len(set(tokens))} distinct tokens"
        inputs = torch.tensor([prompt + tokens[:-1]])
        is_hybrid = not {"linear_attention", "conv"}.isdisjoint(getattr(model.config, "layer_types", None) or [])
        cache = Bf16Cache(config=model.config) if is_hybrid else Bf16Cache()
        rounded = model(inputs, past_key_values=cache).logits[0]
        cases.append(
            {
                "prompt": prompt,
                "tokens": tokens,
                "least_margin": float(f"{least:.3g}"),
                "prompt_logits": as_list(logits[0]),
                "final_logits": as_list(logits[-1]),
                "prompt_logits_bf16_kv": as_list(rounded[len(prompt) - 1]),
                "final_logits_bf16_kv": as_list(rounded[-1]),
                "all_logits": logits,
            }
        )
    return {
        "seed": seed,
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "cases": cases,
    }


def as_list(logits):
    return [float(f"{x:.9g}") for x in logits.tolist()]


def write_golden(folder, golden, has_all_logits=False):
    cases = golden.pop("cases")
    all_logits = [case.pop("all_logits") for case in cases]
    if has_all_logits:
        rows = torch.cat([torch.stack(rows) for rows in all_logits])
        (folder / "golden.f32").write_bytes(rows.numpy().astype("<f4").tobytes())
    lines = [f'  "{key}": {json.dumps(value)},' for key, value in golden.items()]
    lines += ['  "cases": [', ",\n".join("    " + json.dumps(case) for case in cases), "  ]"]
    (folder / "golden.json").write_text("{\n" + "\n".join(lines) + "\n}\n")


def make(name, config, dtype, num_shards):
    def write(folder, seed):
        write_checkpoint(folder, config, draw_weights(config, seed), dtype, num_shards)

    make_with(name, write)


def make_family(name):
    lengths = PROMPT_LENGTHS_OF.get(name, PROMPT_LENGTHS)
    make_with(name, lambda folder, seed: write_module(folder, name, seed), lengths, has_all_logits=True)


def make_with(name, write, prompt_lengths=PROMPT_LENGTHS, has_all_logits=False):
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(1000):
            folder = Path(scratch) / name
            write(folder, seed)
            golden = evaluate(folder, seed, prompt_lengths)
            if isinstance(golden, str):
                print(f"{name}: seed {seed}: {golden}", file=sys.stderr)
                continue
            write_golden(folder, golden, has_all_logits)
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(folder, HERE / name)
            spread = np.std(golden_logits(HERE / name))
            print(f"{name}: seed {seed}, logits spread {spread:.2f}", flush=True)
            return
    sys.exit(f"{name}: no seed will do")


def golden_logits(folder):
    cases = json.loads((folder / "golden.json").read_text())["cases"]
    return [x for case in cases for x in case["prompt_logits"]]


def asked_names(description, known):
    """Returns the names on the command line, or all."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("name", nargs="*", help="folders to make [all]")
    names = parser.parse_args().name
    for name in names:
        if name not in known:
            sys.exit(f"unknown folder {name!r}; use one of {', '.join(known)}")
    return names or known


def set_up_transformers():
    """Silences Transformers, and makes it use one order of sums."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def main():
    jobs = {name: (config, torch.float32, 1) for name, config in MODELS.items()}
    jobs |= {name: (MODELS[of], dtype, shards) for name, of, dtype, shards in VARIANTS}
    names = asked_names(__doc__, [*jobs, *FAMILIES])
    set_up_transformers()
    for name in names:
        if name in FAMILIES:
            make_family(name)
        else:
            make(name, *jobs[name])


if __name__ == "__main__":
    main()
