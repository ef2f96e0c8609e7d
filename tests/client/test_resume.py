"""Cuts answers behind each token. Another server resumes them, and the joined answer is that of an uninterrupted run."""

import json

import pytest
from fleet import THREADS, Fleet
from pairing_proxy import post
from server_process import ServerProcess

PROMPT = [400 + at % 50 for at in range(40)]
PLAIN = {"prompt": PROMPT, "max_tokens": 14, "temperature": 0, "ignore_eos": True}
SEEDED = {"temperature": 1, "seed": 11}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "tags": {"type": "array", "items": {"enum": ["x", "y"]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def servers():
    with ServerProcess(*THREADS) as first, ServerProcess(*THREADS) as second:
        yield first, second


def chunks_of(server, body):
    """Returns text, tokens and ends of the chunks of a stream."""
    body = {**body, "stream": True, "return_token_ids": True}
    status, _, answer = post(server.port, "/v1/completions", body)
    assert status == 200, answer
    lines = answer.decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices]
    return [(choice["text"], choice.get("token_ids") or [], end) for choice, end in zip(choices, ends)]


def joined(chunks):
    tokens = [token for _, drawn, _ in chunks for token in drawn]
    return "".join(text for text, _, _ in chunks), tokens, chunks[-1][2]


def cuts(chunks):
    """Yields the chunks that a client has after each token, with the tokens drawn by then."""
    _, tokens, _ = joined(chunks)
    for num_drawn in range(1, len(tokens)):
        sent, num_sent = [], 0
        for chunk in chunks:
            num_sent += len(chunk[1])
            if num_sent > num_drawn:
                break
            sent.append(chunk)
        yield sent, tokens[:num_drawn]


def stop_string(server):
    """Returns text from the middle of the greedy answer that spans several tokens."""
    text, _, _ = joined(chunks_of(server, PLAIN))
    middle = len(text) // 2
    return text[middle : middle + 6]


CASES = {
    "greedy": {},
    "seeded": SEEDED,
    "filtered": {**SEEDED, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "presence": {"presence_penalty": 1.5},
    "frequency": {**SEEDED, "frequency_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.3},
    "biased": {**SEEDED, "logit_bias": {"400": 5, "401": -100}},
    "bad words": {"bad_words": ["the", "a"]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
               "max_tokens": 60, "ignore_eos": False, "temperature": 1, "seed": 3},
    "min_tokens": {**SEEDED, "stop_token_ids": list(range(300, 2000, 7)), "min_tokens": 8},
}


def resume(server, body, drawn):
    body = {**body, "resume_token_ids": drawn}
    return chunks_of(server, body)


@pytest.mark.parametrize("case", [*CASES, "stop string", "stop string after min_tokens"])
def test_an_answer_goes_on_at_another_server(servers, case):
    first, second = servers
    if case in CASES:
        body = {**PLAIN, **CASES[case]}
    else:
        body = {**PLAIN, "stop": [stop_string(first)], "min_tokens": 12 if "min_tokens" in case else 0}
    whole = chunks_of(first, body)
    assert len(joined(whole)[1]) > 1, whole
    for sent, drawn in cuts(whole):
        rest = resume(second, body, drawn)
        text, _, end = joined(sent + rest)
        assert (text, drawn + joined(rest)[1], end) == joined(whole), (body, drawn)


@pytest.mark.parametrize("case", ["greedy", "seeded", "filtered", "biased"])
def test_dynamo_sends_the_drawn_tokens_as_a_prompt(servers, case):
    first, second = servers
    body = {**PLAIN, **CASES[case]}
    _, tokens, end = joined(chunks_of(first, body))
    for num_drawn in range(1, len(tokens)):
        moved = {**body, "prompt": PROMPT + tokens[:num_drawn], "max_tokens": len(tokens) - num_drawn}
        _, rest, moved_end = joined(chunks_of(second, moved))
        assert (tokens[:num_drawn] + rest, moved_end) == (tokens, end), num_drawn


def test_a_prefill_node_resumes_an_answer_itself(servers):
    first, _ = servers
    _, tokens, _ = joined(chunks_of(first, {**PLAIN, **SEEDED}))
    with Fleet() as fleet:
        fleet.decode(*THREADS)
        prefill = fleet.prefill(*THREADS)
        _, rest, _ = joined(resume(prefill, {**PLAIN, **SEEDED}, tokens[:5]))
        assert tokens[:5] + rest == tokens
        assert prefill.metric("corella_pd_stays_total", reason="resumed") == 1
