"""Compares Corella's embeddings with those of sentence-transformers on torch and of OpenVINO, by turns: their speed,
and whether vectors agree.

    python bench/encoders.py target/release/corella [--rounds 5] [--json encoders.json]

The Python that runs it needs the packages of tests/encoder/requirements.txt; openvino and nncf are skipped if missing.
The model has the shape of BERT-base with random weights in f32. It is made once, in --model.

Each run embeds 32 texts of 128 tokens: one request to /v1/embeddings, or one call of `encode`; with OpenVINO, the model
converted from torch, with the same tokenizer before it and the same mean after it. Each program has a thread for each
core, and each number format is a process of its own that waits while the others run. Every round has other texts, and
the first one is a warm-up. On a machine shared with other programs, processor seconds with --threads 1 say more than
times.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy

from node_process import NodeProcess

DEFAULT_MODEL = Path(__file__).parent / "models/bert-base"
NUM_WORDS = 30_000
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SEED = 41
CORELLA, TORCH, OPENVINO = "Corella", "torch", "OpenVINO"
# The program's name, with the number format of its products.
PEERS = (
    (CORELLA, "f32"),
    (TORCH, "f32"),
    (OPENVINO, "f32"),
    (CORELLA, "bf16"),
    (TORCH, "bf16"),
    (OPENVINO, "bf16"),
    (CORELLA, "int8"),
    (OPENVINO, "int8"),
)
# The largest difference of an element between vectors of length 1 that are computed in f32.
TOLERANCE = 1e-4
NUM_CALIBRATION_TEXTS = 8


# ---- the model and its texts


def words():
    return [f"w{at:05}" for at in range(NUM_WORDS)]


def make_text(num_tokens, rng):
    """Returns a text of this many tokens, including the special tokens at both ends."""
    return " ".join(rng.choices(WORDS, k=num_tokens - 2))


WORDS = words()


def make_model(folder):
    """Saves a model of random weights in sentence-transformers' format."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{token.strip('[]').lower()}_token": token for token in SPECIAL},
    )
    # The defaults are the shape of BERT-base.
    model = BertModel(BertConfig(vocab_size=len(SPECIAL) + NUM_WORDS)).eval()
    generator = torch.Generator().manual_seed(SEED)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.data = 0.1 * noise + (1 if "LayerNorm.weight" in name else 0)
        else:
            weight.data = noise if "embeddings" in name else noise / weight.shape[1] ** 0.5
    with tempfile.TemporaryDirectory() as bare:
        model.save_pretrained(bare)
        tokenizer.save_pretrained(bare)
        modules = [Transformer(bare), Pooling(model.config.hidden_size, pooling_mode="mean"), Normalize()]
        SentenceTransformer(modules=modules).save(str(folder), create_model_card=False)


# ---- the programs that embed texts


class CorellaPeer:
    def __init__(self, options, dtype, folder):
        self._node = NodeProcess(
            options.binary,
            [options.model, "--dtype", dtype, "--threads", options.threads, *options.serve],
            folder / f"corella-{dtype}.log",
        )
        self._node.wait_ready()
        self._connection = self._node.connect()

    @property
    def pid(self):
        return self._node.pid

    def embed(self, texts):
        """Returns the vectors and the seconds that they took."""
        body = json.dumps({"input": texts})
        # The server may have closed a connection that was idle while others were measured.
        self._connection.close()
        begun = time.perf_counter()
        self._connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        text = response.read()
        seconds = time.perf_counter() - begun
        assert response.status == 200, text
        answer = json.loads(text)
        assert answer["usage"]["prompt_tokens"] == sum(len(text.split()) + 2 for text in texts)
        return numpy.array([each["embedding"] for each in answer["data"]], dtype=numpy.float32), seconds

    def stop(self):
        self._node.stop()


class OtherPeer:
    """Another program, in a process of its own."""

    def __init__(self, options, name, dtype):
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(target=serve_other, args=(pipe, name, dtype, str(options.model), options.threads), daemon=True)
        self._process.start()
        pipe.close()
        self.version = self._pipe.recv()
        self.pid = self._process.pid

    def embed(self, texts):
        self._pipe.send(texts)
        return self._pipe.recv()

    def stop(self):
        self._process.terminate()
        self._process.join()


def serve_other(pipe, name, dtype, model, num_threads):
    embed, version = {TORCH: with_torch, OPENVINO: with_openvino}[name](model, dtype, num_threads)
    pipe.send(version)
    with contextlib.suppress(EOFError):
        while True:
            texts = pipe.recv()
            begun = time.perf_counter()
            vectors = embed(texts)
            pipe.send((numpy.asarray(vectors, dtype=numpy.float32), time.perf_counter() - begun))


def load_with_torch(model, dtype):
    import torch
    from sentence_transformers import SentenceTransformer

    kinds = {"f32": torch.float32, "bf16": torch.bfloat16}
    return SentenceTransformer(model, device="cpu", model_kwargs={"dtype": kinds[dtype]})


def with_torch(model, dtype, num_threads):
    import sentence_transformers
    import torch

    torch.set_num_threads(num_threads)
    encoder = load_with_torch(model, dtype)
    encode = lambda texts: encoder.encode(texts, batch_size=len(texts), show_progress_bar=False, convert_to_tensor=True)
    version = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"
    return lambda texts: encode(texts).float().numpy(), version


def tokenizer_inputs(tokenizer, texts):
    inputs = tokenizer(texts, padding=True, return_tensors="np")
    return {name: inputs[name].astype(numpy.int64) for name in tokenizer.model_input_names}


def convert(model, dtype):
    """Saves the model in OpenVINO's format beside itself."""
    import openvino
    import torch

    encoder = load_with_torch(str(model), "f32")
    inputs_of = lambda texts: tokenizer_inputs(encoder.tokenizer, texts)
    example = {name: torch.from_numpy(value) for name, value in inputs_of([WORDS[0]] * 2).items()}
    with torch.no_grad():
        converted = openvino.convert_model(encoder[0].auto_model, example_input=example)
    if dtype == "int8":
        import nncf

        rng = random.Random(SEED)
        samples = nncf.Dataset([inputs_of([make_text(128, rng)]) for _ in range(NUM_CALIBRATION_TEXTS)])
        kind = nncf.ModelType.TRANSFORMER
        converted = nncf.quantize(converted, samples, model_type=kind, subset_size=NUM_CALIBRATION_TEXTS)
    openvino.save_model(converted, converted_path(model, dtype), compress_to_fp16=False)


def converted_path(model, dtype):
    # Products are in bf16 if the processor supports it, for any format of the weights.
    return Path(model) / f"openvino-{'int8' if dtype == 'int8' else 'f32'}.xml"


def with_openvino(model, dtype, num_threads):
    import openvino
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {"INFERENCE_NUM_THREADS": num_threads, "PERFORMANCE_HINT": "LATENCY"}
    # With weights in int8, values between the products are in f32, as in Corella.
    settings["INFERENCE_PRECISION_HINT"] = "bf16" if dtype == "bf16" else "f32"
    compiled = openvino.Core().compile_model(converted_path(model, dtype), "CPU", settings)

    def embed(texts):
        inputs = tokenizer_inputs(tokenizer, texts)
        states = compiled(inputs)[0]
        mask = inputs["attention_mask"][..., None]
        means = (states * mask).sum(1) / mask.sum(1)
        return means / numpy.linalg.norm(means, axis=1, keepdims=True)

    return embed, f"OpenVINO {openvino.__version__}"


# ---- the comparison


def processor_seconds(pid):
    """Returns a process's computing time so far, on all cores."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_chosen(options, name, dtype):
    return not options.peers or f"{name}-{dtype}" in options.peers


def make_models(options):
    """Makes the missing folders and files, each in a process that ends with its libraries' threads."""
    todo = {options.model: (make_model, (options.model,))}
    for name, dtype in PEERS:
        if name == OPENVINO and is_chosen(options, name, dtype):
            todo[converted_path(options.model, dtype)] = (convert, (options.model, dtype))
    for path, (function, arguments) in todo.items():
        if not path.exists():
            process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
            process.start()
            process.join()


def start_peers(options, folder, stack):
    peers = {}
    for name, dtype in PEERS:
        if not is_chosen(options, name, dtype):
            continue
        try:
            peer = CorellaPeer(options, dtype, folder) if name == CORELLA else OtherPeer(options, name, dtype)
        except EOFError:
            print(f"{name} {dtype} is skipped: it did not start", file=sys.stderr)
            continue
        stack.callback(peer.stop)
        peers[name, dtype] = peer
    return peers


def compare(options, peers):
    samples = []
    for round in range(-1, options.rounds):
        rng = random.Random(f"{SEED} {round}")
        texts = [make_text(options.tokens, rng) for _ in range(options.texts)]
        order = list(peers) if round % 2 == 0 else list(peers)[::-1]
        vectors = {}
        for peer in order:
            before = processor_seconds(peers[peer].pid)
            vectors[peer], seconds = peers[peer].embed(texts)
            computed = processor_seconds(peers[peer].pid) - before
            if round >= 0:
                sample = {"round": round, "name": peer[0], "dtype": peer[1], "seconds": seconds, "computed": computed}
                samples.append(sample)
        exact = vectors.get((TORCH, "f32"), vectors[order[0]])
        for sample in samples:
            if sample["round"] == round:
                own = vectors[sample["name"], sample["dtype"]]
                sample["difference"] = float(abs(own - exact).max())
                sample["cosine"] = float((own * exact).sum(1).min())
                print(json.dumps(sample), file=sys.stderr, flush=True)
                assert sample["dtype"] != "f32" or sample["difference"] < TOLERANCE, "vectors in f32 agree"
    return samples


def table(samples, options):
    num_tokens = options.texts * options.tokens
    rows = {}
    for sample in samples:
        rows.setdefault((sample["name"], sample["dtype"]), []).append(sample)
    ours = {dtype: row for (name, dtype), row in rows.items() if name == CORELLA}
    lines = ["| | s | lowest to highest | processor s | tokens/s | largest difference | smallest cosine | Corella is ahead by |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for (name, dtype), row in rows.items():
        times = [sample["seconds"] for sample in row]
        computed = statistics.median(sample["computed"] for sample in row)
        median = statistics.median(times)
        ahead = [f"× {ahead_by(row, ours[own]):.2f} ({own})" for own in ours if name != CORELLA]
        lines.append(
            f"| {name} {dtype} | {median:.2f} | {min(times):.2f} to {max(times):.2f} | {computed:.2f} "
            f"| {num_tokens / median:,.0f} | {max(sample['difference'] for sample in row):.1e} "
            f"| {min(sample['cosine'] for sample in row):.4f} | {', '.join(ahead)} |"
        )
    return "\n".join(lines)


def ahead_by(theirs, ours):
    """Returns the median, over the rounds, of the other program's time divided by Corella's."""
    return statistics.median(their["seconds"] / our["seconds"] for their, our in zip(theirs, ours))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="CORELLA")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a folder, which is made if it is not there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="the tokens of each text")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each program")
    parser.add_argument("--peers", nargs="+", metavar="NAME-DTYPE", help="only these, such as Corella-f32 torch-f32")
    parser.add_argument("--serve", nargs="+", default=[], metavar="OPTION", help="more options of the server, with = before values")
    parser.add_argument("--json", type=Path, help="a file for all samples")
    options = parser.parse_args()
    make_models(options)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = start_peers(options, folder, stack)
        for version in dict.fromkeys(peer.version for peer in peers.values() if isinstance(peer, OtherPeer)):
            print(version, file=sys.stderr)
        samples = compare(options, peers)
    if options.json:
        options.json.write_text("\n".join(map(json.dumps, samples)) + "\n")
    print(table(samples, options))


if __name__ == "__main__":
    main()
