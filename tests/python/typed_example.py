"""A program that uses every part of the package, for type checkers."""

import asyncio
from pathlib import Path

from corella import (
    LLM,
    AsyncStream,
    CorellaError,
    Delta,
    EmbeddingRequestOutput,
    Logprob,
    Prompt,
    RequestError,
    RequestOutput,
    SamplingParams,
    Stream,
    Tokenizer,
)


def answer(llm: LLM, questions: list[str]) -> list[str]:
    params = SamplingParams(n=2, max_tokens=16, stop=["."], logprobs=1, logit_bias={3: -1.0})
    errors: list[RequestError | TypeError | None] = llm.check(questions, params)
    outputs: list[RequestOutput] = llm.generate([text for text, error in zip(questions, errors) if not error], params)
    rows: list[dict[int, Logprob]] | None = outputs[0].outputs[0].logprobs
    assert rows is not None
    return [choice.text for output in outputs for choice in output.outputs]


def converse(llm: LLM) -> str:
    conversation = [{"role": "user", "content": "Hello!"}]
    stream: Stream = llm.stream(conversation, SamplingParams(seed=1))
    for delta in stream:
        piece: str = delta.text
        print(piece, end="")
    return llm.chat([conversation, conversation], [SamplingParams(), SamplingParams()])[1].text


def compare(llm: LLM) -> float:
    tokenizer: Tokenizer = llm.get_tokenizer()
    ids: list[int] = tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}])
    text: str = tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}], tokenize=False)
    prompts: list[Prompt] = [text, ids, tokenizer.decode(3)]
    vectors: list[EmbeddingRequestOutput] = llm.embed(prompts, pooling="mean")
    return sum(a * b for a, b in zip(vectors[0].outputs.embedding, vectors[1].outputs.embedding))


async def converse_async(llm: LLM) -> int:
    stream: AsyncStream = llm.astream("Once")
    deltas: list[Delta] = [delta async for delta in stream]
    prompts: list[Prompt] = [[1, 2], "text", {"prompt_token_ids": [3]}]
    outputs = await llm.agenerate(prompts) + await llm.agenerate([[1, 2], [3]]) + await llm.agenerate(("a", "b"))
    chats = await llm.achat([{"role": "user", "content": "Hello!"}], tools=[])
    return len(deltas) + len(outputs) + len(chats)


def main() -> None:
    try:
        with LLM(Path("model"), max_num_seqs=8, kv_cache_memory="1G", dtype="int8", pin_prefix=["a"]) as llm:
            answer(llm, ["Why?"])
            converse(llm)
            compare(llm)
            asyncio.run(converse_async(llm))
    except RequestError as error:
        print(error.param, error.code, error.status, error.index)
    except CorellaError as error:
        print(error)
