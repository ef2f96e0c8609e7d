"""Greedy tokens over HTTP equal those of Hugging Face Transformers."""

import golden_model
import pytest
from server_process import ServerProcess


@pytest.mark.parametrize(
    "name", ["llama-gqa-untied", "qwen3-gqa-tied", "qwen3-gqa-tied-sharded", "llama-gqa-tied-bf16"]
)
def test_greedy_tokens(name, tmp_path):
    folder = golden_model.make(name, tmp_path)
    # With this step size, longer prompts take several chunks.
    arguments = [folder, "--kv-cache-dtype", "f32", "--max-prefill-tokens", 48]
    if name.endswith("bf16"):
        # Matrix tiles would also round rows to bf16, which the goldens do not.
        arguments += ["--isa", "portable"]
    with ServerProcess(*arguments) as server:
        for case in golden_model.cases(name):
            answer = server.client.completions.create(
                model=server.model(),
                prompt=case["prompt"],
                max_tokens=len(case["tokens"]),
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert answer.choices[0].text == golden_model.text_of(case["tokens"])
            assert answer.usage.prompt_tokens == len(case["prompt"])
