"""Random shapes of families: settings of their configuration classes in Transformers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "quantized"))
import golden_shape  # noqa: E402
import make_mxfp4  # noqa: E402

VOCAB_SIZE = golden_shape.SMALL["vocab_size"]
# The longest context. The longest prompt and its answer fit into it.
WHOLE_CONTEXT = 256
HEAD_DIMS = (4, 8, 12, 16, 32, 64)


class Draw:
    def __init__(self, generator):
        self.generator = generator

    def choice(self, *values):
        return values[self.generator.integers(len(values))]

    def flag(self):
        return self.choice(True, False)

    def size(self, least, largest):
        return int(self.generator.integers(least, largest + 1))

    def types(self, number, *names):
        return [self.choice(*names) for _ in range(number)]


def said(settings):
    """Returns the settings that are not None. The class has defaults for the others."""
    return {name: value for name, value in settings.items() if value is not None}


def decoder(draw, head_dims=(None, *HEAD_DIMS), **own):
    """Returns the settings that most families share, and `own`.

    A missing head length means the hidden size divided by the number of heads, or the class's default.
    """
    num_kv_heads = draw.choice(1, 2, 3)
    num_heads = num_kv_heads * draw.choice(1, 2, 4)
    # Some classes require a hidden size that is a multiple of the number of heads.
    unit = num_heads * draw.choice(2, 4, 8)
    shared = {
        "hidden_size": unit * -(-draw.size(8, 48) // unit),
        "intermediate_size": draw.size(4, 60),
        "head_dim": draw.choice(*head_dims),
        "hidden_act": draw.choice("silu", "silu", "gelu", "gelu_pytorch_tanh"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": draw.size(1, 5),
        "rms_norm_eps": draw.choice(None, 1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": draw.choice(None, True, False),
    }
    return said(golden_shape.SMALL | shared | own)


def experts(draw, count="num_experts", chosen="num_experts_per_tok", size="moe_intermediate_size"):
    num_experts = draw.size(2, 8)
    return {count: num_experts, chosen: draw.size(1, min(4, num_experts)), size: draw.size(4, 24)}


def sliding_layers(draw, settings):
    """Returns windows of some layers."""
    types = draw.types(settings["num_hidden_layers"], "sliding_attention", "full_attention")
    return {"layer_types": types, "sliding_window": draw.size(1, 40)}


def plain_rope(draw):
    return said({"rope_type": "default", "rope_theta": draw.choice(None, 1e3, 1e4, 5e5)})


def yarn(draw):
    return said({
        "rope_type": "yarn",
        "rope_theta": draw.choice(1e4, 5e5),
        "factor": draw.choice(2.0, 8.0, 32.0),
        "original_max_position_embeddings": draw.choice(16, 64),
        "beta_fast": draw.choice(None, 4.0, 16.0),
        "attention_factor": draw.choice(None, None, 0.8),
        "mscale": draw.choice(None, 0.7),
        "mscale_all_dim": draw.choice(None, 1.2),
    })


def rope(draw, part=None):
    """Returns settings of RoPE with one of the scalings. `part` is the rotated part of each head, or None for the
    family's."""
    scaled = {
        "default": plain_rope(draw),
        "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": draw.choice(1.5, 4.0)},
        # No context is longer than the original one: Corella would refuse it.
        "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "llama3": golden_shape.LLAMA3_ROPE_SCALING | {"rope_theta": draw.choice(1e4, 5e5)},
        "yarn": yarn(draw) | {"truncate": draw.flag()},
    }
    parameters = scaled[draw.choice("default", *scaled)]
    return parameters | ({} if part is None else {"partial_rotary_factor": part})


def llama(draw, **own):
    return decoder(draw, attention_bias=draw.flag(), mlp_bias=draw.flag(), rope_parameters=rope(draw), **own)


def with_window(settings, window):
    """Adds a window. None becomes null, so that the class does not take its default."""
    return settings | {"sliding_window": window}


def mistral(draw):
    return with_window(decoder(draw, rope_parameters=rope(draw)), draw.choice(None, draw.size(1, 40)))


def mixtral(draw):
    chosen, rotary = experts(draw, count="num_local_experts", size="intermediate_size"), rope(draw)
    # Transformers cannot scale RoPE if the head length is None, the default of this class.
    head_dims = (None, *HEAD_DIMS) if rotary["rope_type"] == "default" else HEAD_DIMS
    return with_window(decoder(draw, head_dims, rope_parameters=rotary, **chosen), draw.choice(None, draw.size(1, 40)))


def upper_window(draw, settings):
    """Returns settings that give some layers a window, or a window that is switched off."""
    if draw.flag():
        return {"use_sliding_window": False, "sliding_window": draw.size(1, 40)}
    listed = sliding_layers(draw, settings)
    if draw.flag():
        del listed["layer_types"]
    return listed | {"use_sliding_window": True, "max_window_layers": draw.size(0, settings["num_hidden_layers"])}


def qwen2(draw):
    settings = decoder(draw, rope_parameters=rope(draw))
    return settings | upper_window(draw, settings)


def qwen3(draw):
    settings = decoder(draw, attention_bias=draw.flag(), rope_parameters=rope(draw))
    return settings | upper_window(draw, settings)


def sparse_layers(draw, settings):
    """Returns settings that give some layers experts."""
    dense = [layer for layer in range(settings["num_hidden_layers"]) if draw.size(0, 3) == 0]
    return experts(draw) | {
        "decoder_sparse_step": draw.choice(1, 1, 2),
        "mlp_only_layers": draw.choice([], dense),
        "norm_topk_prob": draw.flag(),
    }


def qwen2_moe(draw):
    settings = decoder(draw, rope_parameters=rope(draw), qkv_bias=draw.flag())
    settings["shared_expert_intermediate_size"] = draw.size(4, 30)
    return settings | sparse_layers(draw, settings) | upper_window(draw, settings)


def qwen3_moe(draw):
    settings = decoder(draw, attention_bias=draw.flag(), rope_parameters=rope(draw))
    settings |= sparse_layers(draw, settings) | upper_window(draw, settings)
    # The class has no `layer_types`, and gives all layers the window.
    settings.pop("layer_types", None)
    return settings


def gemma(draw, **own):
    activation = draw.choice("gelu_pytorch_tanh", "gelu", "silu")
    settings = decoder(draw, hidden_act=None, hidden_activation=activation, attention_bias=draw.flag(), **own)
    settings["query_pre_attn_scalar"] = draw.choice(5, 20, 64, settings.get("head_dim", 256))
    return settings | sliding_layers(draw, settings)


def gemma2(draw):
    settings = gemma(draw, rope_parameters=rope(draw))
    # Null means no cap, and a missing cap would be the class's default.
    settings["attn_logit_softcapping"] = draw.choice(None, 8.0, 50.0)
    settings["final_logit_softcapping"] = draw.choice(None, 1.5, 30.0)
    return settings


def gemma3(draw):
    rotary = {"full_attention": rope(draw), "sliding_attention": plain_rope(draw)}
    # Transformers reads `truncate` outside of the objects of layer types.
    rotary["full_attention"].pop("truncate", None)
    return gemma(draw, rope_parameters=rotary, final_logit_softcapping=draw.choice(None, 1.5, 30.0))


def phi3(draw):
    settings = decoder(draw, head_dims=(None,), hidden_size=None)
    head_dim, part = draw.choice((8, 1.0), (8, 0.75), (16, 0.5), (32, 0.25), (32, 1.0))
    settings["hidden_size"] = settings["num_attention_heads"] * head_dim
    settings["rope_parameters"] = plain_rope(draw) | {"partial_rotary_factor": part}
    if draw.flag():
        num_pairs = int(head_dim * part) // 2
        # If the served context is the original one, it takes the short factors. Otherwise prompts are longer than the
        # original context and take the long factors.
        original = draw.choice(16, 64, WHOLE_CONTEXT)
        settings["original_max_position_embeddings"] = original
        settings["rope_parameters"] |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "short_factor": [round(1.0 + 0.4 * draw.generator.random(), 3) for _ in range(num_pairs)],
            "long_factor": [round(1.0 + 4.0 * draw.generator.random(), 3) for _ in range(num_pairs)],
        }
    return with_window(settings, draw.choice(None, draw.size(1, 40)))


def olmo2(draw):
    return decoder(draw, attention_bias=draw.flag(), rope_parameters=rope(draw))


def olmo3(draw):
    rotary = {"full_attention": draw.choice(plain_rope, yarn)(draw), "sliding_attention": plain_rope(draw)}
    settings = decoder(draw, attention_bias=draw.flag(), rope_parameters=rotary)
    return settings | sliding_layers(draw, settings)


def smollm3(draw):
    settings = llama(draw)
    num_layers = settings["num_hidden_layers"]
    if draw.flag():
        settings["no_rope_layers"] = draw.types(num_layers, 0, 1)
    else:
        settings["no_rope_layer_interval"] = draw.size(1, 4)
    return settings | draw.choice({}, sliding_layers(draw, settings) | {"use_sliding_window": True})


def granite(draw):
    return llama(
        draw,
        embedding_multiplier=draw.choice(None, 0.7, 12.0),
        attention_multiplier=draw.choice(None, 0.2, 0.05),
        residual_multiplier=draw.choice(None, 0.3, 1.3),
        logits_scaling=draw.choice(None, 1.7, 8.0),
    )


def cohere(draw):
    settings = decoder(draw, rms_norm_eps=None, attention_bias=draw.flag(), rope_parameters=rope(draw))
    return settings | {
        "layer_norm_eps": draw.choice(1e-5, 1e-3),
        "logit_scale": draw.choice(0.0625, 0.4, 1.0),
        "use_qk_norm": False,
    }


def gpt2(draw):
    num_heads = draw.size(1, 6)
    return said({
        "bos_token_id": 1,
        "eos_token_id": 2,
        "n_embd": num_heads * draw.choice(2, 4, 10, 16, 32),
        "n_head": num_heads,
        "n_layer": draw.size(1, 5),
        "n_positions": WHOLE_CONTEXT,
        "n_inner": draw.choice(None, draw.size(4, 90)),
        "activation_function": draw.choice("gelu_new", "gelu", "silu"),
        "layer_norm_epsilon": draw.choice(1e-5, 1e-3),
        "scale_attn_weights": draw.flag(),
        "scale_attn_by_inverse_layer_idx": draw.flag(),
        "tie_word_embeddings": draw.flag(),
        "vocab_size": VOCAB_SIZE,
    })


def glm(draw):
    rotary = rope(draw, draw.choice(None, 0.25, 0.5, 1.0))
    return decoder(draw, (None, 16, 24, 64), attention_bias=draw.flag(), rope_parameters=rotary)


def glm4_moe(draw):
    rotary = rope(draw, draw.choice(None, 0.25, 0.5, 1.0))
    chosen = experts(draw, count="n_routed_experts")
    settings = decoder(draw, (16, 24, 64), attention_bias=draw.flag(), rope_parameters=rotary, **chosen)
    return settings | {
        "first_k_dense_replace": draw.size(0, settings["num_hidden_layers"]),
        "n_shared_experts": draw.size(1, 3),
        "norm_topk_prob": draw.flag(),
        "routed_scaling_factor": draw.choice(1.0, 0.6, 2.5),
        "use_qk_norm": draw.flag(),
    }


def ernie4_5_moe(draw):
    settings = decoder(draw, rope_parameters=rope(draw), **experts(draw, "moe_num_experts", "moe_k"))
    num_layers = settings["num_hidden_layers"]
    return settings | {
        "moe_num_shared_experts": draw.size(0, 2),
        "moe_layer_start_index": draw.size(0, num_layers - 1),
        "moe_layer_end_index": draw.choice(-1, draw.size(0, num_layers - 1)),
        "moe_layer_interval": draw.choice(1, 1, 2),
    }


def exaone4(draw):
    settings = decoder(draw, rope_parameters=rope(draw))
    if draw.flag():
        return settings | sliding_layers(draw, settings)
    # Without windows, all layers have RoPE.
    return with_window(settings, None) | {"layer_types": ["full_attention"] * settings["num_hidden_layers"]}


def minimax_m2(draw):
    chosen = experts(draw, count="num_local_experts", size="intermediate_size")
    settings = decoder(draw, (None, 16, 24, 64), rope_parameters=rope(draw), **chosen)
    if draw.flag():
        settings["rotary_dim"] = draw.choice(4, 8, 16)
    else:
        settings["rope_parameters"]["partial_rotary_factor"] = draw.choice(0.25, 0.5, 1.0)
    return settings


def seed_oss(draw):
    biases = {name: draw.flag() for name in ("attention_bias", "attention_out_bias", "mlp_bias")}
    return decoder(draw, rope_parameters=rope(draw), **biases)


def gpt_oss(draw):
    """Experts may be in MXFP4, which requires sizes that are multiples of 32."""
    is_fp4 = draw.flag()
    unit = make_mxfp4.GROUP_LEN if is_fp4 else 4
    rotary = {
        "rope_type": "yarn",
        "factor": draw.choice(2.0, 8.0, 32.0),
        "rope_theta": draw.choice(1e4, 1.5e5),
        "original_max_position_embeddings": draw.choice(16, 64),
        "truncate": draw.flag(),
    }
    own = experts(draw, "num_local_experts", size="intermediate_size") | {
        "hidden_size": unit * draw.size(1, 3),
        "intermediate_size": unit * draw.size(1, 4),
        "swiglu_limit": draw.size(1, 14) / 2,
        "attention_bias": draw.choice(True, True, False),
        "rope_parameters": rotary,
    }
    settings = decoder(draw, (4, 8, 16, 32, 64), **own)
    return settings | sliding_layers(draw, settings) | {"mxfp4": is_fp4}


def hybrid(draw, **own):
    """Returns settings of a model of recurrent layers and at least one layer with attention."""
    num_key_heads, num_layers = draw.choice(1, 2, 3), draw.size(1, 5)
    types = draw.types(num_layers - 1, "linear_attention", "linear_attention", "full_attention")
    types.insert(draw.size(0, num_layers - 1), "full_attention")
    return decoder(
        draw,
        (8, 16, 32, 64),
        num_hidden_layers=num_layers,
        layer_types=types,
        # Corella refuses other activations, which recurrent layers would have, too.
        hidden_act="silu",
        partial_rotary_factor=draw.choice(0.25, 0.5, 1.0),
        linear_num_key_heads=num_key_heads,
        linear_num_value_heads=num_key_heads * draw.choice(1, 2, 3),
        linear_key_head_dim=draw.choice(4, 10, 16, 32),
        linear_value_head_dim=draw.choice(4, 12, 16, 40),
        linear_conv_kernel_dim=draw.choice(1, 2, 4, 5),
        attention_bias=draw.flag(),
        **own,
    )


def hybrid_with_experts(draw):
    return hybrid(draw, shared_expert_intermediate_size=draw.size(4, 24), **experts(draw))


def short_convolution(draw, **own):
    """Returns settings of a model of short convolutions and at least one layer with attention."""
    num_layers = draw.size(1, 5)
    types = draw.types(num_layers - 1, "conv", "conv", "full_attention")
    types.insert(draw.size(0, num_layers - 1), "full_attention")
    return decoder(
        draw,
        (None,),
        num_hidden_layers=num_layers,
        layer_types=types,
        hidden_act=None,
        rms_norm_eps=None,
        norm_eps=draw.choice(1e-5, 1e-3),
        conv_L_cache=draw.choice(1, 2, 3, 4, 7),
        conv_bias=draw.flag(),
        rope_parameters=plain_rope(draw),
        **own,
    )


def lfm2(draw):
    return short_convolution(
        draw,
        block_auto_adjust_ff_dim=draw.flag(),
        block_ffn_dim_multiplier=draw.choice(1.0, 0.7, 1.3),
        block_multiple_of=draw.choice(1, 8, 20),
    )


def lfm2_moe(draw):
    return short_convolution(
        draw,
        num_dense_layers=draw.size(0, 2),
        norm_topk_prob=draw.flag(),
        use_expert_bias=draw.flag(),
        routed_scaling_factor=draw.choice(1.0, 0.6, 1.7),
        **experts(draw),
    )


def ministral3(draw):
    """Queries grow beyond the original context."""
    rotary = {
        "rope_type": "yarn",
        "factor": draw.choice(2.0, 8.0, 16.0),
        "rope_theta": draw.choice(1e4, 1e6),
        "original_max_position_embeddings": draw.choice(7, 16, 64),
        "beta_fast": draw.choice(4.0, 32.0),
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": draw.choice(0.0, 0.5, 1.0),
        "llama_4_scaling_beta": draw.choice(0.0, 0.1, 0.5),
    }
    return decoder(draw, sliding_window=draw.choice(None, None, 24), rope_parameters=rotary)


def gemma4(draw):
    """The model has inputs of each layer and perhaps shared keys and values, or experts, or neither."""
    num_layers, kind = draw.size(2, 7), draw.choice("inputs", "experts", "neither")
    types = draw.types(num_layers - 1, "sliding_attention", "sliding_attention", "full_attention")
    num_shared = draw.size(1, num_layers - 2) if kind == "inputs" and num_layers > 2 else 0
    if num_shared:
        # The last layers read the keys and values of an earlier layer of their type.
        types[:2] = ["sliding_attention", "full_attention"]
    settings = decoder(
        draw,
        (4, 8, 16, 32),
        hidden_act=None,
        hidden_activation=draw.choice("gelu_pytorch_tanh", "gelu", "silu"),
        num_hidden_layers=num_layers,
        layer_types=[*types, "full_attention"],
        sliding_window=draw.size(1, 40),
        global_head_dim=draw.choice(8, 16, 32, 64),
        attention_k_eq_v=draw.flag(),
        num_kv_shared_layers=num_shared,
        use_double_wide_mlp=draw.flag(),
        hidden_size_per_layer_input=draw.size(4, 20) if kind == "inputs" else 0,
        vocab_size_per_layer_input=VOCAB_SIZE,
        final_logit_softcapping=draw.choice(None, 5.0, 30.0),
        attention_bias=draw.flag(),
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": draw.choice(0.25, 0.5, 1.0),
                "rope_theta": draw.choice(1e4, 1e6),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice(1e3, 1e4)},
        },
    )
    settings["num_global_key_value_heads"] = draw.choice(1, settings["num_key_value_heads"])
    if kind == "experts":
        settings |= experts(draw, chosen="top_k_experts") | {"enable_moe_block": True}
    return settings


# The configuration class of each family in Transformers, and the function that draws its settings.
# `make_golden.make_module` draws weights by the beginnings of these names.
FAMILIES = {
    "llama": ("LlamaConfig", llama),
    "mistral": ("MistralConfig", mistral),
    "ministral3": ("Ministral3Config", ministral3),
    "mixtral": ("MixtralConfig", mixtral),
    "qwen2": ("Qwen2Config", qwen2),
    "qwen2-moe": ("Qwen2MoeConfig", qwen2_moe),
    "qwen3": ("Qwen3Config", qwen3),
    "qwen3-moe": ("Qwen3MoeConfig", qwen3_moe),
    "qwen3-next": ("Qwen3NextConfig", hybrid_with_experts),
    "qwen3-5": ("Qwen3_5TextConfig", hybrid),
    "qwen3-5-moe": ("Qwen3_5MoeTextConfig", hybrid_with_experts),
    "gemma2": ("Gemma2Config", gemma2),
    "gemma3": ("Gemma3TextConfig", gemma3),
    "gemma4": ("Gemma4TextConfig", gemma4),
    "phi3": ("Phi3Config", phi3),
    "olmo2": ("Olmo2Config", olmo2),
    "olmo3": ("Olmo3Config", olmo3),
    "smollm3": ("SmolLM3Config", smollm3),
    "granite": ("GraniteConfig", granite),
    "cohere": ("CohereConfig", cohere),
    "gpt2": ("GPT2Config", gpt2),
    "gpt-oss": ("GptOssConfig", gpt_oss),
    "glm": ("GlmConfig", glm),
    "glm4": ("Glm4Config", glm),
    "glm4-moe": ("Glm4MoeConfig", glm4_moe),
    "ernie4-5": ("Ernie4_5Config", lambda draw: decoder(draw, use_bias=draw.flag(), rope_parameters=rope(draw))),
    "ernie4-5-moe": ("Ernie4_5_MoeConfig", ernie4_5_moe),
    "exaone4": ("Exaone4Config", exaone4),
    "minimax-m2": ("MiniMaxM2Config", minimax_m2),
    "seed-oss": ("SeedOssConfig", seed_oss),
    "lfm2": ("Lfm2Config", lfm2),
    "lfm2-moe": ("Lfm2MoeConfig", lfm2_moe),
}
