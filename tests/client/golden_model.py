"""Makes a golden model a folder that can be served, by adding a tokenizer.

Token i is the single character FIRST + i and nothing else, so equal text means equal
tokens, and a prompt may be written either way.
"""

import json
import shutil
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FIRST = 0x4E00

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make(name, folder):
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {chr(FIRST + i): i for i in range(vocab_size)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def text_of(tokens):
    return "".join(chr(FIRST + token) for token in tokens)


def cases(name):
    return json.loads((GOLDEN / name / "golden.json").read_text())["cases"]
