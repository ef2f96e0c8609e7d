"""Measures Transformers. Transformers' Python runs this file as a script, which prints JSON."""

import json
import sys
import time

from peer import THREADS, ScriptPeer, need, print_speeds, prompt


class Transformers(ScriptPeer):
    name = "Transformers bf16"
    environment = {"HF_HUB_OFFLINE": "1"}

    def __init__(self, python, model):
        self.python, self.model = python, model

    def check(self):
        need(self.python, "Python with Transformers (--transformers)")

    def version(self):
        code = "import torch, transformers as it; print(f'Transformers {it.__version__}, torch {torch.__version__}')"
        return self.run([self.python, "-c", code]).strip()


def main(model, prefills, batches):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def seconds(length, batch, num_decoded):
        ids = torch.tensor([prompt(length, seed) for seed in range(batch)])
        began = time.monotonic()
        out = model(ids, use_cache=True, logits_to_keep=1)
        first = time.monotonic()
        for _ in range(num_decoded):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        return first - began, time.monotonic() - first

    print_speeds(prefills, batches, seconds)


if __name__ == "__main__":
    main(sys.argv[1], *json.loads(sys.argv[2]))
