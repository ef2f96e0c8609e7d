"""Published shapes of models: config.json, generation_config.json, tokenizer family, special tokens."""


def qwen3(layers, hidden, ffn, heads, kv_heads, head_dim, vocab, context, specials):
    end_of_text, im_start, im_end = specials
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": im_end,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": context,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    generation = {
        "bos_token_id": end_of_text,
        "eos_token_id": [im_end, end_of_text],
        "pad_token_id": end_of_text,
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    tokens = {
        "<|endoftext|>": end_of_text,
        "<|im_start|>": im_start,
        "<|im_end|>": im_end,
    }
    return config, generation, "qwen", tokens


def qwen3_06b():
    return qwen3(28, 1024, 3072, 16, 8, 128, 151936, 40960, (151643, 151644, 151645))


def small_32k():
    """A model of 6.8 M parameters, to measure the scheduler and attention over long contexts."""
    return qwen3(6, 256, 768, 4, 2, 64, 8192, 32768, (8189, 8190, 8191))


def small_24l():
    """A model of 24 layers and 21 M parameters, to measure transfers beside the layers that are still computed."""
    return qwen3(24, 256, 768, 4, 2, 64, 8192, 32768, (8189, 8190, 8191))


def llama32_1b():
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    }
    generation = {
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    tokens = {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
    }
    return config, generation, "llama", tokens


def llama3_8b():
    config, generation, family, tokens = llama32_1b()
    config |= {
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_hidden_layers": 32,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    }
    return config, generation, family, tokens


def gpt2():
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": None,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 50257,
    }
    generation = {"bos_token_id": 50256, "eos_token_id": 50256}
    return config, generation, "gpt2", {"<|endoftext|>": 50256}


def gemma2_2b():
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 255997,
        "cache_implementation": "hybrid",
        "eos_token_id": 255999,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "pad_token_id": 255997,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 256000,
    }
    tokens = {"<|endoftext|>": 255997, "<|im_start|>": 255998, "<|im_end|>": 255999}
    generation = {"bos_token_id": 255997, "eos_token_id": [255999, 255997]}
    return config, generation, "qwen", tokens


def qwen3_moe():
    """Qwen3-30B-A3B's layers, but 28 of them, and a quarter of the experts, so that it fits in 24 GB."""
    config, generation, family, tokens = qwen3(
        28, 2048, 6144, 32, 4, 128, 151936, 40960, (151643, 151644, 151645)
    )
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    return config, generation, family, tokens


def lfm2(hidden, ffn, heads, kv_heads, vocab, specials):
    """Short convolutions with six layers of attention between them."""
    config, generation, family, tokens = qwen3(16, hidden, ffn, heads, kv_heads, 64, vocab, 32768, specials)
    attention = (2, 5, 8, 10, 12, 14)
    config |= {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["full_attention" if layer in attention else "conv" for layer in range(16)],
        "norm_eps": 1e-5,
    }
    return config, generation, family, tokens


def lfm2_350m():
    return lfm2(1024, 6656, 16, 8, 65536, (65533, 65534, 65535))


def small_lfm2():
    """A model of 45 M parameters, to measure the prefix cache over long contexts."""
    return lfm2(512, 1536, 8, 4, 8192, (8189, 8190, 8191))


def qwen35(layers, hidden, ffn, heads, kv_heads, head_dim, delta_heads, vocab, specials, value_heads=None):
    """Three gated delta networks to each layer of attention. `delta_heads` heads have keys, and as many values unless given."""
    config, generation, family, tokens = qwen3(
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab, 32768, specials
    )
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config |= {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": kinds * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": delta_heads,
        "linear_num_value_heads": value_heads or delta_heads,
        "linear_value_head_dim": 128,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    }
    return config, generation, family, tokens


def qwen35_08b():
    return qwen35(24, 1024, 3584, 8, 2, 256, 16, 248320, (248069, 248070, 248071))


def qwen35_4b():
    return qwen35(32, 2560, 9216, 16, 4, 256, 16, 248320, (248069, 248070, 248071), value_heads=32)


def gpt_oss_20b():
    """Experts are 4-bit floats, of which 32 share a power of two."""
    layers, end_of_text, end_of_turn = 24, 199999, 200002
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": end_of_turn,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "pad_token_id": end_of_text,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 201088,
    }
    generation = {"eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text}
    tokens = {"<|endoftext|>": end_of_text, "<|im_start|>": 200001, "<|im_end|>": end_of_turn}
    return config, generation, "qwen", tokens


def small_qwen35():
    """A model of 49 M parameters, to measure the prefix cache over long contexts."""
    return qwen35(16, 512, 1024, 4, 2, 128, 4, 8192, (8189, 8190, 8191))


SHAPES = {
    "qwen3-0.6b": qwen3_06b,
    "gemma-2-2b": gemma2_2b,
    "lfm2-350m": lfm2_350m,
    "qwen3-moe": qwen3_moe,
    "qwen3.5-0.8b": qwen35_08b,
    "qwen3.5-4b": qwen35_4b,
    "gpt-oss-20b": gpt_oss_20b,
    "llama-3.2-1b": llama32_1b,
    "llama-3-8b": llama3_8b,
    "gpt2": gpt2,
    "small-32k": small_32k,
    "small-24l": small_24l,
    "small-lfm2": small_lfm2,
    "small-qwen3.5": small_qwen35,
}


def cut(config, generation, specials, divisor):
    """Divides the layers and the vocabulary, so that the head keeps its share of the bytes. Special tokens stay the last."""
    config["num_hidden_layers"] //= divisor
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    removed = config["vocab_size"] - config["vocab_size"] // divisor
    config["vocab_size"] -= removed
    for fields in (config, generation, specials):
        for field, value in fields.items():
            if field.endswith("token_id") or fields is specials:
                fields[field] = [id - removed for id in value] if isinstance(value, list) else value - removed
