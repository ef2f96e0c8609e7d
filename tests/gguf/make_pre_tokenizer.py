#!/usr/bin/env python3
"""Make pre_tokenizer.json: how llama.cpp splits texts, for each name of a pre-tokenizer.

    .venv/bin/python tests/gguf/make_pre_tokenizer.py LLAMA_CPP    # llama.cpp's source; needs a C++ compiler

The expressions, and the settings that come with a name, are read from src/llama-vocab.cpp, and src/unicode.cpp
splits the texts by them. Names that share all of this are one entry. An entry has, for each text, the lengths of
its pieces in bytes. The committed file was made with commit 0c1e57098, which the sdist of llama-cpp-python 0.3.36
contains.
"""

import ast
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
# Names that are left out, for one of these reasons: their splitters are code instead of expressions, their tokens are
# not spelled by bytes, they add a token at the end, no family here has them, or llama.cpp does not tell small letters
# from capitals where the published expression does (cohere2moe, tiny_aya, youtu).
LEFT_OUT = {
    "afmoe",
    "chameleon",
    "cohere2moe",
    "deepseek-llm",
    "gemma4",
    "granite-embed-multi-311m",
    "jina-v1-en",
    "jina-v2-code",
    "kimi-k2",
    "roberta-bpe",
    "sarvam-moe",
    "tiny_aya",
    "whitespace",
    "youtu",
}
# Texts that llama.cpp may split otherwise than the expression. It takes all letters beyond ASCII as both upper and
# lower case, takes no mark as a letter, and replaces spaces beyond ASCII before it looks for ranges of characters.
CASES = re.compile(r"[^\x00-\x7f]")
SPACES = re.compile(r"[\u2000-\u3000]")
UNSURE = {"tekken": CASES, "gpt-4o": CASES, "granite-embed-multi-97m": CASES, "deepseek-coder": SPACES}

FIXED = [
    "The people could write many words about water.",
    " and  then,   they've\n\n\nmade 12345 more!?\t(it's THEIRS)\r\n",
    "He'll SAY 'twas I'D'VE we're WE'LL don't 'S x's",
    "1 22 333 4444 55555 666666 7777777 1,234,567.89 0x1F a1b2 v2.0 3rd",
    "camelCase HTTPServer XMLHttpRequest snake_case kebab-case SCREAMING_CASE a.b.c iPhone",
    "fn main() {\n    let x = vec![1, 2];\n\tprintln!(\"{:?}\", x); // ok\n}\n\n\n",
    "https://example.com/a/b?c=d&e=%20f#g//h mail@example.org C:\\dir\\file /* */ <a href='x'>y</a>",
    "    four  two one\n  \n \n\ttab\t\ttabs \r\n\r\n end  ",
    "\n", " ", "  ", "\t\t\t", "\r\n\r\n", "a", "7", "!", " a", "  a", "\na", "a\n", "a \n b", "...\n\n...", "?!\r\n x",
    "$5+3=8 <tag> ~x~ `code` a|b ^c^ {d} [e] (f) \"g\" «h» “i” ‘j’ k’s — l – m…",
    "日本語のテキスト、東京タワー。 中文字符，你好！ 한국어 텍스트입니다 ㄅㄆㄇ ｶﾀｶﾅ 、〜！？",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم ۔ ، नमस्ते दुनिया। ไทย ქართული",
    "naïve Ünïcødé Straße İstanbul ǅ ŉ ﬁ ª º x² ½ Ⅷ ٣٤٥ १२३ ①",
    "e\u0301te\u0301 n\u0303 \u0301x क\u093f त\u094d",
    "🦊👩‍👩‍👧 👍🏽!! 🇫🇮 ☃ ♥ ✓ → ∑ © ™ €20 £3 ¥4 1€",
    "a\u00a0b \u00a0 c\u2003d\u3000e \u2028f\u200bg",
    "emails' don'T o'clock rock'n'roll ''s 'sx 're' 'LL",
    "12 345 6789 and 1234567890123 or 000",
    "word123word 123word word123 _under_ __init__ --flag=-1 #hash @at",
    "x" * 40 + " " * 40 + "y" + " " * 9 + "\n" * 5 + "z" + "9" * 13,
]  # fmt: skip
# What random texts are made of.
PARTS = [
    *"aZq09.,!?'\"-_/\\(){}[]<>|=+*&^%$#@~`:;",
    *[" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n"],
    *["the", "The", "THE", "ing", "'s", "'LL", "'re", "12", "345", "6789", "x1"],
    *["é", "Ж", "ß", "日本", "語", "あ", "カ", "한", "ا", "—", "…", "。", "，", "€", "½", "🦊", "\u00a0"],
]

PROGRAM = r"""
#include "unicode.h"
#include <iostream>
int main() {
    auto read = [] {
        size_t size = 0;
        std::cin >> size;
        std::cin.get();
        std::string bytes(size, 0);
        std::cin.read(&bytes[0], size);
        return bytes;
    };
    size_t count = 0;
    std::cin >> count;
    std::vector<std::string> expressions;
    while (count-- > 0) expressions.push_back(read());
    std::cin >> count;
    while (count-- > 0) {
        for (const auto & piece : unicode_regex_split(read(), expressions, false)) std::cout << piece.size() << ' ';
        std::cout << std::endl;
    }
}
"""


def texts():
    generator = random.Random(7)
    made = ["".join(generator.choice(PARTS) for _ in range(generator.randint(5, 40))) for _ in range(60)]
    return FIXED + made


def read_names(source):
    """The kind of each name, and whether it ignores merges and adds a BOS token."""
    code = source[source.index('tokenizer_pre == "default"') : source.index("unknown pre-tokenizer type")]
    names = {}
    for branch in re.split(r"\}\s*else if", code):
        kind = re.search(r"pre_type = LLAMA_VOCAB_PRE_TYPE_(\w+)", branch)
        for name in re.findall(r'tokenizer_pre == "([^"]+)"', branch):
            names[name] = (kind[1], "ignore_merges = true" in branch, "add_bos = true" in branch)
    return names


def read_expressions(source):
    """The expressions of each kind."""
    code = source[source.index("switch (vocab.get_pre_type())") : source.index("std::vector<std::string> regex_exprs;")]
    code = "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("//"))
    found = {}
    for part in code.split("break;"):
        expressions = re.search(r"regex_exprs = \{(.*?)\n\s*\};", part, re.S)
        if not expressions:
            continue
        literals = re.findall(r'"(?:[^"\\]|\\.)*"', re.sub(r'",\s*//[^\n]*', '",', expressions[1]))
        expressions = [ast.literal_eval(literal) for literal in literals]
        for kind in re.findall(r"case LLAMA_VOCAB_PRE_TYPE_(\w+):", part) or ["DEFAULT"]:
            found[kind] = expressions
    return found


def split(program, expressions, texts):
    def counted(strings):
        encoded = [string.encode() for string in strings]
        return b"%d\n" % len(encoded) + b"".join(b"%d\n%s" % (len(one), one) for one in encoded)

    data = counted(expressions) + b"\n" + counted(texts)
    lines = subprocess.run([program], input=data, stdout=subprocess.PIPE, check=True).stdout.decode().splitlines()
    assert len(lines) == len(texts)
    # Expressions that match nothing, such as that of superbpe, make empty pieces.
    return [[int(size) for size in line.split() if size != "0"] for line in lines]


def main():
    folder = Path(sys.argv[1]) / "src"
    source = (folder / "llama-vocab.cpp").read_text()
    expressions = read_expressions(source)
    entries = {}
    for name, (kind, *settings) in read_names(source).items():
        if name not in LEFT_OUT:
            entries.setdefault((tuple(expressions.get(kind, expressions["DEFAULT"])), *settings), []).append(name)
    all_texts = texts()
    made = []
    with tempfile.TemporaryDirectory() as temporary:
        program = Path(temporary) / "split"
        (Path(temporary) / "split.cpp").write_text(PROGRAM)
        files = [f"{temporary}/split.cpp", folder / "unicode.cpp", folder / "unicode-data.cpp"]
        subprocess.run(["g++", "-O1", "-std=c++17", f"-I{folder}", "-o", program, *files], check=True)
        for (of_entry, ignores_merges, adds_bos), names in entries.items():
            pieces = split(program, of_entry, all_texts)
            for unsure in (UNSURE[name] for name in names if name in UNSURE):
                pieces = [None if unsure.search(text) else sizes for text, sizes in zip(all_texts, pieces, strict=True)]
            made.append({"names": names, "ignores_merges": ignores_merges, "adds_bos": adds_bos, "pieces": pieces})
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in made)
    texts_json = json.dumps(all_texts, ensure_ascii=False)
    (HERE / "pre_tokenizer.json").write_text(f'{{"texts": {texts_json},\n"entries": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
