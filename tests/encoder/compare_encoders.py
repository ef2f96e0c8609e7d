#!/usr/bin/env python3
"""Compare encoders of random shapes, served over HTTP, with Transformers and sentence-transformers.

    .venv/bin/pip install -r tests/encoder/requirements.txt
    .venv/bin/python tests/encoder/compare_encoders.py target/debug/corella [--family NAME …] [--seeds 0 20]

Each seed gives a shape of a family and what the model is for: vectors of texts, scores of pairs or classes. Weights are
random. Corella serves the folder in f32 on an instruction set and with a number of tokens per step that the seed
chooses, too. Each number may differ by TOLERANCE of the largest one.
"""

import json
import sys
import tempfile
from pathlib import Path

import make_encoder
import numpy as np
import torch
import transformers
from make_encoder import CORPUS, MAX_LEN, VOCAB_SIZE
from sentence_transformers import CrossEncoder, SentenceTransformer

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))
from random_shape import Draw  # noqa: E402
from served_model import read_arguments, run, serving  # noqa: E402

TOLERANCE = 1e-4
NUM_TEXTS = 6
# A word is at most a few tokens, and two texts fit into the context.
MAX_WORDS = 16
WORDS = " ".join(CORPUS).split()


def encoder(draw):
    """Returns the settings that all families share."""
    num_heads = draw.size(1, 6)
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 2 * num_heads * draw.choice(1, 3, 4, 8, 16),
        "num_hidden_layers": draw.size(1, 5),
        "num_attention_heads": num_heads,
        "intermediate_size": draw.size(4, 80),
        "max_position_embeddings": MAX_LEN,
    }


def bert(draw):
    activation = draw.choice("gelu", "gelu", "gelu_new", "silu")
    return encoder(draw) | {"layer_norm_eps": draw.choice(1e-12, 1e-5, 1e-3), "hidden_act": activation}


def roberta(draw):
    # The first two positions belong to padding.
    own = {"max_position_embeddings": MAX_LEN + 2, "type_vocab_size": 1}
    return bert(draw) | own | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def modern_bert(draw):
    settings = encoder(draw)
    num_layers = settings["num_hidden_layers"]
    kinds = {"layer_types": draw.types(num_layers, "sliding_attention", "full_attention")}
    rotaries = {
        kind: {"rope_type": "default", "rope_theta": draw.choice(1e3, 1e4, 1.6e5)}
        for kind in ("sliding_attention", "full_attention")
    }
    return (
        settings
        | draw.choice(kinds, {"global_attn_every_n_layers": draw.size(1, 4)})
        | {name: draw.flag() for name in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")}
        | {name: draw.choice("gelu", "silu") for name in ("hidden_activation", "classifier_activation")}
        | {
            "local_attention": 2 * draw.size(1, 40),
            "norm_eps": draw.choice(1e-5, 1e-3),
            "classifier_pooling": draw.choice("cls", "mean"),
            "rope_parameters": rotaries,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "cls_token_id": 2,
            "sep_token_id": 3,
        }
    )


def nomic_bert(draw):
    settings = bert(draw) | {"hidden_act": draw.choice("silu", "gelu")}
    return settings | {"rope_parameters": {"rope_type": "default", "rope_theta": draw.choice(1e3, 1e4)}}


# For each family: the beginning of its classes' names, the function that draws settings, and the kind of tokenizer.
FAMILIES = {
    "bert": ("Bert", bert, "bert"),
    "roberta": ("Roberta", roberta, "roberta"),
    "xlm-roberta": ("XLMRoberta", roberta, "xlm-roberta"),
    "modernbert": ("ModernBert", modern_bert, "modernbert"),
    "nomic-bert": ("NomicBert", nomic_bert, "bert"),
}


def drawn_texts(draw):
    return [" ".join(draw.types(draw.size(1, MAX_WORDS), *WORDS)) for _ in range(NUM_TEXTS)]


def vectors(folder, parts, draw):
    """Writes a model of vectors. Returns the vectors, the request for them, and the function that reads the answer."""
    make, tokenizer = parts
    pooling = [draw.choice("mean", "cls", "max"), *draw.choice([], ["dense"]), *draw.choice([], ["normalise"])]
    make_encoder.save_sentence_model(folder, make("Model"), tokenizer, pooling)
    texts = drawn_texts(draw)
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    request = ("/v1/embeddings", {"input": texts})
    return expected, request, lambda answer: [one["embedding"] for one in answer["data"]]


def scores(folder, parts, draw):
    make, tokenizer = parts
    activation = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0.0"}
    options = draw.choice({}, {"sentence_transformers": activation})
    make("ForSequenceClassification", num_labels=1, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    firsts, seconds = drawn_texts(draw), drawn_texts(draw)
    expected = CrossEncoder(str(folder), device="cpu").predict(list(zip(firsts, seconds, strict=True)))
    request = ("/score", {"text_1": firsts, "text_2": seconds})
    return expected, request, lambda answer: [one["score"] for one in answer["data"]]


def classes(folder, parts, draw):
    make, tokenizer = parts
    is_multi = draw.flag()
    options = {"problem_type": "multi_label_classification"} if is_multi else {}
    model = make("ForSequenceClassification", num_labels=draw.size(2, 5), **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    texts = drawn_texts(draw)
    with torch.inference_mode():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    expected = torch.sigmoid(logits) if is_multi else torch.softmax(logits, -1)
    request = ("/classify", {"input": texts})
    return expected.numpy(), request, lambda answer: [one["probs"] for one in answer["data"]]


def compare(args, family, seed):
    """Returns the number of compared texts, the largest difference, and whether it is allowed."""
    draw = Draw(np.random.default_rng(seed))
    name, settings_of, tokenizer_kind = FAMILIES[family]
    settings = settings_of(draw)

    def make(suffix, **options):
        config = getattr(transformers, f"{name}Config")(**settings, **options)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{name}{suffix}")(config).eval()
        make_encoder.random_weights(model, seed)
        return model

    # Corella has no classifiers of NomicBERT.
    task = vectors if family == "nomic-bert" else draw.choice(vectors, scores, classes)
    options = ["--dtype", "f32", "--isa", draw.choice(*args.isa)]
    options += ["--max-num-batched-tokens", str(draw.choice(16, 64, 512))]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / family
        folder.mkdir()
        parts = make, make_encoder.made_tokenizer(tokenizer_kind)
        expected, (path, body), read = task(folder, parts, draw)
        with serving(args.binary, folder, options) as post:
            found = np.array(read(post(path, body)))
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    is_right = difference <= TOLERANCE
    words = f"{'same' if is_right else 'OTHER'}, {difference:.1e}, {task.__name__}, {' '.join(options)}"
    print(f"{family}, seed {seed}: {words}", flush=True)
    if not is_right:
        print(json.dumps(settings), flush=True)
    return len(expected), difference, is_right


def main():
    args = read_arguments(__doc__.splitlines()[0], FAMILIES)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    run(args, compare, "texts")


if __name__ == "__main__":
    main()
