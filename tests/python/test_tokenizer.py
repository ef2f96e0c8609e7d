"""The tokenizer, used as vLLM's scripts use it."""

import pytest
from corella import LLM, EngineError, RequestError, SamplingParams

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


def test_texts_come_back(llm):
    tokenizer = llm.get_tokenizer()
    for text in ("a fox", "", " two  spaces\n", "Füchse 🦊"):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(token_ids) == text
        assert token_ids == llm.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert tokenizer.decode(tokenizer.encode("x", add_special_tokens=False)[0]) == "x"


def test_a_template_gives_the_prompt_of_a_chat(llm):
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    params = SamplingParams(max_tokens=8, temperature=0)
    [chat] = llm.chat(QUESTION, params)
    assert prompt == chat.prompt_token_ids
    [same] = llm.generate({"prompt_token_ids": prompt}, params)
    assert same.outputs[0].token_ids == chat.outputs[0].token_ids
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert "Be brief." in text and "Who are you?" in text
    open_end = tokenizer.apply_chat_template(QUESTION)
    assert len(open_end) < len(prompt) and prompt[: len(open_end)] == open_end


def test_special_tokens_can_be_left_out(llm):
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(QUESTION)
    shown, plain = tokenizer.decode(prompt), tokenizer.decode(prompt, skip_special_tokens=True)
    assert len(plain) < len(shown) and "Who are you?" in plain


def test_ids_outside_the_vocabulary_are_named(llm):
    tokenizer = llm.get_tokenizer()
    for wrong in (-1, len(tokenizer)):
        with pytest.raises(RequestError, match=rf"token_ids\[1\] is {wrong}, ") as refused:
            tokenizer.decode([0, wrong])
        assert refused.value.param == "token_ids"


def test_a_closed_model_has_none():
    llm = LLM(kv_cache_memory="16M", max_model_len=64, tensor_parallel_size=1, trust_remote_code=True)
    tokenizer = llm.get_tokenizer()
    assert len(tokenizer) == tokenizer.vocab_size > 100
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.get_tokenizer()


def test_lists_of_texts_are_converted_and_other_names_say_where_they_are(llm):
    tokenizer = llm.get_tokenizer()
    texts = ["a fox", "an owl and a cub"]
    ids = [tokenizer.encode(text) for text in texts]
    assert tokenizer(texts) == {"input_ids": ids} and tokenizer(texts[0]) == {"input_ids": ids[0]}
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == texts
    with pytest.raises(TypeError, match="encode takes one text, not list"):
        tokenizer.encode(texts)
    with pytest.raises(AttributeError, match="the tokenizer has no eos_token_id: .*AutoTokenizer"):
        tokenizer.eos_token_id
    assert not hasattr(tokenizer, "get_vocab")
