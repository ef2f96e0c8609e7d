"""Conversations of every shape, drawn from seeds: the messages of clients, and the answers of other servers."""

import json
import random

TEXTS = [
    "Hi there",
    "  Be brief.\n",
    "",
    "\n",
    " How are\nyou? 🦜 <b>'q'</b> ",
    "Zürich “naïve” 日本語 \\n \t end",
    "one [INST] two\n\n\nthree",
    "{{ not a template }} {% nor this %}",
    "a: 1\nb: 2",
    "\u00a0 ends in strange space \u2003",
    "Über STRASSE, it's o'clock",
    "/no_think Answer in 3 words.",
    "x" * 90,
]
ANSWERS = [
    "Hello!",
    "<think>\nold\n</think>\n\nOne.",
    "<think></think>Two. ",
    "Only the end</think>Three",
    "  Four lines:\n- a\n- b\n",
    "[THINK]hm[/THINK]Five",
    "",
]
NAMES = ["weather", "now", "search_files", "get_ümlaut"]
ARGUMENTS = [
    {},
    {"city": "Zürich", "days": 3, "at": [1.5, None, True]},
    {"q": "it's \"quoted\" \\ and\nbroken </tool_call>", "deep": {"a": {"b": []}, "c": {}}},
    {"big": 12345678901234, "small": -0.0001, "tiny": 1e-7, "huge": 1e20, "yes": True, "no": False, "none": None},
    {"list": [[1, 2], [], {"x": "y"}], "": "empty key", "emoji": "🦜<&>"},
    {"number": 1.0, "text": "1.0", "zero": 0},
]
PARAMETERS = [
    {"type": "object", "properties": {}},
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where? <b>&</b> 'here' “there”"},
            "days": {"type": "integer", "default": 1, "minimum": 0},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        },
        "required": ["city"],
    },
    {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "number"}, "default": []},
            "any": {"type": ["string", "null"], "default": None},
            "deep": {
                "type": "object",
                "properties": {"x": {"type": "number", "maximum": 2.5}, "y": {"$ref": "#/$defs/P"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
        "$defs": {"P": {"type": "boolean"}},
        "additionalProperties": True,
    },
]


class Drawer:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.has_parts = self.chance(0.4)

    def chance(self, share):
        return self.random.random() < share

    def one(self, choices):
        return choices[int(self.random.random() * len(choices))]

    def between(self, low, high):
        return low + int(self.random.random() * (high - low + 1))

    def content(self, texts):
        if not self.has_parts or self.chance(0.6):
            return self.one(texts)
        parts = [{"type": "text", "text": self.one(texts)} for _ in range(self.between(0, 3))]
        if self.chance(0.2):
            kind = self.one(["image", "image_url", "video", "audio"])
            parts.insert(self.between(0, len(parts)), {"type": kind, **({"image_url": {"url": "data:,"}} if kind == "image_url" else {})})
        return parts

    def call(self, index, style):
        arguments = self.one(ARGUMENTS)
        if style["text_arguments"]:
            arguments = json.dumps(arguments)
        call = {"type": "function", "function": {"name": self.one(NAMES), "arguments": arguments}}
        if style["ids"]:
            call = {"id": f"call{index:05}", **call}
        return call

    def assistant(self, style, may_call):
        message = {"role": "assistant"}
        if may_call and self.chance(0.5):
            shape = self.between(0, 3)
            if shape == 0:
                message["content"] = None
            elif shape == 1:
                message["content"] = ""
            elif shape == 2:
                message["content"] = self.one(ANSWERS)
            message["tool_calls"] = [self.call(index, style) for index in range(self.one([1, 1, 1, 2, 3]))]
        else:
            message["content"] = None if self.chance(0.04) else self.content(ANSWERS)
            if self.chance(0.1):
                message["tool_calls"] = self.one([None, []])
        if self.chance(0.2):
            message[self.one(["reasoning_content", "reasoning", "thinking"])] = self.one(["\nHm. \n", "", "So…"])
        return message

    def result(self, call, style):
        message = {"role": "tool", "content": self.content(TEXTS + ['{"sky": "clear", "t": 21.5}'])}
        if self.chance(0.1):
            message["content"] = self.one([{"sky": "clear", "t": 21.5}, [1, 2], 7, None])
        if call.get("id") and self.chance(0.9):
            message["tool_call_id"] = call["id"]
        if self.chance(0.5):
            message["name"] = call["function"]["name"]
        return message

    def tool(self):
        function = {"name": self.one(NAMES), "description": self.one(["Weather of a place.\nMetric & \"exact\".", "", "Zeit"])}
        if self.chance(0.1):
            del function["description"]
        if self.chance(0.9):
            function["parameters"] = self.one(PARAMETERS)
        if self.chance(0.1):
            function["strict"] = True
        if self.chance(0.1):
            function["return"] = {"type": "number"}
        return {"type": "function", "function": function}


def conversation(seed):
    draw = Drawer(seed)
    style = {"text_arguments": draw.chance(0.15), "ids": draw.chance(0.8)}
    messages = []
    for _ in range(draw.one([0, 0, 1, 1, 1, 1, 2])):
        messages.append({"role": "developer" if draw.chance(0.08) else "system", "content": draw.content(TEXTS)})
    has_tools = draw.chance(0.5)
    for _ in range(draw.between(0, 3)):
        if not draw.chance(0.03):
            messages.append({"role": "user", "content": draw.content(TEXTS)})
        if draw.chance(0.05):
            messages[-1:] = [*messages[-1:], {"role": "user", "content": None, "name": "Ann"}]
        for _ in range(draw.one([1, 1, 2])):
            said = draw.assistant(style, has_tools or draw.chance(0.1))
            messages.append(said)
            calls = said.get("tool_calls") or []
            for call in calls:
                if not draw.chance(0.05):
                    messages.append(draw.result(call, style))
            if not calls:
                break
        if draw.chance(0.05):
            messages.append({"role": draw.one(["system", "developer", "critic"]), "content": "Late."})
    if draw.chance(0.7):
        messages.append({"role": "user", "content": draw.content(TEXTS)})
    kwargs = {}
    if draw.chance(0.3):
        kwargs["enable_thinking"] = draw.one([True, False, None])
    if draw.chance(0.1):
        kwargs["reasoning_effort"] = draw.one(["low", "high"])
    return {
        "messages": messages,
        "tools": draw.one([None, None, []]) if not has_tools else [draw.tool() for _ in range(draw.between(1, 3))],
        "add_generation_prompt": draw.chance(0.7),
        "kwargs": kwargs,
    }
