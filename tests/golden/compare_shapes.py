#!/usr/bin/env python3
"""Compare models of random shapes, served over HTTP, with Transformers.

    .venv/bin/python tests/golden/compare_shapes.py target/debug/corella [--family NAME] [--seeds 0 20]

Each seed gives a shape of a family: heads, windows, experts, layers, scales. Weights are random, and matrices of
experts may be in MXFP4. Corella serves the folder in f32 on an instruction set and with a number of tokens per step
that the seed chooses, too, and draws greedily. Each token must be Transformers' own, and its log-probability may
differ by TOLERANCE of the largest logit.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent.parent / "quantized"))
import golden_shape  # noqa: E402
import make_golden  # noqa: E402
import make_mxfp4  # noqa: E402

TOLERANCE = 1e-4
NUM_TOKENS = 20
VOCAB_SIZE = golden_shape.SMALL["vocab_size"]


def gpt_oss(generator):
    """Returns settings, and whether experts are in MXFP4, whose groups need multiples of 32."""

    def choice(*values):
        return values[generator.integers(len(values))]

    is_fp4 = bool(generator.integers(2))
    unit = make_mxfp4.GROUP_LEN if is_fp4 else 4
    num_kv_heads, num_layers = choice(1, 2, 3), int(generator.integers(1, 5))
    num_experts = int(generator.integers(2, 9))
    settings = golden_shape.small(
        hidden_size=unit * int(generator.integers(1, 4)),
        intermediate_size=unit * int(generator.integers(1, 5)),
        head_dim=choice(4, 8, 16, 32, 64),
        num_attention_heads=num_kv_heads * choice(1, 2, 4),
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=num_layers,
        layer_types=[choice("sliding_attention", "full_attention") for _ in range(num_layers)],
        sliding_window=int(generator.integers(1, 40)),
        num_local_experts=num_experts,
        num_experts_per_tok=int(generator.integers(1, min(4, num_experts) + 1)),
        swiglu_limit=float(generator.integers(1, 15)) / 2,
        tie_word_embeddings=choice(True, False),
        attention_bias=choice(True, True, False),
        rope_parameters={
            "rope_type": "yarn",
            "factor": choice(2.0, 8.0, 32.0),
            "rope_theta": choice(1e4, 1.5e5),
            "original_max_position_embeddings": choice(16, 64),
            "truncate": choice(True, False),
        },
    )
    return settings, is_fp4


def hybrid(generator, has_experts):
    """Returns settings of a model with recurrent layers."""

    def choice(*values):
        return values[generator.integers(len(values))]

    num_kv_heads, num_layers = choice(1, 2, 3), int(generator.integers(1, 6))
    num_key_heads = choice(1, 2, 3)
    types = [choice("linear_attention", "linear_attention", "full_attention") for _ in range(num_layers - 1)]
    types.insert(int(generator.integers(num_layers)), "full_attention")
    settings = golden_shape.small(
        hidden_size=4 * int(generator.integers(3, 13)),
        intermediate_size=4 * int(generator.integers(1, 13)),
        head_dim=choice(8, 16, 32, 64),
        partial_rotary_factor=choice(0.25, 0.5, 1.0),
        num_attention_heads=num_kv_heads * choice(1, 2, 4),
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=num_layers,
        layer_types=types,
        linear_num_key_heads=num_key_heads,
        linear_num_value_heads=num_key_heads * choice(1, 2, 3),
        linear_key_head_dim=choice(4, 10, 16, 32),
        linear_value_head_dim=choice(4, 12, 16, 40),
        linear_conv_kernel_dim=choice(1, 2, 4, 5),
        attention_bias=choice(True, False),
        tie_word_embeddings=choice(True, False),
    )
    if has_experts:
        num_experts = int(generator.integers(2, 9))
        settings |= {
            "num_experts": num_experts,
            "num_experts_per_tok": int(generator.integers(1, min(4, num_experts) + 1)),
            "moe_intermediate_size": 4 * int(generator.integers(1, 6)),
            "shared_expert_intermediate_size": 4 * int(generator.integers(1, 6)),
        }
    return settings, False


def short_convolution(generator, has_experts):
    """Returns settings of a model with short convolutions."""

    def choice(*values):
        return values[generator.integers(len(values))]

    num_kv_heads, num_layers = choice(1, 2, 3), int(generator.integers(1, 6))
    num_heads = num_kv_heads * choice(1, 2, 4)
    types = [choice("conv", "conv", "full_attention") for _ in range(num_layers - 1)]
    types.insert(int(generator.integers(num_layers)), "full_attention")
    settings = golden_shape.small(
        hidden_size=num_heads * choice(4, 8, 10, 16),
        intermediate_size=int(generator.integers(6, 60)),
        rms_norm_eps=None,
        norm_eps=choice(1e-5, 1e-3),
        head_dim=None,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=num_layers,
        layer_types=types,
        conv_L_cache=choice(1, 2, 3, 4, 7),
        conv_bias=choice(True, False),
        tie_word_embeddings=choice(True, False),
        rope_parameters={"rope_type": "default", "rope_theta": choice(1e4, 1e6)},
    )
    if has_experts:
        num_experts = int(generator.integers(2, 9))
        settings |= {
            "num_experts": num_experts,
            "num_experts_per_tok": int(generator.integers(1, min(4, num_experts) + 1)),
            "num_dense_layers": int(generator.integers(0, 3)),
            "moe_intermediate_size": 4 * int(generator.integers(1, 6)),
            "norm_topk_prob": choice(True, False),
            "use_expert_bias": choice(True, False),
            "routed_scaling_factor": choice(1.0, 0.6, 1.7),
        }
    else:
        settings |= {
            "block_auto_adjust_ff_dim": choice(True, False),
            "block_ffn_dim_multiplier": choice(1.0, 0.7, 1.3),
            "block_multiple_of": choice(1, 8, 20),
        }
    return settings, False


def ministral3(generator):
    """Returns settings of a model whose queries grow behind its original context."""

    def choice(*values):
        return values[generator.integers(len(values))]

    num_kv_heads = choice(1, 2, 3)
    settings = golden_shape.small(
        hidden_size=4 * int(generator.integers(3, 13)),
        intermediate_size=4 * int(generator.integers(1, 13)),
        head_dim=choice(4, 8, 12, 32, 64),
        num_attention_heads=num_kv_heads * choice(1, 2, 4),
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=int(generator.integers(1, 5)),
        sliding_window=choice(None, None, 24),
        tie_word_embeddings=choice(True, False),
        rope_parameters={
            "rope_type": "yarn",
            "factor": choice(2.0, 8.0, 16.0),
            "rope_theta": choice(1e4, 1e6),
            "original_max_position_embeddings": choice(7, 16, 64),
            "beta_fast": choice(4.0, 32.0),
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": choice(0.0, 0.5, 1.0),
            "llama_4_scaling_beta": choice(0.0, 0.1, 0.5),
        },
    )
    return settings, False


def gemma4(generator):
    """Returns settings of a model with inputs of layers and shared keys and values, with experts, or with neither."""

    def choice(*values):
        return values[generator.integers(len(values))]

    num_layers, num_kv_heads, kind = int(generator.integers(2, 8)), choice(1, 2, 4), int(generator.integers(3))
    num_heads, num_experts = num_kv_heads * choice(1, 2, 4), int(generator.integers(2, 9))
    types = [choice("sliding_attention", "sliding_attention", "full_attention") for _ in range(num_layers - 1)]
    # The last layers find one of each type before them.
    num_shared = int(generator.integers(1, num_layers - 1)) if kind == 0 and num_layers > 2 else 0
    if num_shared:
        types[:2] = ["sliding_attention", "full_attention"]
    settings = golden_shape.small(
        hidden_size=4 * int(generator.integers(3, 13)),
        intermediate_size=4 * int(generator.integers(1, 13)),
        head_dim=choice(4, 8, 16, 32),
        global_head_dim=choice(8, 16, 32, 64),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_global_key_value_heads=choice(1, num_kv_heads),
        num_hidden_layers=num_layers,
        layer_types=[*types, "full_attention"],
        sliding_window=int(generator.integers(1, 40)),
        attention_k_eq_v=choice(True, False),
        num_kv_shared_layers=num_shared,
        use_double_wide_mlp=choice(True, False),
        hidden_size_per_layer_input=4 * int(generator.integers(1, 6)) if kind == 0 else 0,
        vocab_size_per_layer_input=VOCAB_SIZE,
        final_logit_softcapping=choice(None, 5.0, 30.0),
        attention_bias=choice(True, False),
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": choice(0.25, 0.5, 1.0),
                "rope_theta": choice(1e4, 1e6),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": choice(1e3, 1e4)},
        },
        tie_word_embeddings=choice(True, False),
    )
    if kind == 1:
        settings |= {
            "enable_moe_block": True,
            "num_experts": num_experts,
            "top_k_experts": int(generator.integers(1, min(4, num_experts) + 1)),
            "moe_intermediate_size": 4 * int(generator.integers(1, 6)),
        }
    return settings, False


# By family, its configuration class in Transformers, and what draws settings.
FAMILIES = {
    "gpt-oss": ("GptOssConfig", gpt_oss),
    "gemma4": ("Gemma4TextConfig", gemma4),
    "lfm2": ("Lfm2Config", lambda generator: short_convolution(generator, False)),
    "lfm2-moe": ("Lfm2MoeConfig", lambda generator: short_convolution(generator, True)),
    "ministral3": ("Ministral3Config", ministral3),
    "qwen3-next": ("Qwen3NextConfig", lambda generator: hybrid(generator, True)),
    "qwen3-5": ("Qwen3_5TextConfig", lambda generator: hybrid(generator, False)),
    "qwen3-5-moe": ("Qwen3_5MoeTextConfig", lambda generator: hybrid(generator, True)),
}


def write_folder(folder, family, generator, seed):
    kind, draw = FAMILIES[family]
    settings, is_fp4 = draw(generator)
    # Names of folders decide how some weights are drawn.
    name = make_mxfp4.NAME if is_fp4 else family
    golden_shape.FAMILIES[name] = (kind, settings)
    if is_fp4:
        make_mxfp4.write(folder, seed)
    else:
        make_golden.write_module(folder, name, seed)
    # Prompts are ids, and every id needs a text.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE]
    vocabulary = {letter: id for id, letter in enumerate(letters)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))
    return settings | {"mxfp4": is_fp4}


@torch.inference_mode()
def expected(folder, prompt):
    """Returns greedy tokens, the log-probability of each, and the largest logit."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens, logprobs, largest = [], [], 0.0
    for _ in range(NUM_TOKENS):
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
        logprobs.append(torch.log_softmax(logits, -1)[tokens[-1]].item())
        largest = max(largest, logits.abs().max().item())
    return tokens, logprobs, largest


def served(binary, folder, prompt, generator):
    """Returns the tokens that Corella draws, and the log-probability of each."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = ["--dtype", "f32", "--kv-cache-dtype", "f32", "--max-num-seqs", "4", "--port", str(port)]
    options += ["--max-num-batched-tokens", str(generator.choice([16, 64, 512]))]
    options += ["--isa", "portable"] if generator.integers(2) else []
    body = {
        "model": folder.name,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    url, headers = f"http://127.0.0.1:{port}", {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with subprocess.Popen([binary, "serve", str(folder), *options], stderr=subprocess.PIPE, text=True) as server:
        try:
            said = []
            while not said or said[-1] and not said[-1].startswith("ready: "):
                said.append(server.stderr.readline())
            if not said[-1]:
                sys.exit("".join(said))
            answer = json.load(urllib.request.urlopen(request))
        finally:
            server.terminate()
    logprobs = answer["choices"][0]["logprobs"]
    tokens = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
    return tokens, logprobs["token_logprobs"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--family", choices=FAMILIES, default="gpt-oss")
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 20), metavar=("FIRST", "END"))
    args = parser.parse_args()
    make_golden.set_up_transformers()
    num_wrong = 0
    for seed in range(*args.seeds):
        generator = np.random.default_rng(seed)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / args.family
            folder.mkdir()
            settings = write_folder(folder, args.family, generator, seed)
            prompt = generator.integers(3, VOCAB_SIZE, generator.integers(1, 180)).tolist()
            tokens, logprobs, largest = expected(folder, prompt)
            found, found_logprobs = served(args.binary, folder, prompt, generator)
        difference = np.abs(np.subtract(found_logprobs, logprobs)).max() / largest
        is_right = found == tokens and difference <= TOLERANCE
        num_wrong += not is_right
        print(f"seed {seed}: {'same' if is_right else 'OTHER'}, {difference:.1e}, prompt of {len(prompt)}", flush=True)
        if not is_right:
            print(json.dumps(settings), found, tokens, sep="\n", flush=True)
    sys.exit(f"{num_wrong} shapes give other tokens or log-probabilities" if num_wrong else 0)


if __name__ == "__main__":
    main()
