"""Writes the fields of vLLM's service `vllm.Inference` to vllm.json, from the file inference.proto of crate vllm-proto.

    python fields.py PATH/inference.proto

A row is a message, a field, its number, its type, its label, its oneof, and how Corella treats it: `read`, `written`,
or `ignored: WHY`. Messages that only occur in ignored or refused fields are left out.
"""

import json
import re
import sys
from pathlib import Path

WRITTEN = {
    "GenerateResponse",
    "SequenceOutput",
    "PromptInfo",
    "FinishInfo",
    "CandidateTokenInfo",
    "CandidateTokenInfo.TokenInfo",
}
IGNORED = {
    ("GenerateRequest", "session_id"): "requests of a session need no common place here",
    ("GenerateRequest", "watermarking"): "there is no watermark",
    ("GenerateRequest", "kv_hints"): "the scheduler takes no hints",
    ("GenerateRequest", "engine_reasoning_gate"): "formats hold from the first token",
    ("SequenceOutput", "sampling_mask"): "never sent",
    ("FinishInfo", "ec_transfer_params"): "never sent",
}
LEFT_OUT = {"EngineReasoningGate", "KVHintsEnvelope", "KVHintAction", "MediaItem", "PreprocessedMediaFeatures"}
FIELD = re.compile(r"(optional |repeated )?(map<\w+, \w+>|[\w.]+) (\w+) = (\d+)$")


def rows_of(text):
    text = re.sub(r"//[^\n]*", "", text)
    rows, scopes = [], []
    for statement in re.findall(r"[^{};]+[{};]|[{}]", text):
        statement, end = " ".join(statement[:-1].split()), statement[-1]
        if end == "{":
            scopes.append(statement)
        elif end == "}":
            scopes.pop()
        else:
            rows += row_of(statement, scopes)
    return rows


def row_of(statement, scopes):
    names = [scope.removeprefix("message ") for scope in scopes if scope.startswith("message ")]
    match = FIELD.match(statement)
    if not names or not match or scopes[-1].startswith("enum "):
        return []
    label, kind, field, number = match.groups()
    oneof = scopes[-1].removeprefix("oneof ") if scopes[-1].startswith("oneof ") else ""
    message = ".".join(names)
    if message in LEFT_OUT:
        return []
    why = IGNORED.get((message, field))
    treatment = f"ignored: {why}" if why else "written" if message in WRITTEN else "read"
    return [[message, field, int(number), kind, (label or "").strip(), oneof, treatment]]


def main():
    rows = rows_of(Path(sys.argv[1]).read_text())
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(__file__).with_name("vllm.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
