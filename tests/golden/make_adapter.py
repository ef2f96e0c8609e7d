#!/usr/bin/env python3
"""Make the golden adapters: random LoRA adapters of the golden models, with what PEFT computes with them.

    python -m venv .venv && .venv/bin/pip install -r tests/golden/requirements.txt
    .venv/bin/python tests/golden/make_adapter.py

A folder in `adapters` has the files of PEFT's `save_pretrained`, and golden.json with a prompt and the logits at each
of the prompt's last positions. Transformers and PEFT run in f32 on the CPU, also with weights in bf16.
"""

import json
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
OUT = HERE / "adapters"
PROMPT_LENGTH = 45
NUM_POSITIONS = 4

ALL_OF_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The base model's folder, and the adapter's settings.
ADAPTERS = {
    "llama-all": ("llama-gqa-tied", {"r": 4, "lora_alpha": 8, "target_modules": ALL_OF_LLAMA}),
    # Like an adapter that was trained in bf16: its weights are bf16, and it changes the logits little.
    "llama-bf16": ("llama-gqa-tied-bf16", {"r": 4, "lora_alpha": 8, "target_modules": ALL_OF_LLAMA}),
    "llama-some": (
        "llama-gqa-tied",
        {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"v_proj": 7},
            "alpha_pattern": {"down_proj": 9},
            "layers_to_transform": [1],
        },
    ),
    "qwen3-all": ("qwen3-mha-untied", {"r": 5, "lora_alpha": 5, "target_modules": ALL_OF_LLAMA}),
    "gpt2-fused": (
        "gpt2",
        {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "phi3-fused": (
        "phi3",
        {"r": 4, "lora_alpha": 6, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    ),
    "cohere-all": ("cohere", {"r": 2, "lora_alpha": 4, "target_modules": ALL_OF_LLAMA}),
    "gemma3-all": ("gemma3", {"r": 2, "lora_alpha": 4, "target_modules": ALL_OF_LLAMA}),
    "experts-attention": ("qwen3-moe", {"r": 2, "lora_alpha": 4, "target_modules": ALL_OF_LLAMA[:4]}),
}


def main():
    for seed, (name, (base, settings)) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed)
        folder = OUT / name
        shutil.rmtree(folder, ignore_errors=True)

        def load():
            return AutoModelForCausalLM.from_pretrained(
                HERE / base, dtype=torch.float32, attn_implementation="eager"
            )

        config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        adapted = get_peft_model(load(), config)
        if base.endswith("bf16"):
            for parameter, weights in adapted.named_parameters():
                if "lora_B" in parameter:
                    weights.data *= 0.2
            adapted = adapted.bfloat16()
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = base
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        # The logits are computed from the files that were written.
        model = PeftModel.from_pretrained(load(), folder).eval().float()
        vocab_size = model.config.get_text_config().vocab_size
        prompt = torch.randint(0, vocab_size, (1, PROMPT_LENGTH))
        with torch.no_grad():
            logits = model(prompt).logits[0, -NUM_POSITIONS:]
            with model.disable_adapter():
                plain = model(prompt).logits[0, -NUM_POSITIONS:]
        golden = {"base": base, "prompt": prompt[0].tolist(), "logits": logits.tolist()}
        (folder / "golden.json").write_text(json.dumps(golden) + "\n")
        change = (logits - plain).abs().max() / plain.abs().max()
        print(f"{name}: changes logits by {100 * change:.0f} % of the largest")


if __name__ == "__main__":
    main()
