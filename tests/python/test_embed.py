"""Vectors of prompts."""

import math

import pytest
from corella import RequestError


def test_vectors_are_those_of_the_api(llm):
    prompts = ["a fox", "an owl with a lantern", "a fox"]
    outputs = llm.embed(prompts)
    data = llm.post("/v1/embeddings", {"input": prompts})["data"]
    assert [output.prompt for output in outputs] == prompts
    for output, row in zip(outputs, data):
        assert output.outputs.embedding == row["embedding"]
        assert output.outputs.hidden_size == len(row["embedding"])
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
        assert math.isclose(math.hypot(*output.outputs.embedding), 1, rel_tol=1e-4)
    assert outputs[0].outputs == outputs[2].outputs != outputs[1].outputs


def test_one_prompt_may_be_token_ids(llm):
    [by_text] = llm.embed("a fox", pooling="mean", dimensions=16)
    [by_ids] = llm.embed({"prompt_token_ids": by_text.prompt_token_ids}, pooling="mean", dimensions=16)
    assert by_ids.prompt is None and len(by_ids.outputs.embedding) == 16
    assert by_ids.outputs == by_text.outputs


def test_a_wrong_field_is_named(llm):
    with pytest.raises(RequestError, match="did you mean `pooling`"):
        llm.embed("x", poling="mean")
