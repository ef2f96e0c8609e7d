"""The options of a model, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict, Union

_Path = Union[str, "PathLike[str]"]
_WeightFormat = Literal[
    "auto", "f32", "float32", "f16", "float16", "half", "bf16", "bfloat16", "int8", "int8-grouped", "int4"
]
_KvFormat = Literal["auto", "f32", "float32", "f16", "float16", "half", "bf16", "bfloat16", "int8"]


class ForeignOptions(TypedDict, total=False):
    """Options of vLLM's `LLM` that change nothing here, so that its scripts run as they are."""

    tensor_parallel_size: Literal[1]
    trust_remote_code: bool


class Options(ForeignOptions, total=False):
    """Options of the command line (`corella batch --help` describes them), with `_` for `-`.

    Sizes are numbers of bytes, or texts such as `"512M"`. What is left out, or is `None`, has the default of the
    command line.
    """

    # The model.
    revision: str | None
    offline: bool
    max_model_len: int | str | None
    dtype: _WeightFormat
    chat_template: _Path | None
    default_chat_template_kwargs: dict[str, object] | str | None
    generation_config: _Path
    override_generation_config: dict[str, float | None] | str | None
    weight_cache: _Path | None
    weight_cache_size: int | str
    # Requests.
    served_model_name: str | Sequence[str]
    seed: int | None
    allow_unknown_fields: bool
    tool_call_parser: str
    reasoning_parser: str
    # The scheduler.
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_prefill_tokens: int | None
    chunked_prefill_size: int | None
    long_prefill_token_threshold: int
    max_prefill_seqs: int | None
    max_decode_seqs: int | None
    max_queued_requests: int
    max_queued_tokens: int
    slo_admission: bool
    head_room: float | Literal["estimate", "limit"]
    no_chunked_prefill: bool
    scheduling_policy: Literal["fcfs", "priority", "lpm", "sjf"]
    prefill_admission_policy: Literal["fifo", "pack"]
    prefill_admission_lookahead: int
    prefill_force_fifo_every: int
    max_passed_over: int
    max_inflight_steps: int | None
    pipeline_parallel_size: int
    # Speculation.
    speculate: Literal["off", "ngram", "draft", "mtp"]
    draft_model: _Path | None
    draft_dtype: _WeightFormat | None
    draft_tokens: int | None
    # The KV cache.
    kv_cache_memory: int | str | None
    kv_spill_memory: int | str | None
    block_size: int
    kv_cache_dtype: _KvFormat
    enable_prefix_caching: bool
    pin_prefix: str | Sequence[str]
    max_pinned_share: float
    # The device.
    device: Literal["auto", "cpu", "cuda", "mock"]
    no_batch_invariance: bool
    gpu_memory_utilization: float
    threads: int | None
    pin_threads: bool
    isa: Literal["portable", "avx2", "avx512", "avx512-bf16", "amx"] | None
    mock_step_us: float | None
    mock_token_us: float | None
    mock_decode_us: float | None
