"""The network of corella-nano: Qwen3 in its smallest useful form, with Hugging Face names.

The layout of names is the file format: `state_dict()` is what model.safetensors holds.
"""

import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

HERE = Path(__file__).parent

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 480,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        # In f32 and back, as Transformers does: autocast alone would square in bf16.
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])
        return (self.weight * y).to(x.dtype)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        h = c["hidden_size"]
        self.q_proj = nn.Linear(h, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(h, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(h, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, h, bias=False)
        self.q_norm = Norm(self.dim)
        self.k_norm = Norm(self.dim)

    def forward(self, x, cos, sin, past=None):
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            if past:
                k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            past[:] = [k, v]
        # Written out: the fused CPU kernel's way back takes half of a training step.
        # The heads that share keys are stacked, so nothing is repeated.
        n, s = self.heads // self.kv_heads, k.shape[2]
        q = q.reshape(b, self.kv_heads, n * t, self.dim) * self.dim ** -0.5
        score = (q @ k.transpose(2, 3)).float().view(b, self.kv_heads, n, t, s)
        seen = torch.ones(t, s, dtype=torch.bool).tril(s - t)
        score = score.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
        y = (score.view(b, self.kv_heads, n * t, s) @ v).view(b, self.heads, t, self.dim)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(h, f, bias=False)
        self.up_proj = nn.Linear(h, f, bias=False)
        self.down_proj = nn.Linear(f, h, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c["hidden_size"])
        self.mlp = Mlp(c)

    def forward(self, x, cos, sin, past=None):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"])


class Nano(nn.Module):
    def __init__(self, c=CONFIG):
        super().__init__()
        self.c = c
        self.model = Body(c)
        inv = 1.0 / c["rope_theta"] ** (torch.arange(0, c["head_dim"], 2).float() / c["head_dim"])
        angle = torch.outer(torch.arange(c["max_position_embeddings"]).float(), inv)
        angle = torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Residual writers start at zero, so that depth costs nothing at the start.
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.zeros_(p) if out else nn.init.normal_(p, std=0.02 if "embed" in name else c["hidden_size"] ** -0.5)

    def hidden(self, ids, past=None, start=0):
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.bfloat16()
        t = ids.shape[1]
        cos, sin = self.cos[start:start + t].to(x.dtype), self.sin[start:start + t].to(x.dtype)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, None if past is None else past[i])
        return self.model.norm(x)

    def forward(self, ids, past=None, start=0):
        return F.linear(self.hidden(ids, past, start), self.model.embed_tokens.weight)

    def loss(self, ids, picked, targets, weights):
        """The loss at the picked positions only: the head is a fifth of the work."""
        return self.head_loss(self.hidden(ids).flatten(0, 1)[picked], targets, weights)

    def head_loss(self, x, targets, weights):
        logits = F.linear(x, self.model.embed_tokens.weight).float()
        each = F.cross_entropy(logits, targets, reduction="none")
        return (each * weights).sum() / weights.sum()

    def compile_parts(self):
        """The layers are one program: compiling it alone takes a sixth of the time."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self.head_loss = torch.compile(self.head_loss, dynamic=False)


def mean_state(paths):
    states = [torch.load(path, weights_only=False)["net"] for path in paths]
    return {k: sum(s[k].float() for s in states) / len(states) for k in states[0]}


def load_folder(folder):
    from safetensors.torch import load_file

    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    net = Nano({**CONFIG, **config})
    net.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return net.eval()
