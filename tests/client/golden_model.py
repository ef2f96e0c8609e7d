"""Makes a golden model a folder that can be served, by adding a tokenizer.

Token i is the single character FIRST + i, so equal text means equal tokens, and a prompt may be written either
way.
"""

import json
import shutil
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FIRST = 0x4E00

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def bpe(vocab, *, decoder, pre_tokenizer=None, added_tokens=()):
    """Returns a tokenizer.json without merges, whose tokens are single characters and added ones."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added_tokens),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def make(name, folder):
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = bpe({chr(FIRST + i): i for i in range(vocab_size)}, decoder={"type": "Fuse"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_decoder(name, folder, architecture):
    """Makes the folder of an embedding model: without a head, and with its class's names of tensors."""
    make(name, folder)
    config = json.loads((folder / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    path = folder / "model.safetensors"
    stored = path.read_bytes()
    length = int.from_bytes(stored[:8], "little")
    header, data = json.loads(stored[8 : 8 + length]), stored[8 + length :]
    start, end = header.pop("lm_head.weight")["data_offsets"]
    for tensor in header.values():
        if "data_offsets" in tensor and tensor["data_offsets"][0] >= end:
            tensor["data_offsets"] = [at - (end - start) for at in tensor["data_offsets"]]
    if architecture.endswith("Model"):
        header = {key.removeprefix("model."): tensor for key, tensor in header.items()}
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[:start] + data[end:])
    return folder


def text_of(tokens):
    return "".join(chr(FIRST + token) for token in tokens)


def cases(name):
    return json.loads((GOLDEN / name / "golden.json").read_text())["cases"]
