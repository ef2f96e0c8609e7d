"""The shapes of golden models: small shapes in which each setting of a family has an effect."""


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

# Together, these models have every combination of tied/untied embeddings and grouped/ungrouped heads, each option of
# the decoder that a config can switch, sizes that are no multiple of a vector, and both spellings of the rotary
# settings.
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

# The window, and the length from which RoPE is scaled. Most prompts are longer than both.
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

# Models of all families: the configuration class in Transformers, and settings with which each difference between the
# family and Llama has an effect.
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
    # For prompts within the original context, Transformers takes other frequencies, and Corella those of the longest
    # served context. So prompts that are compared are longer.
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
    # Like Gemma 4 31B: layers without a window have another length and number of heads, and use their keys as values.
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
    # Heads of both lengths fit matrix tiles. Keys and values of several layers with windows are as large as those of
    # one layer without.
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
    # Like the model for phones: each layer has its own embeddings, and the last layers read the keys and values of
    # earlier layers.
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
    # Each key head has several value heads, whose order is another one in GGUF files.
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
    # All layers have experts, as in GGUF files.
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
    # These settings give the size of MLPs: 2 / 3 of 48, times 1.3, rounded up to a multiple of 4.
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
    # A model that GGUF files can describe: convolutions have no biases, and experts' weights are not scaled.
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
    # Queries grow at each multiple of the original context. All prompts but one are longer than that context.
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
