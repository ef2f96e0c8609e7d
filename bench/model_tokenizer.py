"""A byte-level BPE tokenizer in the style of a model family, trained on the standard library of Python."""

import json
import sysconfig
from pathlib import Path

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"qwen": r"\p{N}", "llama": r"\p{N}{1,3}"}
MAX_MERGED_VOCAB = 24_000
TEXT_BYTES = 12 << 20

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
LLAMA_CHAT = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] + '<|eot_id|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)
PLAIN_CHAT = (
    "{%- for message in messages -%}{{- message['role'] + ': ' + message['content'] + '\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
)


def tokenizer_config(family, context):
    common = {"model_max_length": context, "clean_up_tokenization_spaces": False}
    if family == "qwen":
        return common | {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "chat_template": CHATML,
        }
    if family == "llama":
        return common | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "chat_template": LLAMA_CHAT,
        }
    return common | {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
        "chat_template": PLAIN_CHAT,
    }


def training_text():
    left = TEXT_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py")
    ):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        left -= len(text)
        if left <= 0:
            return


def write_tokenizer(path, family, vocab_size, specials):
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    byte_level = processors.ByteLevel(trim_offsets=False)
    if family == "gpt2":
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        words = Regex(WORDS.replace("DIGITS", DIGITS[family]))
        splitter = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = splitter
    trained.train_from_iterator(
        training_text(),
        trainers.BpeTrainer(
            vocab_size=min(MAX_MERGED_VOCAB, min(specials.values())),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in state["merges"]]

    # The rest of the vocabulary are tokens that text never produces. A random model draws them all
    # the time, and they decode to their own names.
    vocab = state["vocab"] | specials
    used = set(vocab.values())
    vocab |= {f"<|unused_{i}|>": i for i in range(vocab_size) if i not in used}
    assert sorted(vocab.values()) == list(range(vocab_size)), "token ids have gaps or overlap"

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=family == "llama"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = byte_level
    if family == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    if family == "llama":
        bos = "<|begin_of_text|>"
        tokenizer.post_processor = processors.Sequence(
            [
                byte_level,
                processors.TemplateProcessing(
                    single=f"{bos} $A",
                    pair=f"{bos} $A {bos}:1 $B:1",
                    special_tokens=[(bos, specials[bos])],
                ),
            ]
        )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    assert tokenizer.get_vocab_size() == vocab_size
    tokenizer.save(str(path))
