# Written by `UPDATE_DOCS=1 cargo test -p corella --test suite python_options`.
"""Types of the command line's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict


class OwnOptions(TypedDict, total=False):
    """Options of the command line (`corella batch --help` describes them), with `_` for `-`."""

    revision: str | None
    offline: bool | None
    max_model_len: int | str | None
    dtype: Literal[
        "auto", "f32", "float32", "f16", "float16", "half", "bf16", "bfloat16", "int8", "int8-grouped", "int4", None
    ]
    chat_template: str | PathLike[str] | None
    default_chat_template_kwargs: Mapping[str, object] | str | None
    generation_config: Literal["auto"] | Literal["vllm"] | str | PathLike[str] | None
    override_generation_config: Mapping[str, object] | str | None
    weight_cache: str | PathLike[str] | None
    weight_cache_size: int | str | None
    served_model_name: str | Sequence[str] | None
    seed: int | None
    allow_unknown_fields: bool | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | str | None
    max_prefill_tokens: int | str | None
    chunked_prefill_size: int | str | None
    long_prefill_token_threshold: int | str | None
    max_prefill_seqs: int | None
    max_decode_seqs: int | None
    max_queued_requests: int | None
    max_queued_tokens: int | str | None
    slo_admission: bool | None
    head_room: Literal["estimate"] | Literal["limit"] | float | None
    no_chunked_prefill: bool | None
    scheduling_policy: Literal["fcfs", "priority", "lpm", "sjf", None]
    prefill_admission_policy: Literal["fifo", "pack", None]
    prefill_admission_lookahead: int | None
    prefill_force_fifo_every: int | None
    max_passed_over: int | None
    max_inflight_steps: int | None
    pipeline_parallel_size: int | None
    speculate: Literal["off", "ngram", "draft", "mtp", None]
    draft_model: str | PathLike[str] | None
    draft_dtype: Literal[
        "auto", "f32", "float32", "f16", "float16", "half", "bf16", "bfloat16", "int8", "int8-grouped", "int4", None
    ]
    draft_tokens: int | None
    kv_cache_memory: int | str | None
    kv_spill_memory: int | str | None
    block_size: int | str | None
    kv_cache_dtype: Literal["auto", "f32", "float32", "f16", "float16", "half", "bf16", "bfloat16", "int8", None]
    enable_prefix_caching: bool | None
    pin_prefix: str | Sequence[str] | None
    max_pinned_share: float | None
    kv_disk: str | PathLike[str] | Sequence[str | PathLike[str]] | None
    kv_disk_salted: bool | None
    kv_host_memory: int | str | None
    device: Literal["auto", "cpu", "cuda", "mock", None]
    no_batch_invariance: bool | None
    gpu_memory_utilization: float | None
    threads: int | None
    pin_threads: bool | None
    isa: Literal["portable", "avx2", "avx512", "avx512-bf16", "amx", None]
    mock_step_us: float | None
    mock_token_us: float | None
    mock_decode_us: float | None
