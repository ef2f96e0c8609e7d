"""Converts the model folder with random weights to GGUF files in bf16, Q8_0 and Q4_0, with llama.cpp's own tools.

    python bench/compare/make_gguf.py LLAMA_CPP MODEL OUT    # source with build/bin, model folder, output folder
"""

import runpy
import subprocess
import sys
from pathlib import Path


def convert(source, model, out):
    # The converter recognises tokenizers by a digest of a tokenised text. This one splits like qwen2, with its own
    # merges.
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    # Gemma's class would require SentencePiece's file.
    TextModel._set_vocab_sentencepiece = lambda self, *_: self._set_vocab_gpt2()
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outtype", "bf16", "--outfile", str(out)]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


def main():
    source, model, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    bf16 = folder / "bf16.gguf"
    if not bf16.exists():
        convert(source, model, bf16)
    for kind in ("Q8_0", "Q4_0"):
        if not (out := folder / f"{kind.lower()}.gguf").exists():
            subprocess.run([source / "build/bin/llama-quantize", bf16, out, kind, "2"], check=True)


if __name__ == "__main__":
    main()
