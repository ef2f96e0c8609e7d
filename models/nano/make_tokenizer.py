"""Trains the byte-level BPE of corella-nano on its own corpus and writes the tokenizer files."""

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import dialogue, plain_text

HERE = Path(__file__).parent
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 2048

# A word that can be copied has one spelling in tokens, wherever it stands: in a sentence, after a
# quote, in JSON. So no word takes a space along but these, which nobody copies; they and the
# sentence marks take the spaces on both sides.
SMALL = """a about all an and are as at be but by called can could do does for from give had has have he her him his how i if
in into is it its know like list make me my named need not of on one or out please put she so some such tell text that the their
them then there these they this to up use using want was we were what when where which who will with word words would write you
your""".split()
SPLIT = (r"'(?:[sdmt]|ll|ve|re)(?!\p{L}) ?"
         r"| ?(?:" + "|".join(sorted(SMALL, key=len, reverse=True)) + r")(?![\p{L}\p{M}']) ?"
         r"|\p{Lu}[\p{Ll}\p{Lo}\p{Lm}\p{M}]*"
         r"|[\p{Ll}\p{Lo}\p{Lm}\p{Lt}\p{M}]+"
         r"|\p{N}"
         r"| ?[^\s\p{L}\p{N}\p{M}]+(?: \"|[ \n])?"
         r"|\s")

# Without tools it writes what the model was trained on. Tools are written as in Hermes, which the model has not seen:
# it calls one where a grammar holds it to that.
TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ 'You can call these tools:\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}"
    "{{ '</tools>\\nCall one like this:\\n<tool_call>\\n{\"name\": NAME, \"arguments\": OBJECT}\\n</tool_call><|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    # The system message is part of the message with the tools.
    "{% if tools and loop.first and message['role'] == 'system' %}"
    "{% elif message['role'] == 'tool' %}"
    # Results that follow each other are one turn.
    "{% if loop.first or loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


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
