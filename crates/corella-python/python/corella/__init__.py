"""A language model on the CPU, as a Python object.

>>> from corella import LLM, SamplingParams
>>> llm = LLM(kv_cache_memory="64M")
>>> params = SamplingParams(max_tokens=4, temperature=0)
>>> [output] = llm.generate("Once upon a time", params)
>>> len(output.outputs[0].token_ids)
4
>>> llm.close()
"""

from corella._corella import __version__
from corella.errors import CorellaError, EngineError, OptionError, RequestError
from corella.llm import LLM, Message, Prompt
from corella.output import (
    CompletionOutput,
    Delta,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
)
from corella.sampling_params import SamplingParams
from corella.stream import AsyncStream, Stream
from corella.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AsyncStream",
    "CompletionOutput",
    "CorellaError",
    "Delta",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineError",
    "Logprob",
    "Message",
    "OptionError",
    "Prompt",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Stream",
    "Tokenizer",
    "__version__",
]
