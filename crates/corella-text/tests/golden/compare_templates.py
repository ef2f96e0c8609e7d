"""Compares the texts that Corella and Jinja2 print for chat templates: files given by name, such as those in llama.cpp's
models/templates and vLLM's examples, and conversations drawn from seeds.

    cargo build -p corella-text --example render_chat
    python compare_templates.py target/debug/examples/render_chat FILE.jinja…
"""

import json
import subprocess
import sys
from pathlib import Path

from conversation import conversation
from transformers_jinja import environment, render

NUM_CONVERSATIONS = 200


def compare(program, paths):
    conversations = [conversation(seed) for seed in range(NUM_CONVERSATIONS)]
    num_different = 0
    for path in paths:
        source = Path(path).read_text()
        lines = [{"template": source}, *conversations]
        given = "".join(json.dumps(line) + "\n" for line in lines)
        run = subprocess.run([program], input=given, capture_output=True, text=True, check=True)
        answers = [json.loads(line) for line in run.stdout.splitlines()]
        try:
            template = environment().from_string(source)
        except Exception as error:
            if any("text" in answer for answer in answers):
                print(f"{path}: jinja2 refuses it: {error}")
            continue
        different, num_rendered = [], 0
        for seed, (asked, answer) in enumerate(zip(conversations, answers, strict=True)):
            expected = render(template, asked)
            num_rendered += isinstance(expected, str)
            if isinstance(expected, str) and answer.get("text") != expected or not isinstance(expected, str) and "text" in answer:
                different.append((seed, expected, answer))
        num_different += len(different)
        print(f"{path}: {num_rendered} prompts, {len(different)} differences")
        for seed, expected, answer in different[:3]:
            print(f"  seed {seed}: {difference(expected, answer)}")
    return num_different


def difference(expected, answer):
    if not isinstance(expected, str):
        return f"jinja2 fails: {type(expected).__name__} {expected}; Corella prints"
    got = answer.get("text")
    if got is None:
        return f"Corella fails: {answer['error']}; jinja2 prints"
    at = next((at for at, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got)))
    return f"jinja2 …{expected[max(0, at - 40):at + 40]!r}, Corella …{got[max(0, at - 40):at + 40]!r}"


if __name__ == "__main__":
    program, *paths = sys.argv[1:]
    sys.exit(min(compare(program, paths), 1))
