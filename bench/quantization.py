"""Measures what each way of quantising costs the built-in model: its perplexity on held-out dialogues (models/nano).
The calibration text consists of dialogues as in training.

    python bench/quantization.py target/release/corella [--check]

With --check, Transformers with the compressed-tensors package (tests/quantized/requirements.txt) also loads each
folder, and its loss on the first documents is printed beside Corella's, which computes in f32 for this."""

import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NANO = ROOT / "models/nano"
sys.path.insert(0, str(NANO))
import corpus  # noqa: E402

BINARY = Path(sys.argv[1]).absolute()
CHECK = "--check" in sys.argv[2:]
NUM_CALIBRATION_DIALOGUES = 600
NUM_CHECKED = 60

FOLDERS = {"int8": ["--format", "int8"]}
for zero_point in ([], ["--asymmetric"]):
    for group_size in ("32", "128"):
        for method in ("nearest", "gptq"):
            name = " ".join(["int4", f"g{group_size}", *(["asymmetric"] if zero_point else []), method])
            FOLDERS[name] = ["--format", "int4", "--group-size", group_size, "--method", method, *zero_point]


def as_text(messages):
    return "\n".join(f"<|im_start|>{role}\n{said}<|im_end|>" for role, said in messages)


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run(*arguments):
    done = subprocess.run([BINARY, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done.stdout + done.stderr


def loss(folder, text, *arguments):
    line = run("bench", "perplexity", folder, "--text", text, *arguments)
    return float(re.search(r"perplexity ([\d.]+), loss ([\d.]+)", line)[2]), line.rsplit("(", 1)[1].strip(" )\n")


def package_loss(folder, texts):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, number = 0.0, 0
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt").input_ids
            scores = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
            total -= scores.gather(1, ids[0, 1:, None]).sum().item()
            number += ids.shape[1] - 1
    return total / number


def main():
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        rng = random.Random(1)
        dialogues = [as_text(corpus.dialogue(rng)) for _ in range(NUM_CALIBRATION_DIALOGUES)]
        write_lines(scratch / "calibration.jsonl", dialogues)
        held = [as_text(dialogue.messages) for dialogue in corpus.held_out(7, 100)]
        write_lines(scratch / "held.jsonl", held)
        checked = random.Random(2).sample(held, NUM_CHECKED)
        write_lines(scratch / "checked.jsonl", checked)
        plain, kernels = loss(NANO, scratch / "held.jsonl")
        print(f"| bf16 | | {2.718281828459045 ** plain:.3f} | | {kernels} |", flush=True)
        for name, arguments in FOLDERS.items():
            folder = scratch / name.replace(" ", "-")
            if "gptq" in name:
                arguments = [*arguments, "--calibration", scratch / "calibration.jsonl"]
            summary = run("quantize", NANO, folder, *arguments)
            bits = re.search(r"at ([\d.]+) bits", summary)[1]
            found, kernels = loss(folder, scratch / "held.jsonl")
            more = 100 * (2.718281828459045 ** (found - plain) - 1)
            line = f"| {name} | {bits} | {2.718281828459045 ** found:.3f} | {more:+.2f} % | {kernels} |"
            if CHECK:
                ours, _ = loss(folder, scratch / "checked.jsonl", "--dtype", "f32")
                try:
                    line += f" {ours:.5f} | {package_loss(folder, checked):.5f} |"
                except RuntimeError as error:
                    line += f" {ours:.5f} | not loaded: {str(error).splitlines()[0]} |"
            print(line, flush=True)


if __name__ == "__main__":
    main()
