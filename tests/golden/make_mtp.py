#!/usr/bin/env python3
"""Make models with a draft head (multi-token prediction), and what the head computes.

    .venv/bin/python tests/golden/make_mtp.py [NAME …]

Transformers drops the tensors of these heads, so this script builds the head from layer classes: the layer has the
model's own class, and the rest of the head follows vLLM's `qwen3_next_mtp.py` and `qwen3_5_mtp.py`. A folder `mtp/NAME`
has the golden model NAME with random `mtp.*` tensors. Its mtp.json has a text and the lengths of some of its
beginnings; mtp.f32 has the logits of three guesses for each beginning, in f32. The first guess follows the beginning
and one more token of the text; each later guess follows the greedy guess before it.

The layers of the model `mtp/agreeing` add nothing, so that the newest token alone determines the logits. The head
passes this token's embedding on, so that all guesses are right.
"""

import json

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from make_golden import HERE, asked_names, set_up_transformers

# Some beginnings end with the last token of a page, and some with the first token of the next page.
BEGINNINGS = (1, 2, 5, 15, 16, 17, 31, 32, 47, 63, 64, 65, 90)
NUM_GUESSES = 3
# Published folders of this model have all experts of the head's layer in two tensors.
FUSED = ("qwen3-5-moe",)
# The projections through which layers add to the residual stream.
OUTPUTS = ("o_proj", "out_proj", "down_proj")


class Head(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        base, config = model.model, model.config
        layer = config.layer_types.index("full_attention")
        norm = type(base.norm)
        self.pre_fc_norm_embedding = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([type(base.layers[layer])(config, layer)])
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, model, tokens, hidden):
        """Returns the head's hidden states after each of `tokens`. `hidden` has the model's hidden states before each
        of them."""
        base = model.model
        embedding = self.pre_fc_norm_embedding(base.embed_tokens(tokens))
        x = self.fc(torch.cat([embedding, self.pre_fc_norm_hidden(hidden)], -1))[None]
        length = len(tokens)
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        rotation = base.rotary_emb(x, positions)
        x = self.layers[0](x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        return self.norm(x)[0]


def draw(head, seed):
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            shape = tuple(parameter.shape)
            if "norm" in name:
                mean = 0.8 if name.endswith(("q_norm.weight", "k_norm.weight")) else 0.0
                values = generator.normal(mean, 0.2, shape)
            elif name.endswith("bias"):
                values = generator.normal(0.0, 0.2, shape)
            else:
                values = generator.normal(0.0, 1.5 / shape[-1] ** 0.5, shape)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def stored(head, is_fused):
    """Returns the head's tensors under their names in published files."""
    tensors = {}
    for name, parameter in head.state_dict().items():
        values = parameter.numpy()
        if is_fused or ".experts." not in name:
            tensors[f"mtp.{name}"] = values
            continue
        prefix, _, kind = f"mtp.{name}".rpartition(".")
        for expert, matrix in enumerate(values):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2)))
            for part, matrix in parts.items():
                tensors[f"{prefix}.{expert}.{part}.weight"] = np.ascontiguousarray(matrix)
    return tensors


@torch.inference_mode()
def guess(model, head, text, beginning):
    """Returns the logits of the guesses after the first `beginning + 1` tokens of the text."""
    tokens = text[: beginning + 1]
    # Each row of the head is for a token and the hidden state before it, so the first token has no row.
    hidden = model.model(tokens[None, :beginning], use_cache=False).last_hidden_state[0]
    read, logits = tokens[1:], []
    for _ in range(NUM_GUESSES):
        states = head(model, read, hidden)
        logits.append(model.lm_head(states[-1]))
        first, second = logits[-1].topk(2).values
        assert first - second > 1e-3, "a guess is a near tie: take another seed"
        read = torch.cat([read, logits[-1].argmax()[None]])
        hidden = torch.cat([hidden, states[-1:]])
    return torch.stack(logits)


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def make_agreeing(source):
    tensors = load_file(source / "model.safetensors")
    for name, values in load_file(source.parent / "mtp" / source.name / "model.safetensors").items():
        if name.startswith("mtp."):
            tensors[name] = values
    for name, values in tensors.items():
        if any(f".{output}" in name for output in OUTPUTS):
            tensors[name] = np.zeros_like(values)
    hidden = len(tensors["model.norm.weight"])
    tensors["mtp.fc.weight"] = np.eye(hidden, 2 * hidden, dtype=np.float32)
    # Norms multiply by 1 plus their weights.
    tensors["mtp.pre_fc_norm_embedding.weight"] = np.zeros(hidden, np.float32)
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"]
    return tensors


def main():
    names = asked_names(__doc__, ["agreeing", "qwen3-5", "qwen3-5-moe", "qwen3-next"])
    set_up_transformers()
    # `agreeing` comes last, since it is made from the folder `mtp/qwen3-5-moe`.
    for name in sorted(names, reverse=True):
        if name == "agreeing":
            source = HERE / "qwen3-5-moe"
            config = json.loads((source / "config.json").read_text())
            write(HERE / "mtp" / name, config, make_agreeing(source))
            continue
        source, folder = HERE / name, HERE / "mtp" / name
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
        head = Head(model).eval()
        draw(head, seed=41)
        generator = np.random.default_rng(7)
        text = generator.integers(0, model.config.vocab_size, max(BEGINNINGS) + 1).tolist()
        logits = torch.stack([guess(model, head, torch.tensor(text), beginning) for beginning in BEGINNINGS])
        config = json.loads((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors") | stored(head, name in FUSED)
        write(folder, config, tensors)
        (folder / "mtp.json").write_text(json.dumps({"text": text, "beginnings": BEGINNINGS}) + "\n")
        (folder / "mtp.f32").write_bytes(logits.numpy().astype("<f4").tobytes())
        print(f"{name}: {len(tensors)} tensors, {tuple(logits.shape)} logits", flush=True)


if __name__ == "__main__":
    main()
