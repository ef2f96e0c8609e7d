#!/usr/bin/env python3
"""Make the golden encoders: tiny random models in folders as sentence-transformers writes them, with what
Transformers and sentence-transformers compute from them.

    python -m venv .venv && .venv/bin/pip install -r tests/encoder/requirements.txt
    .venv/bin/python tests/encoder/make_encoder.py [NAME …]

A folder has the model's own files and tokenizer.json. Beside them,

* hidden.f32 has the hidden states of the prompts one after another, `[prompt][token][hidden_size]`;
* golden.json has the prompts as token ids, with the place where a second text begins if there is one, and,
  by the kind of the model, texts with their vectors (`vectors`, by the name of the prompt), or pairs with
  their scores and texts with their probabilities.

All is computed in f32 on the CPU from the very folder that is committed. All weights are random, also those of norms
and biases, so that a test fails if one is left out.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
# Lengths around the sizes of tiles and blocks, and beyond the windows.
PROMPT_LENGTHS = (1, 2, 17, 31, 64, 65, 130)
# The last prompt is longer than the 256 tokens that attention through matrix tiles takes at a time.
WIDE_PROMPT_LENGTHS = (1, 17, 33, 65, 270)
VOCAB_SIZE = 320
MAX_LEN = 160

CORPUS = [
    "The quick fox runs over the lazy dog and sleeps beside the old lantern.",
    "A keeper lights the lantern every evening, when ships come home from the sea.",
    "Foxes have cubs in spring; dogs have puppies at any time of the year.",
    "Numbers such as 12, 345 and 6789 are words, too. So is naïve, or Straße.",
    "Who reads this text? Nobody but a tokenizer, which learns pieces of words.",
]
TEXTS = [
    "the fox",
    "A keeper lights the lantern.",
    "Foxes have cubs in spring; dogs have puppies at any time of the year. " * 2,
    "naïve Straße, 12 ships?",
]
PAIRS = [
    ("the fox", "Foxes have cubs in spring."),
    ("the fox", "A keeper lights the lantern every evening."),
    ("Who reads this text?", "Nobody but a tokenizer, " * 4),
]

BERT = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=40,
    max_position_embeddings=MAX_LEN,
    layer_norm_eps=1e-6,
)
ROBERTA = BERT | dict(
    # The first two positions belong to padding.
    max_position_embeddings=MAX_LEN + 2,
    type_vocab_size=1,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
)
MODERN = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=MAX_LEN,
    local_attention=24,
    global_attn_every_n_layers=3,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=3,
    cls_token_id=2,
    sep_token_id=3,
)
NOMIC = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=40,
    max_position_embeddings=MAX_LEN,
    layer_norm_eps=1e-6,
)

T = transformers
PROMPTS = {"query": "Who reads: ", "document": ""}


def one_label(**more):
    return dict(num_labels=1) | more


def labels(*names, **more):
    return dict(id2label=dict(enumerate(names))) | more


# The class, its configuration, the kind of tokenizer, and the steps that turn hidden states into vectors or scores.
MODELS = {
    "bert-mean": (T.BertModel, T.BertConfig(**BERT), "bert", ["mean", "dense", "normalise"]),
    "bert-cls": (
        T.BertModel,
        T.BertConfig(**BERT | dict(hidden_size=64, num_hidden_layers=2, hidden_act="gelu_new")),
        "bert",
        ["cls", "normalise"],
    ),
    "bert-max": (T.BertModel, T.BertConfig(**BERT), "bert", ["max"]),
    "bert-pair": (
        T.BertForSequenceClassification,
        T.BertConfig(**BERT, **one_label()),
        "bert",
        [],
    ),
    "bert-classes": (
        T.BertForSequenceClassification,
        T.BertConfig(**BERT, **labels("calm", "glad", "sad")),
        "bert",
        [],
    ),
    "xlm-roberta-cls": (
        T.XLMRobertaModel,
        T.XLMRobertaConfig(**ROBERTA),
        "xlm-roberta",
        ["cls", "normalise"],
    ),
    "xlm-roberta-pair": (
        T.XLMRobertaForSequenceClassification,
        T.XLMRobertaConfig(**ROBERTA, **one_label(sentence_transformers={
            "activation_fn": "torch.nn.modules.linear.Identity",
            "version": "5.0.0",
        })),
        "xlm-roberta",
        [],
    ),
    "roberta-classes": (
        T.RobertaForSequenceClassification,
        T.RobertaConfig(**ROBERTA, **labels("off", "on", problem_type="multi_label_classification")),
        "roberta",
        [],
    ),
    "modernbert-mean": (T.ModernBertModel, T.ModernBertConfig(**MODERN), "modernbert", ["mean"]),
    "modernbert-pair": (
        T.ModernBertForSequenceClassification,
        T.ModernBertConfig(
            **MODERN | dict(attention_bias=True, mlp_bias=True, norm_bias=True),
            classifier_pooling="mean",
            classifier_bias=True,
            **one_label(),
        ),
        "modernbert",
        [],
    ),
    "nomic-bert-mean": (
        T.NomicBertModel,
        T.NomicBertConfig(**NOMIC),
        "bert",
        ["mean", "normalise"],
    ),
    # A decoder that answers `yes` or `no`.
    "qwen3-pair": (
        T.Qwen3ForCausalLM,
        T.Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=40,
            max_position_embeddings=MAX_LEN,
            tie_word_embeddings=True,
        ),
        "roberta",
        ["logit"],
    ),
    # Heads fit matrix tiles. One layer sees all positions, the other 12 on each side.
    "modernbert-wide": (
        T.ModernBertModel,
        T.ModernBertConfig(
            **MODERN
            | dict(
                hidden_size=64,
                num_hidden_layers=2,
                global_attn_every_n_layers=2,
                max_position_embeddings=WIDE_PROMPT_LENGTHS[-1],
            )
        ),
        "modernbert",
        ["mean"],
    ),
}

RERANK_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=special)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def made_tokenizer(kind):
    if kind in ("bert", "modernbert"):
        tokenizer = word_piece()
        second = 1 if kind == "bert" else 0
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair=f"[CLS]:0 $A:0 [SEP]:0 $B:{second} [SEP]:{second}",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
        names = dict(pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]")
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        if kind == "xlm-roberta":
            tokenizer = Tokenizer(models.Unigram())
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.decoder = decoders.Metaspace()
            trainer = trainers.UnigramTrainer(
                vocab_size=VOCAB_SIZE, special_tokens=special, unk_token="<unk>"
            )
        else:
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=VOCAB_SIZE,
                special_tokens=special,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            )
        tokenizer.train_from_iterator(CORPUS, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> </s> $B </s>",
            special_tokens=[("<s>", 0), ("</s>", 2)],
        )
        names = dict(pad="<pad>", unk="<unk>", cls="<s>", sep="</s>", mask="<mask>")
    names = {f"{name}_token": token for name, token in names.items()}
    inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * (kind == "bert")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_LEN, model_input_names=inputs, **names
    )


def random_weights(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
            weight.data = 1 + 0.2 * noise
        elif weight.dim() == 1:
            weight.data = 0.2 * noise
        elif "embeddings" in name:
            weight.data = noise
        else:
            weight.data = noise / weight.shape[1] ** 0.5 * 1.5


def save_sentence_model(folder, model, tokenizer, parts):
    bare = folder / "bare"
    model.save_pretrained(bare)
    tokenizer.save_pretrained(bare)
    modules = [Transformer(str(bare))]
    size = model.config.hidden_size
    for part in parts:
        if part == "dense":
            dense = Dense(in_features=size, out_features=20)
            random_weights(dense, 7)
            modules.append(dense)
        elif part == "normalise":
            modules.append(Normalize())
        else:
            modules.append(Pooling(size, pooling_mode=part))
    SentenceTransformer(modules=modules, prompts=PROMPTS).save(str(folder), create_model_card=False)
    shutil.rmtree(bare)


def save_reranker(folder, model, tokenizer):
    bare = folder / "bare"
    model.save_pretrained(bare)
    tokenizer.chat_template = RERANK_TEMPLATE
    tokenizer.save_pretrained(bare)
    template = {"chat_template": {"add_generation_prompt": True}}
    transformer = Transformer(
        str(bare), transformer_task="text-generation", processing_kwargs=template
    )
    encoder = CrossEncoder(
        modules=[transformer, LogitScore(true_token_id=40, false_token_id=41)],
        prompts={"query": "Does it fit?"},
        default_prompt_name="query",
        activation_fn=torch.nn.Identity(),
    )
    encoder.save_pretrained(str(folder), create_model_card=False)
    shutil.rmtree(bare)


def prompts_of(folder, model, tokenizer, lengths):
    """Returns prompts of random tokens and one of a pair of texts, and writes their hidden states."""
    random = np.random.default_rng(5)
    body = getattr(model, model.base_model_prefix, model)
    cases, states = [], []
    for length in lengths:
        ids = random.integers(5, VOCAB_SIZE - 20, length)
        cases.append(dict(tokens=[int(id) for id in ids], second_text=None))
    pair = tokenizer(*PAIRS[2])
    types = pair.get("token_type_ids")
    cases.append(dict(tokens=pair["input_ids"], second_text=types.index(1) if types else None))
    for case in cases:
        inputs = dict(input_ids=torch.tensor([case["tokens"]]))
        if "token_type_ids" in tokenizer.model_input_names and case["second_text"]:
            second = case["second_text"]
            kinds = [int(at >= second) for at in range(len(case["tokens"]))]
            inputs["token_type_ids"] = torch.tensor([kinds])
        with torch.no_grad():
            states.append(body(**inputs).last_hidden_state[0].numpy().astype("<f4"))
    np.concatenate(states).tofile(folder / "hidden.f32")
    return cases


def make(name, seed):
    kind, config, tokenizer_kind, parts = MODELS[name]
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config._attn_implementation = "eager"
    tokenizer = made_tokenizer(tokenizer_kind)
    model = kind(config).eval()
    random_weights(model, seed)
    is_decoder = parts == ["logit"]
    is_sentence = bool(parts) and not is_decoder
    if is_decoder:
        save_reranker(folder, model, tokenizer)
    elif is_sentence:
        save_sentence_model(folder, model, tokenizer, parts)
    else:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    lengths = WIDE_PROMPT_LENGTHS if name.endswith("wide") else PROMPT_LENGTHS
    golden = {} if is_decoder else dict(prompts=prompts_of(folder, model, tokenizer, lengths))
    if is_sentence:
        sentence = SentenceTransformer(str(folder), device="cpu")
        golden["texts"] = TEXTS
        golden["vectors"] = {
            prompt or "": sentence.encode(TEXTS, prompt_name=prompt).tolist()
            for prompt in (None, "query")
        }
    elif is_decoder or config.num_labels == 1:
        golden["pairs"] = PAIRS
        golden["scores"] = CrossEncoder(str(folder), device="cpu").predict(PAIRS).tolist()
    else:
        golden["texts"] = TEXTS
        with torch.no_grad():
            logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
        is_multi = config.problem_type == "multi_label_classification"
        weigh = torch.sigmoid if is_multi else (lambda row: torch.softmax(row, dim=-1))
        golden["probabilities"] = [weigh(row).tolist() for row in logits]
    (folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")
    for unneeded in ("README.md", "special_tokens_map.json"):
        (folder / unneeded).unlink(missing_ok=True)
    print(name, sum(file.stat().st_size for file in folder.rglob("*")) // 1000, "KB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names or list(MODELS)
    for index, name in enumerate(MODELS):
        if name in names:
            make(name, 100 + index)


if __name__ == "__main__":
    main()
