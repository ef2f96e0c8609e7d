"""Tests of vectors of texts: OpenAI's client and frameworks against the built binary, and the golden model's hidden states."""

import array
import math

import golden_model
import openai
import pytest
from server_process import ServerProcess

TEXTS = ["Tell me a story about a fox and a lantern.", "A fox told a story.", "What does tea cost?"]
GOLDEN = "qwen3-gqa-tied"


@pytest.fixture(scope="module")
def server():
    with ServerProcess() as server:
        yield server


def assert_close(found, expected, tolerance=1e-6):
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= tolerance


def vectors(server, texts=TEXTS, **fields):
    answer = server.client.embeddings.create(model=server.model(), input=texts, **fields)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def test_openai_in_both_formats(server):
    # By default, the client requests base64 and reads it.
    from_bytes = vectors(server)
    from_numbers = vectors(server, encoding_format="float")
    for bytes_read, numbers in zip(from_bytes, from_numbers, strict=True):
        assert_close(bytes_read, numbers)
        assert math.hypot(*numbers) == pytest.approx(1, abs=1e-5)
    assert_close(vectors(server, TEXTS[1])[0], from_bytes[1])


def test_a_batch_changes_no_bit(server):
    together = vectors(server, TEXTS * 20, extra_body={"pooling": "mean"})
    alone = [vectors(server, text, extra_body={"pooling": "mean"})[0] for text in TEXTS]
    assert together == alone * 20


def test_dimensions(server):
    whole = vectors(server, TEXTS[0])[0]
    length = math.hypot(*whole[:8])
    assert_close(vectors(server, TEXTS[0], dimensions=8)[0], [x / length for x in whole[:8]])
    with pytest.raises(openai.BadRequestError) as error:
        vectors(server, dimensions=len(whole) + 1)
    assert error.value.param == "dimensions"


def test_usage_and_token_ids(server):
    answer = server.client.embeddings.create(model=server.model(), input=[[5, 6, 7], [8, 9]])
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 5)


# Frameworks are imported where they are used, because importing them takes seconds.
@pytest.mark.night
def test_langchain(server):
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        base_url=server.base_url + "/v1",
        api_key="unused",
        model=server.model(),
        check_embedding_ctx_length=False,
    )
    expected = vectors(server)
    for found, whole in zip(embeddings.embed_documents(TEXTS), expected, strict=True):
        assert_close(found, whole)
    assert_close(embeddings.embed_query(TEXTS[0]), expected[0])


@pytest.mark.night
def test_litellm(server):
    import litellm

    answer = litellm.embedding(
        model=f"openai/{server.model()}",
        api_base=server.base_url + "/v1",
        api_key="unused",
        input=TEXTS,
        encoding_format="float",
    )
    for item, whole in zip(answer.data, vectors(server), strict=True):
        assert_close(item["embedding"], whole)


def check_golden(server, name):
    """The vectors equal Transformers', up to keys and values of 16 bits."""
    golden = array.array("f", (golden_model.GOLDEN / name / "hidden.f32").read_bytes())
    cases = golden_model.cases(name)
    size = len(golden) // (2 * len(cases))
    prompts = [golden_model.text_of(case["prompt"]) for case in cases]
    for at, pooling in enumerate(["last", "mean"]):
        found = vectors(server, prompts, extra_body={"pooling": pooling})
        for index, vector in enumerate(found):
            first = (2 * index + at) * size
            expected = golden[first : first + size]
            length = math.hypot(*expected)
            assert_close(vector, [x / length for x in expected], tolerance=2e-2)


def test_the_golden_model(golden_folder):
    with ServerProcess(golden_folder) as server:
        check_golden(server, GOLDEN)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("qwen3-gqa-untied", "Qwen3Model"), ("qwen3-gqa-untied", "Qwen3ForCausalLM"), ("mistral", "MistralModel")],
)
def test_a_model_without_a_head(tmp_path, name, architecture):
    """Qwen3-Embedding-8B and E5-Mistral are stored this way."""
    with ServerProcess(golden_model.make_decoder(name, tmp_path / name, architecture)) as server:
        check_golden(server, name)
        with pytest.raises(openai.BadRequestError, match="no output head") as error:
            server.client.completions.create(model=server.model(), prompt="a")
        assert error.value.param == "model"
        messages = [{"role": "user", "content": "a"}]
        with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
            server.client.chat.completions.create(model=server.model(), messages=messages, stream=True)


def test_score_and_rerank(server):
    post = server.client.post
    first, *others = vectors(server, [TEXTS[0], *TEXTS])
    expected = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
    score = post("/score", body={"text_1": TEXTS[0], "text_2": TEXTS}, cast_to=object)
    assert_close([item["score"] for item in score["data"]], expected, 1e-5)
    ranked = post("/rerank", body={"query": TEXTS[0], "documents": TEXTS, "top_n": 2}, cast_to=object)
    best = sorted(range(len(TEXTS)), key=lambda index: -expected[index])[:2]
    assert [item["index"] for item in ranked["results"]] == best
    assert ranked["results"][0]["document"]["text"] == TEXTS[0]
