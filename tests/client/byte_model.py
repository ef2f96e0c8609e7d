"""Makes folders of models with a tokenizer of bytes and special tokens. The mock dictates their answers."""

import json
import shutil

import golden_model

# Byte i of a text is token i, as a character of GPT-2's byte alphabet; special tokens follow.
NUM_BYTES = 256


def byte_character(byte):
    if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
        return chr(byte)
    return chr(0x100 + [b for b in range(256) if b <= 0x20 or 0x7F <= b <= 0xA0 or b == 0xAD].index(byte))


def add_embedding_rows(path, num_rows):
    """Adds rows of zeros to the embedding of a file of tensors. Its other tensors stay unchanged."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8:start]), []
    for name, tensor in sorted(header.items()):
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        data = content[start + begin : start + end]
        if name == "model.embed_tokens.weight":
            data += bytes(num_rows * len(data) // tensor["shape"][0])
            tensor["shape"][0] += num_rows
        at = sum(map(len, tensors))
        tensor["data_offsets"] = [at, at + len(data)]
        tensors.append(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors))


def make(folder, template, special, *, ends, max_len=4096, **names):
    """Makes a folder with a byte tokenizer. The mock only reads the shapes of its weights.

    `ends` are the special tokens that end a reply, and `names` are tokens that templates know by name.
    """
    source = golden_model.GOLDEN / "qwen3-gqa-tied"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "vocab_size": NUM_BYTES + len(special),
        "max_position_embeddings": max_len,
        "eos_token_id": [NUM_BYTES + special.index(end) for end in ends],
    }
    (folder / "config.json").write_text(json.dumps(config))
    add_embedding_rows(folder / "model.safetensors", len(special))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = golden_model.bpe(
        {byte_character(byte): byte for byte in range(NUM_BYTES)},
        decoder=byte_level,
        pre_tokenizer=byte_level,
        added_tokens=[flags | {"id": NUM_BYTES + i, "content": text} for i, text in enumerate(special)],
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} | names))
    return folder
