#!/usr/bin/env python3
"""Compare models of random shapes, served over HTTP, with Transformers.

    .venv/bin/python tests/golden/compare_shapes.py target/debug/corella [--family NAME …] [--seeds 0 20]

Each seed gives a shape of a family (`random_shape.py`): heads, windows, experts, layers, scales. Weights are random,
and matrices of experts may be in MXFP4. The seed also chooses the spelling of config.json, one of the instruction sets,
the number of tokens per step, and whether the prompt's log-probabilities are asked for, too. Corella serves the folder
in f32 and draws greedily. Each token must be the best one of Transformers, and each log-probability must equal that of
Transformers, within TOLERANCE of the largest logit. Some shapes magnify roundings. So a difference may also be
MOST_ROUNDINGS times the change that Transformers shows if weights are rounded otherwise.
"""

import json
import tempfile
from pathlib import Path

import golden_shape
import make_golden
import numpy as np
import random_shape
import torch
import transformers
from random_shape import FAMILIES, VOCAB_SIZE, make_mxfp4
from served_model import read_arguments, run, serving
from tokenizers import Tokenizer, models, pre_tokenizers

TOLERANCE = 1e-4
# The relative distance of neighbouring numbers in f32.
ROUNDING = 2.0**-23
# This is more than 1, since weights are rounded once, and each sum of a layer many times.
MOST_ROUNDINGS = 4
NUM_TOKENS = 20
LONGEST_PROMPT = 180


def write_folder(folder, family, generator, seed):
    """Writes a model, and returns its settings."""
    kind, draw = FAMILIES[family]
    settings = draw(random_shape.Draw(generator))
    is_fp4 = settings.pop("mxfp4", False)
    # Names of folders decide how some weights are drawn.
    name = make_mxfp4.NAME if is_fp4 else family
    golden_shape.FAMILIES[name] = (kind, settings)
    if is_fp4:
        make_mxfp4.write(folder, seed)
    else:
        make_golden.write_module(folder, name, seed)
    name_of_type = [None, "rope_type", "type"][generator.integers(3)]
    if name_of_type:
        spell_as_before(folder / "config.json", settings, name_of_type)
    if generator.integers(2):
        leave_defaults_out(folder / "config.json", getattr(transformers, kind))
    # Prompts are ids, and every id needs a text.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE]
    vocabulary = {letter: id for id, letter in enumerate(letters)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))
    return settings | {"mxfp4": is_fp4}


def spell_as_before(file, settings, name_of_type):
    """Rewrites config.json in a form before Transformers 5, with types of layers only if the settings name them."""
    config = json.loads(file.read_text())
    rope = config.get("rope_parameters", {})
    if "rope_type" not in rope:
        return
    del config["rope_parameters"]
    for field in ("rope_theta", "partial_rotary_factor"):
        if field in rope:
            config[field] = rope.pop(field)
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else rope | {name_of_type: kind}
    config["torch_dtype"] = config.pop("dtype")
    if "layer_types" not in settings:
        config.pop("layer_types", None)
    file.write_text(json.dumps(config, indent=2) + "\n")


def leave_defaults_out(file, kind):
    """Leaves the class's defaults out of config.json, except for integers such as sizes, which published models
    state."""
    defaults = kind().to_dict() | {"rope_theta": getattr(kind, "default_theta", 10_000.0)}
    del defaults["model_type"]
    config = json.loads(file.read_text())
    for name, value in defaults.items():
        if name in config and config[name] == value and type(value) is not int:
            del config[name]
    file.write_text(json.dumps(config, indent=2) + "\n")


def context_of(settings):
    """Returns the length of the shortest prompt, and the context to serve if it is not the model's own.

    LongRoPE has other frequencies beyond the original context. Transformers chooses them by each prompt's length, and
    Corella by the longest served context.
    """
    rope = settings.get("rope_parameters", {})
    if rope.get("rope_type") != "longrope":
        return 1, None
    original = rope["original_max_position_embeddings"]
    return (1, original) if original == random_shape.WHOLE_CONTEXT else (original + 1, None)


@torch.inference_mode()
def expected(folder, tokens, noise=None):
    """Returns the logits after each token but the last. With `noise`, weights are rounded otherwise."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    if noise:
        for weight in model.parameters():
            weight.mul_(1 + ROUNDING * torch.randn(weight.shape, generator=noise))
    return model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]


def logprobs_of(logits, tokens):
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def sensitivity(folder, tokens, logits):
    """Returns the largest change of a log-probability if weights are rounded otherwise."""
    noise = torch.Generator().manual_seed(0)
    others = [logprobs_of(expected(folder, tokens, noise), tokens) for _ in range(4)]
    return max((other - logprobs_of(logits, tokens)).abs().max().item() for other in others)


def served(binary, folder, prompt, options, has_echo):
    """Returns the tokens that Corella draws, and log-probabilities: with `has_echo` first those of the prompt."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "echo": has_echo,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    options = ["--dtype", "f32", "--kv-cache-dtype", "f32", "--max-num-seqs", "4", *options]
    with serving(binary, folder, options) as post:
        answer = post("/v1/completions", body)
    logprobs = answer["choices"][0]["logprobs"]
    tokens = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
    return tokens[-NUM_TOKENS:], logprobs["token_logprobs"]


def compare(args, family, seed):
    """Returns the number of compared tokens, the largest difference, and whether it is allowed."""
    generator = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / family
        folder.mkdir()
        settings = write_folder(folder, family, generator, seed)
        shortest, context = context_of(settings)
        prompt = generator.integers(3, VOCAB_SIZE, generator.integers(shortest, LONGEST_PROMPT)).tolist()
        options = ["--max-num-batched-tokens", str(generator.choice([16, 64, 512]))]
        options += ["--isa", str(generator.choice(args.isa))]
        options += ["--max-model-len", str(context)] if context else []
        has_echo = bool(generator.integers(2))
        found, found_logprobs = served(args.binary, folder, prompt, options, has_echo)
        tokens = prompt + found
        logits = expected(folder, tokens)
        logprobs, drawn = logprobs_of(logits, tokens), logits[len(prompt) - 1 :]
        # The prompt's first token has no log-probability.
        found_logprobs = found_logprobs[has_echo:]
        distance = np.abs(found_logprobs - logprobs[-len(found_logprobs) :].numpy()).max()
        lead = drawn.max(-1).values - drawn.gather(1, torch.tensor(found)[:, None])[:, 0]
        largest = logits.abs().max().item()
        difference = max(distance.item(), lead.max().item()) / largest
        is_right, remark = difference <= TOLERANCE, ""
        if not is_right:
            change = sensitivity(folder, tokens, logits) / largest
            is_right, remark = difference <= MOST_ROUNDINGS * change, f" (roundings of weights: {change:.1e})"
    words = f"{'same' if is_right else 'OTHER'}, {difference:.1e}{remark}, prompt of {len(prompt)}, {' '.join(options)}"
    print(f"{family}, seed {seed}: {words}", flush=True)
    if not is_right:
        print(json.dumps(settings), flush=True)
    return len(found_logprobs), difference, is_right


def main():
    args = read_arguments(__doc__.splitlines()[0], FAMILIES)
    make_golden.set_up_transformers()
    run(args, compare, "tokens")


if __name__ == "__main__":
    main()
