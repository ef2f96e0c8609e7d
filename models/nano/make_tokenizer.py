"""Trains the byte-level BPE of corella-nano on its own corpus and writes the tokenizer files."""

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import dialogue, plain_text

HERE = Path(__file__).parent
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 2048

# Qwen's idea with two changes. A capitalised word never takes the space before it, and
# neither do digits: a name is then the same tokens after a space, a quote or a bracket, so
# copying it is copying. The space that a sentence mark brings along costs no token of its own.
SPLIT = (r"'(?:[sdmt]|ll|ve|re)(?!\p{L})"
         r"|[.,!?:;]+ (?=\p{Lu})"
         r"|\p{Lu}[\p{Ll}\p{Lo}\p{Lm}\p{M}]*"
         r"| ?[\p{Ll}\p{Lo}\p{Lm}\p{Lt}\p{M}]+"
         r"|\p{N}"
         r"| ?[^\s\p{L}\p{N}\p{M}]+"
         r"|\s+(?= \p{Ll})|\s+")

TEMPLATE = ("{% for message in messages %}"
            "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
            "{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def texts(seed, count):
    rng = random.Random(f"tokenizer-{seed}")
    for _ in range(count):
        if rng.random() < 0.03:
            yield plain_text(rng)
        for role, text in dialogue(rng):
            yield text
    for role in ("system\n", "user\n", "assistant\n"):
        yield from [role] * (count // 5)


def main(seed=0, count=25_000):
    tok = Tokenizer(models.BPE(unk_token=None))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts(seed, count), trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    assert tok.get_vocab_size() == VOCAB, tok.get_vocab_size()
    tok.save(str(HERE / "tokenizer.json"))
    (HERE / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": TEMPLATE,
    }, indent=2) + "\n")


if __name__ == "__main__":
    main()
