"""Serves the same prompts with and without --speculate, by turns, and prints medians.

    python bench/speculation.py target/release/corella [CASE ...] [--model FOLDER] [--runs 5] [--concurrency 1,8]
    python bench/speculation.py target/release/corella [CASE ...] --draft-model models/nano --draft-dtype int8

Without a draft model, guesses are made by --speculate ngram. A draft model should be smaller than the model; the same
model in a cheaper type is the closest substitute without a second checkpoint.

"again" asks for JSON that the conversation already contains, so the answer repeats it. "json" asks for it once, and the
answer has the words of the question in another form. "stories" has nothing to repeat.
"""

import argparse
import json
import random
import statistics
import tempfile

from defaults import served

NUM_PROMPTS = 64
VALUES = {"name": "Alice Ben Cara David Emma Finn Greta Hugo Ida Jack", "city": "Paris Rome Oslo Madrid Vienna Lisbon",
          "job": "baker pilot nurse farmer painter", "pet": "cat dog fox horse parrot", "color": "blue red green yellow black",
          "food": "apple bread soup cheese rice", "drink": "tea milk water juice", "age": "18 21 27 34 42 55 63 71"}
MEASURES = [("output tokens/s", "output_throughput", "8.1f"), ("TPOT p50, ms", "median_tpot_ms", "8.3f"),
            ("E2EL p50, ms", "median_e2el_ms", "8.1f"), ("ITL p99, ms", "p99_itl_ms", "8.2f")]
COUNTS = {"drafts": "corella_spec_decode_num_draft_tokens_total{", "held": "corella_spec_decode_num_accepted_tokens_total{",
          "steps": "corella_steps_total{", "tokens": "corella_generation_tokens_total{"}


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def prompts(case):
    dice = random.Random(1)
    for _ in range(NUM_PROMPTS):
        pairs = [(key, dice.choice(values.split())) for key, values in VALUES.items()]
        dice.shuffle(pairs)
        question = turn("user", f"Write JSON with {', '.join(f'{key} {value}' for key, value in pairs)}.")
        if case == "stories":
            question = turn("user", f"Tell me a story about a {dict(pairs)['pet']} and a {dice.choice(['lantern', 'river', 'boat'])}.")
        if case == "again":
            question += turn("assistant", json.dumps({key: int(value) if key == "age" else value for key, value in pairs})) + question
        yield question + "<|im_start|>assistant\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--num-prompts", type=int, default=4 * NUM_PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-dtype", default="auto")
    parser.add_argument("--temperature", default="0")
    options = parser.parse_args()
    kind = "draft" if options.draft_model else "ngram"
    speculation = ["--speculate", kind]
    if options.draft_model:
        speculation += ["--draft-model", options.draft_model, "--draft-dtype", options.draft_dtype]
    model = [options.model] if options.model else []
    for case in options.cases or ["again", "json", "stories"]:
        for concurrency in options.concurrency.split(","):
            load = ["--num-prompts", str(options.num_prompts), "--max-concurrency", concurrency, "--max-tokens", str(options.max_tokens),
                    "--temperature", options.temperature]
            with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
                file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(case))
                file.flush()
                rounds = [[served(options.binary, [*model, *value], ["--prompts", file.name, *load], COUNTS) for value in ([], speculation)]
                          for _ in range(options.runs)]
            table(f"{case}, {concurrency} at a time", kind, rounds)


def table(title, kind, rounds):
    print(f"\n| {title} | off | {kind} | ratio (lowest to highest) |\n|---|---|---|---|")
    for name, key, form in MEASURES:
        cells = [f"{statistics.median(r[at][key] for r in rounds):{form}}".strip() for at in (0, 1)]
        ratios = sorted(r[1][key] / r[0][key] for r in rounds)
        print(f"| {name} | {' | '.join(cells)} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")
    per_step = [statistics.median(r[at]["tokens"] / r[at]["steps"] for r in rounds) for at in (0, 1)]
    drafts, held = (sum(r[1][name] for r in rounds) for name in ("drafts", "held"))
    print(f"| tokens a step | {per_step[0]:.2f} | {per_step[1]:.2f} | {held:.0f} of {drafts:.0f} guesses held |", flush=True)


if __name__ == "__main__":
    main()
