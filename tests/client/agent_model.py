"""Models of several families that read a file, edit it and answer, dictated by the mock.

Each family has its own template in `agent_template`, with the constructs and marks of the real one, and writes calls
and thoughts in its format.
"""

import json
from pathlib import Path

import byte_model

TEMPLATES = Path(__file__).parent / "agent_template"
THOUGHT = "I look at the file first."

# The special tokens of a family, the first of which end a reply, and the tokens that its template knows by name.
SPECIAL = {
    "qwen3": ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama31": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
                "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "gpt_oss": ["<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"],
}
FAMILIES = list(SPECIAL)
NUM_ENDS = {"gpt_oss": 2}
NAMES = {
    "llama31": {"bos_token": "<|begin_of_text|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
}


def make(family, folder, max_len=131072):
    special = SPECIAL[family]
    template = (TEMPLATES / f"{family}.jinja").read_text()
    ends = special[: NUM_ENDS.get(family, 1)]
    return byte_model.make(folder, template, special, ends=ends, max_len=max_len, **NAMES.get(family, {}))


def call(family, name, arguments):
    """Returns a tool call, after a thought if the family thinks."""
    arguments = json.dumps(arguments)
    if family == "qwen3":
        return f'<think>\n{THOUGHT}\n</think>\n\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    if family == "llama31":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    if family == "mistral":
        return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]'
    header = f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>"
    return f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{header}{arguments}<|call|>"


def answer(family, text):
    if family == "qwen3":
        return f"<think>\nIt is done.\n</think>\n\n{text}"
    if family == "gpt_oss":
        return f"<|channel|>analysis<|message|>It is done.<|end|><|start|>assistant<|channel|>final<|message|>{text}"
    return text
