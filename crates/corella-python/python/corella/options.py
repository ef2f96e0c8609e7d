"""The options of a model, by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict, Union

from corella.own_options import OwnOptions

_Path = Union[str, "PathLike[str]"]
_Any = object
"""Any value, because none has an effect."""


class ForeignOptions(TypedDict, total=False):
    """Options of vLLM's `LLM` that have no effect here, or have another name. They let vLLM's scripts run unchanged.

    A warning names the options that have no effect. A value that would need an effect, such as
    `tensor_parallel_size=2`, is an error: the model is not loaded.
    """

    # Other names of options of Corella.
    kv_cache_memory_bytes: int | str | None
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    num_speculative_tokens: int | None
    numa_bind: bool
    spec_method: Literal["ngram", "draft_model", "mtp"] | None
    spec_model: _Path | None
    spec_tokens: int | None
    speculative_config: Mapping[str, object] | str | None
    speculative_model: _Path | None
    # The model and its files.
    code_revision: str | None
    config_format: Literal["auto", "hf"]
    convert: Literal["auto", "generate", "pooling", "none", "embed"]
    ignore_patterns: _Any
    load_format: Literal["auto", "safetensors", "hf", "gguf"]
    max_parallel_loading_workers: int | None
    model_impl: Literal["auto", "vllm"]
    pt_load_map_location: _Any
    quantization: Literal["awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf"] | None
    runner: Literal["auto", "generate", "pooling", "none", "embed"]
    safetensors_load_strategy: str | None
    safetensors_prefetch_block_size: int | None
    safetensors_prefetch_num_threads: int | None
    task: str | None
    tokenizer_mode: Literal["auto", "hf", "slow"]
    trust_remote_code: bool
    use_tqdm_on_load: bool
    # Answers.
    chat_template_content_format: Literal["auto", "string"]
    enable_auto_tool_choice: bool
    enable_reasoning: bool
    guided_decoding_backend: str | None
    logprobs_mode: Literal["raw_logprobs"]
    max_logprobs: int
    reasoning_config: _Any
    response_role: Literal["assistant"]
    structured_outputs_config: _Any
    # The scheduler and the KV cache.
    async_scheduling: bool | None
    disable_hybrid_kv_cache_manager: bool | None
    enable_chunked_prefill: bool | None
    long_prefill_token_threshold_adaptive: bool
    max_num_scheduled_tokens: int | None
    multi_step_stream_outputs: bool
    num_scheduler_steps: int
    preemption_mode: str | None
    prefill_schedule_interval: _Any
    prefix_cache_retention_interval: _Any
    prefix_caching_hash_algo: str
    prefix_match_unit: _Any
    scheduler_delay_factor: float
    scheduler_reserve_full_isl: bool
    stream_interval: int
    swa_bounded_replay: bool
    swap_space: float
    use_v2_block_manager: bool
    watermark: float
    # Devices. Corella uses one.
    cp_kv_cache_interleave_size: int
    cpu_distributed_timeout_seconds: _Any
    cpu_offload_gb: float
    data_parallel_backend: Literal["mp", "uni"]
    data_parallel_rank: int | None
    data_parallel_size: int
    data_parallel_size_local: int | None
    data_parallel_start_rank: int | None
    decode_context_parallel_size: int
    disable_custom_all_reduce: bool
    disable_nccl_for_dp_synchronization: bool | None
    distributed_executor_backend: Literal["mp", "uni"] | None
    distributed_timeout_seconds: _Any
    enable_batch_sharded_sampling: bool
    enable_cumem_allocator: bool
    enable_nccl_comm_suspend: bool
    enable_shm_tensor_arena: bool
    fail_on_environ_validation: bool
    kv_offloading_size: float | None
    nnodes: int
    node_rank: int
    prefill_context_parallel_size: int
    ray_workers_use_nsight: bool
    tensor_parallel_size: int
    worker_use_ray: bool
    # Kernels and compilation.
    attention_backend: str | None
    attention_config: _Any
    compilation_config: _Any
    compilation_config_level: int
    cuda_graph_sizes: _Any
    cudagraph_capture_sizes: Sequence[int] | None
    disable_cascade_attn: bool
    enable_flash_late_interaction: bool
    enable_flashinfer_autotune: bool | None
    enforce_eager: bool
    gdn_prefill_backend: str | None
    ir_op_priority: _Any
    jit_monitor_mode: _Any
    jit_monitor_verbose: bool
    kda_decode_backend: str | None
    kda_prefill_backend: str | None
    kernel_config: _Any
    kv_sharing_fast_prefill: bool
    linear_backend: str | None
    max_context_len_to_capture: int | None
    max_cudagraph_capture_size: int | None
    max_seq_len_to_capture: int
    moe_backend: str | None
    monokernel: bool
    optimization_level: _Any
    performance_mode: str | None
    sparse_indexer_topk_backend: str | None
    use_fp64_gumbel: bool
    # Experts.
    all2all_backend: str | None
    enable_ep_weight_filter: bool
    enable_eplb: bool
    enable_expert_parallel: bool
    eplb_config: _Any
    expert_placement_strategy: str
    # Recurrent layers.
    enable_mamba_cache_stochastic_rounding: bool
    enable_mamba_shared_prefix_checkpoint: bool
    mamba_backend: _Any
    mamba_block_size: int | None
    mamba_cache_dtype: str
    mamba_cache_mode: str
    mamba_cache_philox_rounds: int
    mamba_ssm_cache_dtype: str
    mamba_ssu_algorithm: _Any
    replayssm_buffer_len: _Any
    use_replayssm: bool
    # Adapters.
    enable_mixed_moe_lora_format: bool
    enable_moe_shared_loras: bool
    enable_tower_connector_lora: bool
    fully_sharded_loras: bool
    lora_dtype: _Any
    max_cpu_loras: int | None
    max_lora_cls_labels: int | None
    specialize_active_lora: bool
    # Images, sound and video. Models read text.
    allowed_local_media_path: str
    allowed_media_domains: Sequence[str] | None
    disable_chunked_mm_input: bool
    interleave_mm_strings: bool
    language_model_only: bool
    limit_mm_per_prompt: _Any
    media_io_kwargs: _Any
    mm_device_do_normalize: bool
    mm_encoder_attn_backend: _Any
    mm_encoder_attn_dtype: _Any
    mm_encoder_fp8_scale_path: _Any
    mm_encoder_fp8_scale_save_margin: _Any
    mm_encoder_fp8_scale_save_path: _Any
    mm_encoder_tp_mode: _Any
    mm_hasher_algorithm: _Any
    mm_ipc_gpu_memory_gb: _Any
    mm_processor_cache_gb: float
    mm_processor_cache_type: _Any
    mm_processor_device: _Any
    mm_processor_kwargs: _Any
    mm_shm_cache_max_object_size_mb: _Any
    mm_tensor_ipc: _Any
    skip_mm_profiling: bool
    video_pruning_method: _Any
    video_pruning_rate: float | None
    # Logs and metrics.
    aggregate_engine_logging: bool
    collect_detailed_traces: _Any
    cudagraph_metrics: bool
    disable_log_stats: bool
    enable_layerwise_nvtx_tracing: bool
    enable_logging_iteration_details: bool
    enable_mfu_metrics: bool
    kv_cache_metrics: bool
    kv_cache_metrics_sample: float
    per_request_spec_decode_metrics: _Any
    profiler_config: _Any
    show_hidden_metrics_for_version: str | None
    watchdog_config: _Any
    # Features that Corella lacks: only `False`, the default, is accepted.
    allow_credentials: bool
    allow_deprecated_quantization: bool
    data_parallel_external_lb: bool
    data_parallel_hybrid_lb: bool
    dcp_q_replicate: bool
    disable_sliding_window: bool
    enable_dbo: bool
    enable_elastic_ep: bool
    enable_fault_tolerance: bool
    enable_force_include_usage: bool
    enable_hc_sp: bool
    enable_lora: bool
    enable_mm_embeds: bool
    enable_per_request_metrics: bool
    enable_prompt_embeds: bool
    enable_return_routed_experts: bool
    enable_sleep_mode: bool
    exclude_tools_when_tool_choice_none: bool
    mm_encoder_only: bool
    return_sampling_mask: bool
    return_tokens_as_token_ids: bool
    skip_tokenizer_init: bool
    sleep_mode_offload_cudagraph: bool
    tokens_only: bool
    trust_request_chat_template: bool
    trust_request_mm_kwargs: bool


class Options(ForeignOptions, OwnOptions, total=False):
    """All options of a model.

    Sizes are numbers of bytes, or texts such as `"512M"`. An option that is left out, or is `None`, has the default of
    the command line.
    """
