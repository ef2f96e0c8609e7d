"""A script for vLLM, with the arguments that its scripts commonly have, for type checkers and to be run."""

from __future__ import annotations

from typing import Optional

from corella import (
    LLM,
    ClassificationRequestOutput,
    PoolingRequestOutput,
    RequestMetrics,
    SamplingParams,
    ScoringRequestOutput,
)
from corella.inputs import TextPrompt, TokensPrompt
from corella.outputs import CompletionOutput, RequestOutput


def load(model: Optional[str], tensor_parallel_size: int, enforce_eager: bool) -> LLM:
    return LLM(
        model=model,
        # Arguments that the signature of vLLM's LLM names.
        runner="auto",
        convert="auto",
        tokenizer_mode="auto",
        trust_remote_code=True,
        tensor_parallel_size=tensor_parallel_size,
        dtype="auto",
        quantization=None,
        revision=None,
        chat_template=None,
        seed=0,
        gpu_memory_utilization=0.9,
        swap_space=4,
        cpu_offload_gb=0,
        enforce_eager=enforce_eager,
        disable_custom_all_reduce=False,
        mm_processor_kwargs=None,
        structured_outputs_config=None,
        attention_config=None,
        kv_cache_memory_bytes=64 << 20,
        compilation_config={"mode": 3, "cudagraph_capture_sizes": [1, 2, 4]},
        # Arguments that vLLM's LLM passes on to the engine's arguments.
        async_scheduling=True,
        attention_backend="FLASH_ATTN",
        block_size=16,
        config_format="auto",
        data_parallel_size=1,
        disable_log_stats=True,
        distributed_executor_backend="mp",
        enable_chunked_prefill=True,
        enable_expert_parallel=False,
        enable_prefix_caching=True,
        generation_config="auto",
        kv_cache_dtype="auto",
        limit_mm_per_prompt={"image": 0},
        load_format="auto",
        max_logprobs=20,
        max_model_len=1024,
        max_num_batched_tokens=None,
        max_num_seqs=16,
        override_generation_config={"temperature": 0.5},
        pipeline_parallel_size=1,
        scheduling_policy="fcfs",
        served_model_name=None,
        skip_mm_profiling=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        use_tqdm_on_load=True,
    )


def pooled(llm: LLM) -> float:
    classes: list[ClassificationRequestOutput] = llm.classify("a", use_tqdm=True)
    vectors: list[PoolingRequestOutput] = llm.encode(["a", "b"], pooling_task="embed")
    scores: list[ScoringRequestOutput] = llm.score("a", ["b", "c"], use_tqdm=True)
    return scores[0].outputs.score + vectors[0].outputs.data[0] + classes[0].outputs.probs[0]


def main() -> None:
    llm = load(None, 1, True)
    params = llm.get_default_sampling_params().clone()
    params.max_tokens = 8
    params.n = 2
    outputs = llm.generate(["Once upon a time", "The owl said"], params, use_tqdm=False)
    for output in outputs:
        metrics: RequestMetrics | None = output.metrics
        assert metrics is not None and metrics.last_token_ts >= metrics.first_token_ts
        print(output.prompt + output.outputs[0].text, output.outputs[1].text)
    prompts = [TextPrompt(prompt="Once"), TokensPrompt(prompt_token_ids=[1, 2])]
    typed: list[RequestOutput] = llm.generate(prompts, SamplingParams(max_tokens=2, detokenize=True))
    last: CompletionOutput = typed[1].outputs[0]
    print(last.text)
    freed: bool = llm.reset_prefix_cache()
    assert freed
    llm.close()


if __name__ == "__main__":
    main()
