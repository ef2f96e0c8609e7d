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
from corella.errors import CorellaError, EngineError, OptionError, RequestError, UnsupportedError
from corella.llm import LLM
from corella.output import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput
from corella.pooled_output import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from corella.request import Message, Prompt
from corella.sampling_params import SamplingParams, StructuredOutputsParams
from corella.stream import AsyncStream, Stream
from corella.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AsyncStream",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "CorellaError",
    "Delta",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineError",
    "Logprob",
    "Message",
    "OptionError",
    "PoolingOutput",
    "PoolingRequestOutput",
    "Prompt",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Stream",
    "StructuredOutputsParams",
    "Tokenizer",
    "UnsupportedError",
    "__version__",
]
