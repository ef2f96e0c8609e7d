"""Makes the fixtures in this folder: what Jinja2, set up as Transformers sets it up, prints for the templates in
template/, and small tokenizers with what the tokenizers package makes of texts.

    pip install jinja2 tokenizers && python make_golden.py
"""

import json
from pathlib import Path

import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers_jinja import SPECIAL, environment

HERE = Path(__file__).parent


def say(role, content, **more):
    return {"role": role, "content": content, **more}


SYSTEM = say("system", "  Be brief.\n")
TALK = [say("user", "Hi there"), say("assistant", "Hello!"), say("user", " How are\nyou? 🦜 <b>'q'</b> ")]
THINKING = [
    say("user", "One?"),
    say("assistant", "<think>\nold\n</think>\n\nOne."),
    say("user", "Two?"),
    say("assistant", "<think>\nnew\n</think>\n\nTwo."),
    say("user", "<tool_response>7</tool_response>"),
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3, "at": [1.5, None]}}}
WITH_CALLS = [
    say("user", "Weather?"),
    say("assistant", None, tool_calls=[CALL]),
    say("tool", {"sky": "clear", "t": 21.5}),
    say("user", "Thanks"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place.\nMetric & \"exact\".",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "default": 1},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "tags": {"type": "array", "items": {"type": "number"}, "default": []},
                    "any": {"type": ["string", "null"], "default": None},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "other"},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]

CASES = [
    ("chatml", [SYSTEM, *TALK], None, True, {}),
    ("chatml", TALK, None, False, {}),
    ("chatml", [SYSTEM], None, True, {}),
    ("chatml", THINKING, None, True, {"enable_thinking": False}),
    ("header", [SYSTEM, *TALK], None, True, {"date_string": "01 Jan 2026"}),
    ("header", WITH_CALLS, TOOLS, True, {"date_string": "01 Jan 2026"}),
    ("header", [SYSTEM], TOOLS, False, {"date_string": "01 Jan 2026"}),
    ("header", [say("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], None, True, {"date_string": "x"}),
    ("header", [say("user", [{"type": "image"}])], None, True, {"date_string": "x"}),
    ("instruct", [SYSTEM, *TALK], None, True, {}),
    ("instruct", TALK[1:], None, True, {}),
    ("slice", TALK, None, True, {}),
    ("slice", [SYSTEM], None, True, {}),
    ("tools", WITH_CALLS, TOOLS, True, {}),
    ("tools", TALK, None, True, {}),
    (
        "values",
        TALK,
        None,
        True,
        {
            "kwarg": True,
            "number": 41,
            "floats": [0.1, 1.0, 1e16, 1e15, 123456789.125, 1e-4, 1e-5, -2.5e-10, 1e100, 0.0, 5e-324],
            "mapping": {"one": 1, "two": "zwei", "three": None},
        },
    ),
    (
        "python",
        TALK,
        None,
        True,
        {
            "given": [
                None, True, 3, -2.75, "", "x", " 12 ", "-7", "1.9", "1e3", "0x1A", "ff", "inf", [], [1], {}, {"a": 1},
            ],
        },
    ),
]


def make_template_cases():
    env = environment()
    cases = []
    for name, messages, tools, add_generation_prompt, kwargs in CASES:
        source = (HERE / "template" / f"{name}.jinja").read_text()
        case = {
            "template": name,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "kwargs": kwargs,
        }
        try:
            case["rendered"] = env.from_string(source).render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **SPECIAL,
                **kwargs,
            )
        except jinja2.exceptions.TemplateError as error:
            case["raised"] = str(error)
        cases.append(case)
    write("template_case.json", cases)


CORPUS = [
    "The quick brown parrot flies over the lazy dog.",
    "A flock of parrots sat in the tree, and the tree was full of noise!",
    "Numbers 1 2 3 10 2026, punctuation; (brackets) [more] {braces} \"quotes\" 'single'.",
    "def fly(height):\n    return height + 1\n\n\tindented\n",
    "Zürich, naïve café, Ångström, ελληνικά, русский, 日本語, 한국어.",
]
TEXTS = [
    "The parrot flies.",
    " leading and trailing ",
    "two  spaces\n\n\nthree lines\ttab",
    "🦜🦜🏽‍♂️ family 👨‍👩‍👧‍👦 flags 🇨🇭 done",
    "日本語のテキスト and ελληνικά русский",
    "café naïve ﬁ e\u0301 \u00a0 \u200b",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    "▁ metaspace itself",
]
SPECIALS = ["<|im_start|>", "<|im_end|>"]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False, special=False), AddedToken("añadido ok", special=False)])
    return tokenizer


def byte_fallback():
    """Like Llama 2: spaces become ▁, each text begins with one, and unknown characters become byte tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS[:4], trainer)
    # Byte tokens are ordinary entries of the vocabulary.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    state["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def metaspace():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def make_tokenizers():
    for name, make in [("byte_level", byte_level), ("byte_fallback", byte_fallback), ("metaspace", metaspace)]:
        tokenizer = make()
        (HERE / f"{name}_tokenizer.json").write_text(tokenizer.to_str() + "\n")
        cases = []
        for text in TEXTS:
            ids = tokenizer.encode(text).ids
            bare_ids = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append(
                {
                    "text": text,
                    "ids": ids,
                    "bare_ids": bare_ids,
                    "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                    "decoded_with_special": tokenizer.decode(ids, skip_special_tokens=False),
                }
            )
        write(f"{name}_case.json", cases)


def write(name, value):
    (HERE / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


make_template_cases()
make_tokenizers()
