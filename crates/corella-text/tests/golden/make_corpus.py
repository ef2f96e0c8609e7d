"""Makes corpus.json: conversations drawn from seeds, and what Jinja2, set up as Transformers sets it up, prints for
them with each template in corpus/. Of most prompts, the file has only the FNV-1a hash.

    pip install jinja2 && python make_corpus.py
"""

import json
from pathlib import Path

from conversation import conversation
from transformers_jinja import environment, render

HERE = Path(__file__).parent
NUM_CONVERSATIONS = 200
# Prompts that are kept as they are, so that a difference can be read without Python.
NUM_WHOLE = 2
MAX_WHOLE = 2000


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def main():
    conversations = [conversation(seed) for seed in range(NUM_CONVERSATIONS)]
    templates = {}
    for path in sorted((HERE / "corpus").glob("*.jinja")):
        template = environment().from_string(path.read_text())
        prompts = [render(template, asked) for asked in conversations]
        texts = {seed: text for seed, text in enumerate(prompts) if isinstance(text, str)}
        short = [seed for seed, text in texts.items() if 0 < len(text) < MAX_WHOLE]
        templates[path.stem] = {
            # A template that fails has no prompt.
            "hashes": " ".join(fnv1a(texts[seed]) if seed in texts else "-" for seed in range(NUM_CONVERSATIONS)),
            "whole": {str(seed): texts[seed] for seed in short[:NUM_WHOLE]},
        }
        print(f"{path.stem}: {len(texts)} prompts, {NUM_CONVERSATIONS - len(texts)} errors")
    lines = [json.dumps(asked, ensure_ascii=False, separators=(",", ":")) for asked in conversations]
    text = '{"conversations":[\n' + ",\n".join(lines) + '\n],\n"templates":' + json.dumps(templates, ensure_ascii=False, indent=1) + "}\n"
    (HERE / "corpus.json").write_text(text)


main()
