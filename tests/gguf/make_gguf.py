"""Makes the GGUF files that tests read, with weights from seeds only.

    python3 -m venv .venv && .venv/bin/pip install -r tests/gguf/requirements.txt
    .venv/bin/python tests/gguf/make_gguf.py

The `gguf` package writes the files, and what the files must mean is computed without Corella: values of blocks by the
dequantisation of `gguf`, logits by Transformers, vocabularies by SentencePiece and `tokenizers`. In this folder, the
script makes

    blocks.gguf      blocks of every type, with the values that they stand for
    NAME/            a Hugging Face folder
    NAME.gguf        the same model
    split/           one of these models in parts

and in tests/golden the folders *-gguf, which have models of many types and their logits.
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import AddedToken, Regex

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
sys.path.insert(0, str(GOLDEN))
import golden_shape  # noqa: E402
import make_golden  # noqa: E402

# The offsets of the half-precision numbers of a block; the rest may be any bits.
HALVES = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
}
# For types whose codes begin at 0, the second half-precision number, in scales, that centres the values at 0.
CENTRES = {Type.Q4_1: -7.5, Type.Q5_1: -15.5, Type.Q4_K: 7.5, Type.Q5_K: 15.5}


def random_blocks(generator, kind, rows, columns, halves):
    """Makes blocks of arbitrary codes. `halves(i, num_blocks)` gives each block's number at the i-th offset of
    HALVES."""
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = rows * columns // block_len
    blocks = generator.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    for i, at in enumerate(HALVES[kind]):
        numbers = np.asarray(halves(i, num_blocks), dtype=np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(num_blocks, 2)
    return blocks.reshape(rows, -1)


def make_blocks(path):
    generator = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "blocks")
    rows, columns = 1, 256

    def halves(_, num_blocks):
        numbers = generator.normal(0.0, 1.0, num_blocks) * 10.0 ** generator.uniform(-6, 2, num_blocks)
        numbers[0] = 0.0
        numbers[-1] = 3e-8  # The smallest number, which is denormal.
        return numbers

    for kind in HALVES:
        blocks = random_blocks(generator, kind, rows, columns, halves)
        writer.add_tensor(kind.name, blocks, raw_dtype=kind)
        values = gguf.dequantize(blocks, kind)
        writer.add_tensor(f"{kind.name}.values", values.astype(np.float32))
    numbers = generator.normal(0.0, 1.0, (rows, columns)).astype(np.float32)
    for kind in (Type.F16, Type.BF16):
        stored = gguf.quantize(numbers, kind)
        writer.add_tensor(kind.name, stored, raw_dtype=kind)
        writer.add_tensor(f"{kind.name}.values", gguf.dequantize(stored, kind).astype(np.float32))
    # A block begins with the exponent of its scale. The two least exponents are those of denormal scales.
    blocks = generator.integers(0, 256, (columns // 32, 17), dtype=np.uint8)
    blocks[:, 0] = [0, 1, 2, 100, 126, 127, 128, 250]
    blocks = blocks.reshape(rows, -1)
    writer.add_tensor(Type.MXFP4.name, blocks, raw_dtype=Type.MXFP4)
    writer.add_tensor(f"{Type.MXFP4.name}.values", gguf.dequantize(blocks, Type.MXFP4).astype(np.float32))
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# The names that GGUF has for the tensors of a Hugging Face folder.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, suffix = name.rsplit(".", 1)
    layer = ""
    if stem.startswith("model.layers."):
        _, _, number, stem = stem.split(".", 3)
        layer = f"blk.{number}."
    return f"{layer}{NAMES[stem]}.{suffix}"


def interleave(config, name, weight):
    """Reorders Llama's queries and keys: rows of the two halves of each head alternate."""
    if config["model_type"] != "llama" or not name.split(".")[-2] in ("q_proj", "k_proj"):
        return weight
    head_dim = config["head_dim"]
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def deinterleave(config, name, weight):
    if config["model_type"] != "llama" or not name.split(".")[-2] in ("q_proj", "k_proj"):
        return weight
    head_dim = config["head_dim"]
    pairs = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def writer_of(path, config, file_type):
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if arch != "qwen2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rotary_divisors(config, scaling))
    return writer


def rotary_divisors(config, scaling):
    dims = np.arange(0, config["head_dim"], 2, dtype=np.float64)
    wavelengths = 2 * np.pi * config["rope_theta"] ** (dims / config["head_dim"])
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / (kept + (1.0 - kept) / factor)).astype(np.float32)


# The golden models have blocks of every type. Rows of `down` are long enough for the larger blocks.
MIXED = {
    "model.embed_tokens.weight": Type.Q8_0,
    "lm_head.weight": Type.Q8_0,
    "model.layers.0.self_attn.q_proj.weight": Type.Q4_0,
    "model.layers.0.self_attn.k_proj.weight": Type.Q5_0,
    "model.layers.0.self_attn.v_proj.weight": Type.Q5_1,
    "model.layers.0.self_attn.o_proj.weight": Type.F16,
    "model.layers.0.mlp.gate_proj.weight": Type.Q4_1,
    "model.layers.0.mlp.up_proj.weight": Type.IQ4_NL,
    "model.layers.0.mlp.down_proj.weight": Type.Q4_K,
    "model.layers.1.self_attn.q_proj.weight": Type.Q8_0,
    "model.layers.1.self_attn.k_proj.weight": Type.BF16,
    "model.layers.1.self_attn.v_proj.weight": Type.Q4_0,
    "model.layers.1.self_attn.o_proj.weight": Type.Q5_1,
    "model.layers.1.mlp.gate_proj.weight": Type.Q4_0,
    "model.layers.1.mlp.up_proj.weight": Type.Q5_0,
    "model.layers.1.mlp.down_proj.weight": Type.Q6_K,
}

GOLDEN_MODELS = {
    "llama-gguf": golden_shape.llama(
        hidden_size=32,
        intermediate_size=256,
        vocab_size=64,
        head_dim=8,
        tie_word_embeddings=False,
        attention_bias=True,
        rope_scaling=golden_shape.LLAMA3_ROPE_SCALING,
    ),
    "llama-q4-gguf": golden_shape.llama(
        hidden_size=32,
        intermediate_size=256,
        vocab_size=64,
        head_dim=8,
        tie_word_embeddings=False,
    ),
    "qwen2-gguf": golden_shape.qwen2(
        hidden_size=32, intermediate_size=32, vocab_size=64, num_hidden_layers=1
    ),
    "qwen3-gguf": golden_shape.qwen3(
        hidden_size=32, intermediate_size=256, vocab_size=64, head_dim=8
    ),
}
# Types for the short rows of the Qwen2 model here.
QWEN2 = {name: Type.Q8_0 for name in MIXED if ".1." not in name and "lm_head" not in name} | {
    "model.layers.0.self_attn.o_proj.weight": Type.F16
}
# The Llama model has Q4_K where the Qwen3 model has Q5_K.
QWEN3_CHANGES = {"model.layers.0.mlp.down_proj.weight": Type.Q5_K}

# Types that executors may keep in 4 bits as they are.
Q4 = {
    "model.embed_tokens.weight": Type.Q4_0,
    "lm_head.weight": Type.Q4_1,
    "model.layers.0.self_attn.q_proj.weight": Type.Q4_0,
    "model.layers.0.self_attn.k_proj.weight": Type.Q4_0,
    "model.layers.0.self_attn.v_proj.weight": Type.Q4_1,
    "model.layers.0.self_attn.o_proj.weight": Type.Q4_1,
    "model.layers.0.mlp.gate_proj.weight": Type.Q4_0,
    "model.layers.0.mlp.up_proj.weight": Type.Q4_0,
    "model.layers.0.mlp.down_proj.weight": Type.Q4_K,
    "model.layers.1.self_attn.q_proj.weight": Type.Q4_1,
    "model.layers.1.self_attn.k_proj.weight": Type.Q4_0,
    "model.layers.1.self_attn.v_proj.weight": Type.Q4_0,
    "model.layers.1.self_attn.o_proj.weight": Type.Q5_0,
    "model.layers.1.mlp.gate_proj.weight": Type.Q4_1,
    "model.layers.1.mlp.up_proj.weight": Type.Q4_1,
    "model.layers.1.mlp.down_proj.weight": Type.Q4_0,
}
KINDS = {"llama-q4-gguf": Q4, "qwen2-gguf": QWEN2, "qwen3-gguf": MIXED | QWEN3_CHANGES}


def block_weights(kind, weight, generator):
    """Makes blocks with roughly these weights, and returns them with their exact weights."""
    weight = np.ascontiguousarray(weight)
    if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL):
        # The package cannot quantise to these types, so codes are drawn, with scales that give the same deviation.
        centre = CENTRES.get(kind, 0.0)
        unit = lambda i, num_blocks: np.full(num_blocks, (1.0, centre)[i])  # noqa: E731
        state = generator.bit_generator.state
        blocks = random_blocks(generator, kind, *weight.shape, unit)
        scale = weight.std() / gguf.dequantize(blocks, kind).std()
        generator.bit_generator.state = state
        scaled = lambda i, num_blocks: np.full(num_blocks, scale * (1.0, centre)[i])  # noqa: E731
        blocks = random_blocks(generator, kind, *weight.shape, scaled)
    else:
        blocks = gguf.quantize(weight, kind)
    return blocks, gguf.dequantize(blocks, kind).astype(np.float32)


def make_golden_model(name, config):
    # The other goldens test prompts of many lengths.
    make_golden.PROMPT_LENGTHS = (1, 40)
    kinds = KINDS.get(name, MIXED)
    for seed in range(1000):
        with tempfile.TemporaryDirectory() as scratch:
            scratch = Path(scratch)
            path = scratch / "model.gguf"
            writer = writer_of(path, config, gguf.LlamaFileType.MOSTLY_Q4_K_M)
            generator = np.random.default_rng([seed, 2])
            weights = {}
            for tensor, weight in make_golden.draw_weights(config, seed).items():
                stored = interleave(config, tensor, weight.numpy())
                kind = kinds.get(tensor)
                if kind is not None:
                    blocks, stored = block_weights(kind, stored, generator)
                    writer.add_tensor(gguf_name(tensor), blocks, raw_dtype=kind)
                    if kind not in (Type.F16, Type.BF16):
                        # Executors read the blocks as bf16, so the golden does too.
                        stored = torch.from_numpy(stored).bfloat16().float().numpy()
                else:
                    writer.add_tensor(gguf_name(tensor), stored)
                weights[tensor] = torch.from_numpy(deinterleave(config, tensor, stored).copy())
            finish(writer)
            folder = scratch / name
            make_golden.write_checkpoint(folder, config, weights, torch.float32, 1)
            golden = make_golden.evaluate(folder, seed)
            if isinstance(golden, str):
                print(f"{name}: seed {seed}: {golden}", file=sys.stderr)
                continue
            shutil.rmtree(GOLDEN / name, ignore_errors=True)
            (GOLDEN / name).mkdir()
            shutil.copy(path, GOLDEN / name)
            make_golden.write_golden(GOLDEN / name, golden)
            print(f"{name}: seed {seed}")
            return
    sys.exit(f"{name}: no seed will do")


WORDS = """the of and to in is you that it he was for on are as with his they at be this have from
or one had by word but not what all were we when your can said there use an each which she do how
their if will up other about out many then them these so some her would make like him into time has
look two more write go see number no way could people my than first water been call who oil its now
find long down day did get come made may part""".split()


def training_text():
    generator = random.Random(3)
    for _ in range(400):
        yield " ".join(generator.choice(WORDS) for _ in range(12)).capitalize() + "."


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "[INST] {{ message['content'] }} [/INST]{% else %}{{ message['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)

# The patterns in tokenizer.json of these families.
SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def byte_level_tokenizer(pre, special, plain, bos):
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=276, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    return tokenizer


def add_byte_level(writer, tokenizer, pre, vocab_size):
    described = json.loads(tokenizer.to_str())
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, token_id in described["model"]["vocab"].items():
        tokens[token_id], types[token_id] = token, gguf.TokenType.NORMAL
    for token in described["added_tokens"]:
        special = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        tokens[token["id"]], types[token["id"]] = token["content"], special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])


def sentence_piece(scratch):
    """Makes a vocabulary with scores, and reads it with Transformers."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2
    from transformers.convert_slow_tokenizer import generate_merges

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=training_text(),
        model_prefix=str(scratch / "sp"),
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((scratch / "sp.model").read_bytes())

    scores = [(piece.piece, piece.score) for piece in proto.pieces]
    vocab = {piece: token_id for token_id, (piece, _) in enumerate(scores)}
    merges = generate_merges(vocab, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    # This is as in the tokenizer.json of Llama 2.
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    original = sentencepiece.SentencePieceProcessor(str(scratch / "sp.model"))
    for text in [*training_text(), "naïve Ünïcødé, 日本語 🦊\n\tx  y   z", "12345 & more."]:
        assert tokenizer.encode(text).ids == original.encode(text), text
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return proto, tokenizer


def add_sentence_piece(writer, proto):
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.piece for piece in proto.pieces])
    writer.add_token_scores([piece.score for piece in proto.pieces])
    # SentencePiece and GGUF number the types of tokens alike.
    writer.add_token_types([piece.type for piece in proto.pieces])
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def make_pair(name, config, dtype, tokenizer, add_tokenizer, special, template, defaults):
    """Makes a Hugging Face folder and a GGUF file of the same model."""
    weights = make_golden.draw_weights(config, 5)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    make_golden.write_checkpoint(folder, config, weights, dtype, 1)
    generation = {"bos_token_id": special["bos"], "eos_token_id": special["ends"]} | defaults
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "tokenizer.json").write_text(
        json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n"
    )
    text = lambda key: tokenizer.id_to_token(special[key]) if key in special else None  # noqa: E731
    settings = {
        "bos_token": text("bos"),
        "eos_token": text("eos"),
        "unk_token": text("unk"),
        "pad_token": text("pad"),
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    is_f32 = dtype == torch.float32
    file_type = gguf.LlamaFileType.ALL_F32 if is_f32 else gguf.LlamaFileType.MOSTLY_F16
    writer = writer_of(HERE / f"{name}.gguf", config, file_type)
    add_tokenizer(writer)
    writer.add_bos_token_id(special["bos"])
    writer.add_eos_token_id(special["eos"])
    if "pad" in special:
        writer.add_pad_token_id(special["pad"])
    writer.add_chat_template(template)
    keys = {"temperature": "temp", "top_p": "top_p"}
    for field, value in defaults.items():
        if field == "top_k":
            writer.add_int32("general.sampling.top_k", value)
        else:
            writer.add_float32(f"general.sampling.{keys[field]}", value)
    for tensor, weight in weights.items():
        stored = interleave(config, tensor, weight.to(dtype).numpy())
        if stored.ndim == 1:
            # Norms are never stored in half precision.
            stored = stored.astype(np.float32)
        writer.add_tensor(gguf_name(tensor), stored)
    finish(writer)


def make_pairs():
    with tempfile.TemporaryDirectory() as scratch:
        proto, tokenizer = sentence_piece(Path(scratch))
    config = golden_shape.llama(
        hidden_size=8,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_hidden_layers=1,
        vocab_size=len(proto.pieces),
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    make_pair(
        "llama-f32",
        config,
        torch.float32,
        tokenizer,
        lambda writer: add_sentence_piece(writer, proto),
        {"bos": 1, "eos": 2, "unk": 0, "ends": 2},
        INST,
        {},
    )

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_level_tokenizer("qwen2", special, ["<think>", "</think>"], None)
    ids = [tokenizer.token_to_id(token) for token in special]
    # Like Qwen3, the model has more rows of embeddings than the tokenizer has tokens.
    config = golden_shape.qwen3(
        hidden_size=16,
        intermediate_size=24,
        head_dim=8,
        num_hidden_layers=1,
        vocab_size=288,
        bos_token_id=ids[0],
        eos_token_id=ids[2],
    )
    make_pair(
        "qwen3-f16",
        config,
        torch.float16,
        tokenizer,
        lambda writer: (
            add_byte_level(writer, tokenizer, "qwen2", 288),
            writer.add_add_bos_token(False),
        ),
        {"bos": ids[0], "eos": ids[2], "pad": ids[0], "ends": [ids[2], ids[0]]},
        CHATML,
        {"temperature": 0.5, "top_k": 20, "top_p": 0.75},
    )

    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    tokenizer = byte_level_tokenizer("llama-bpe", special, [], special[0])
    ids = [tokenizer.token_to_id(token) for token in special]
    config = golden_shape.llama(
        hidden_size=8,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_hidden_layers=1,
        vocab_size=280,
        bos_token_id=ids[0],
        eos_token_id=ids[3],
        tie_word_embeddings=False,
        rope_scaling=golden_shape.LLAMA3_ROPE_SCALING,
    )
    make_pair(
        "llama3-f16",
        config,
        torch.float16,
        tokenizer,
        lambda writer: add_byte_level(writer, tokenizer, "llama-bpe", 280),
        {"bos": ids[0], "eos": ids[3], "ends": [ids[3], ids[1], ids[2]]},
        CHATML,
        {},
    )


def make_split(name):
    """Writes a model again, in parts of four tensors."""
    folder = HERE / "split"
    folder.mkdir(exist_ok=True)
    reader = gguf.GGUFReader(HERE / f"{name}.gguf")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", architecture, split_max_tensors=4)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(field.name, field.contents())
        else:
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    make_golden.set_up_transformers()
    make_blocks(HERE / "blocks.gguf")
    make_pairs()
    make_split("qwen3-f16")
    for name, config in GOLDEN_MODELS.items():
        make_golden_model(name, config)


if __name__ == "__main__":
    main()
