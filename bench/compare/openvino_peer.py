"""Measures OpenVINO GenAI. OpenVINO's Python runs this file as a script, which prints JSON."""

import json
import sys
import time
from pathlib import Path

from peer import THREADS, ScriptPeer, need, print_speeds, prompt


class OpenVino(ScriptPeer):
    def __init__(self, python, models, kind):
        self.python, self.kind = python, kind
        self.name = f"OpenVINO {kind}"
        # The model is stored as f16 and computed in bf16 if the machine supports it.
        self.models, self.model = models, Path(models or "") / {"bf16": "fp16"}.get(kind, kind)

    def check(self):
        need(self.python, "Python with OpenVINO GenAI (--openvino)")
        need(self.models, "folder of exported models (--openvino-models)")
        need(self.model, "exported model (--openvino-models)")

    def version(self):
        return "OpenVINO GenAI " + self.run([self.python, "-c", "import openvino_genai as it; print(it.__version__)"]).split()[-1]


def main(model, prefills, batches):
    import numpy
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS}, {}, {})

    def seconds(length, batch, num_decoded):
        options = genai.GenerationConfig(max_new_tokens=1 + num_decoded, ignore_eos=True, do_sample=False)
        began = time.monotonic()
        ids = [numpy.array([prompt(length, seed)], dtype=numpy.int64) for seed in range(batch)]
        handles = [pipe.add_request(at, openvino.Tensor(each), options) for at, each in enumerate(ids)]
        waiting, first = handles, None
        while pipe.has_non_finished_requests():
            pipe.step()
            if first is None:
                waiting = [handle for handle in waiting if not handle.can_read()]
                first = None if waiting else time.monotonic()
        return first - began, time.monotonic() - first

    print_speeds(prefills, batches, seconds)


if __name__ == "__main__":
    main(sys.argv[1], *json.loads(sys.argv[2]))
