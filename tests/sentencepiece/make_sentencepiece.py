"""Makes SentencePiece models and the ids that the Python package gives texts, for tests of folders without
tokenizer.json.

    python3 -m venv .venv && .venv/bin/pip install -r tests/sentencepiece/requirements.txt
    .venv/bin/python tests/sentencepiece/make_sentencepiece.py

Each folder has an empty config.json, a tokenizer.model that is trained on the licence and the sentences below, and
golden.json: texts with their ids, and the text that the ids stand for.
"""

import json
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent
LICENCE = HERE.parent.parent / "LICENSE"

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, 12 times in 1987.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Où est l'élève naïf qui a bu un café à côté de l'île ?",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "いろはにほへと ちりぬるを わかよたれそ つねならむ",
    "天地玄黄 宇宙洪荒 日月盈昃 辰宿列张",
    "מה שלומך היום? العربية لغة جميلة",
    "def f(x):\n    return x ** 2 + 3.14  # a comment",
]

TEXTS = SENTENCES + [
    "",
    " ",
    "   ",
    "a",
    " a",
    "a ",
    "  two  spaces   and    more  ",
    "tab\there, line\nthere, both\t\n\r\n end",
    "\n",
    "\n\nparagraph\n\n",
    "no-break\u00a0space, zero\u200bwidth, em\u2003space, ideographic\u3000space",
    "\u0001\u0002 control \u001b[31m and \u007f \u0085 next",
    "😀 👩‍👩‍👧 🇩🇪 👍🏽 ✈️",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 and 𐍈𐌰",
    "e\u0301 is not é; n\u0303 is not ñ",
    "ﬁ ligature, ½ half, Ⅷ eight, ＦＵＬＬ ｗｉｄｔｈ, ｶﾅ",
    "한국어 문장입니다.",
    "▁ is the mark ▁▁ of spaces",
    "\ufeff a mark, \ufffd a replacement, \ue000 private",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "license licenses Licensed LICENSEE unlicensable",
    "1234567890 3.14159 1e-5 0x7F",
    "http://www.apache.org/licenses/LICENSE-2.0",
]

COMMON = {"vocab_size": 600, "character_coverage": 0.995, "num_threads": 1, "minloglevel": 2}
# The settings of Llama and Mistral.
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}

MODELS = {
    "bpe": {"model_type": "bpe", "split_digits": True, "allow_whitespace_only_pieces": True} | PLAIN,
    # Like Gemma's model.
    "bpe-bare": {"model_type": "bpe", "add_dummy_prefix": False} | PLAIN,
    "unigram": {"model_type": "unigram"} | PLAIN,
    # The trainer's defaults.
    "unigram-nfkc": {"model_type": "unigram"},
}


def make(name, options):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    lines = LICENCE.read_text().splitlines() + SENTENCES * 3
    with open(folder / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, **COMMON, **options
        )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    (folder / "config.json").write_text("{}\n")
    cases = [{"text": text, "ids": model.encode(text), "decoded": model.decode(model.encode(text))} for text in TEXTS]
    golden = {"pieces": [model.id_to_piece(id) for id in range(len(model))], "cases": cases}
    (folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=True) + "\n")


for name, options in MODELS.items():
    make(name, options)
