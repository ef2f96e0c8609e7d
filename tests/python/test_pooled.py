"""Vectors, classes and scores are those of sentence-transformers and Transformers."""

import json

import pytest
from conftest import ROOT
from corella import LLM, RequestError, UnsupportedError

# The weights are f32 in the golden results, too.
TOLERANCE = 1e-4


def load(name):
    folder = ROOT / "tests/encoder" / name
    return LLM(folder), json.loads((folder / "golden.json").read_text())


@pytest.mark.parametrize("name", ["bert-pair", "xlm-roberta-pair", "qwen3-pair"])
def test_scores_are_those_of_the_reranker(name):
    llm, golden = load(name)
    with llm:
        first, second = zip(*golden["pairs"])
        outputs = llm.score(list(first), list(second))
        assert [output.outputs.score for output in outputs] == pytest.approx(golden["scores"], abs=TOLERANCE)
        # The first two pairs have the same first text.
        assert first[0] == first[1]
        with_one = llm.score(first[0], list(second[:2]))
        assert [output.outputs for output in with_one] == [output.outputs for output in outputs[:2]]
        with pytest.raises(RequestError, match="data_1 has 2 prompts and data_2 has 3"):
            llm.score(list(first[:2]), list(second))


def test_scores_of_other_models_are_cosines():
    llm, golden = load("bert-mean")
    with llm:
        texts, vectors = golden["texts"], golden["vectors"][""]
        outputs = llm.score(texts[0], texts[1:])
        cosine = lambda a, b: sum(x * y for x, y in zip(a, b))
        expected = [cosine(vectors[0], vector) for vector in vectors[1:]]
        assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name, labels", [("bert-classes", ["calm", "glad", "sad"]), ("roberta-classes", ["off", "on"])])
def test_classes_are_as_likely_as_transformers_says(name, labels):
    llm, golden = load(name)
    with llm:
        outputs = llm.classify(golden["texts"])
        encoded = llm.encode(golden["texts"], pooling_task="classify")
        for output, numbers, text, expected in zip(outputs, encoded, golden["texts"], golden["probabilities"]):
            assert output.outputs.probs == numbers.outputs.data == pytest.approx(expected, abs=TOLERANCE)
            assert output.outputs.num_classes == len(labels)
            assert output.outputs.label == labels[expected.index(max(expected))]
            assert (output.prompt, output.prompt_token_ids) == (text, llm.get_tokenizer().encode(text))
        with pytest.raises(RequestError, match="/classify"):
            llm.score("a", "b")


def test_vectors_are_those_of_sentence_transformers_with_each_of_the_models_prompts():
    llm, golden = load("bert-mean")
    with llm:
        for prompt_name, vectors in golden["vectors"].items():
            fields = {"prompt_name": prompt_name} if prompt_name else {}
            outputs = llm.embed(golden["texts"], **fields)
            for output, vector in zip(outputs, vectors):
                assert output.outputs.embedding == pytest.approx(vector, abs=TOLERANCE), prompt_name


def test_encode_has_the_numbers_of_the_task(llm):
    [output] = llm.encode("a fox", dimensions=8)
    assert output.outputs.data == llm.embed("a fox", dimensions=8)[0].outputs.embedding
    with pytest.raises(UnsupportedError, match='can be "embed" or "classify"'):
        llm.encode("a fox", pooling_task="token_embed")
    with pytest.raises(RequestError, match="classification head"):
        llm.encode("a fox", pooling_task="classify")
