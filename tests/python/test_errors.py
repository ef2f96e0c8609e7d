"""Wrong options and parameters are refused at once, by name."""

import copy
import math
import pickle
import string
import subprocess
import sys
import typing

import pytest
from corella import LLM, EngineError, OptionError, RequestError, SamplingParams, UnsupportedError, _corella
from corella.options import ForeignOptions, Options
from patience import PATIENCE_S

QUESTION = [{"role": "user", "content": "Hello!"}]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_num_seq": 8}, "there is no option max_num_seq; did you mean max_num_seqs?"),
        ({"mem_fraction_static": 0.9}, "use gpu_memory_utilization, or kv_cache_memory to say how much memory"),
        ({"tensor_parallel_size": 2}, "matrices are not split over devices"),
        ({"dtype": "fp7"}, "invalid value 'fp7' for 'dtype' [possible values: auto, f32,"),
        ({"kv_cache_memory": "lots"}, "invalid value 'lots' for 'kv_cache_memory'"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false"),
        ({"max_num_seqs": {"a": 1}}, "max_num_seqs takes a text or a number"),
        ({"kv_cache_memory": "1K"}, "kv_cache_memory"),
        ({"draft_model": "x"}, "draft_model needs speculate draft"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"model": object()}, "is neither a text, a number, a list nor a dict"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization is nan: numbers must be finite"),
        ({"temperature": 1}, "use SamplingParams(temperature=...) or override_generation_config"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(OptionError) as refused:
        LLM(**options)
    assert message in str(refused.value)
    assert "--" not in str(refused.value)
    assert isinstance(refused.value, ValueError)


def test_every_option_has_a_type():
    names = {name for name, _ in _corella.keywords()}
    own = set(Options.__annotations__) - set(ForeignOptions.__annotations__)
    assert names - {"model", "no_enable_prefix_caching"} == own
    hints = typing.get_type_hints(Options)
    for name, kind in _corella.keywords():
        if name in hints:
            assert (bool in (hints[name], *typing.get_args(hints[name]))) == (kind == "switch"), name


# Options of `vllm serve` that the command line accepts, and that `vllm.LLM` does not have.
OF_SERVERS = {
    "api_server_count",
    "cohere_format",
    "cohere_is_reasoning_model",
    "custom_histogram_buckets",
    "disable_access_log_for_endpoints",
    "disable_fastapi_docs",
    "disable_frontend_multiprocessing",
    "disable_uvicorn_access_log",
    "enable_log_deltas",
    "enable_log_outputs",
    "enable_log_requests",
    "enable_offline_docs",
    "enable_prompt_tokens_details",
    "enable_request_id_headers",
    "enable_scale_out",
    "enable_server_load_tracking",
    "enable_ssl_refresh",
    "enable_tokenizer_info_endpoint",
    "enable_trace_replay",
    "fingerprint_mode",
    "fingerprint_value",
    "h11_max_header_count",
    "h11_max_incomplete_event_size",
    "log_error_stack",
    "max_log_len",
    "renderer_num_workers",
    "sse_keep_alive_interval",
    "uvicorn_log_level",
}


def test_what_the_command_line_tolerates_has_a_type():
    assert set(_corella.foreign_keywords()) - OF_SERVERS == set(ForeignOptions.__annotations__)
    assert OF_SERVERS <= set(_corella.foreign_keywords())


def test_options_of_vllm_with_an_effect_have_it():
    with LLM(kv_cache_memory_bytes=16 << 20, enable_chunked_prefill=False, skip_tokenizer_init=False) as own:
        assert own.generate("Once", SamplingParams(max_tokens=1))[0].finished
    for options, message in [
        ({"skip_tokenizer_init": True}, "the tokenizer comes from the model's tokenizer.json"),
        ({"speculative_config": {"method": "eagle3"}}, "speculative_config"),
        ({"kv_cache_memory_bytes": "lots"}, "kv_cache_memory"),
        ({"quantization": "fp8"}, "dtype int8, int8-grouped or int4 quantises others at load"),
    ]:
        with pytest.raises(OptionError, match=message) as refused:
            LLM(**options)
        assert "--" not in str(refused.value)


def test_options_mean_what_they_say(llm):
    with LLM(max_model_len=64, kv_cache_memory="16M", enable_prefix_caching=False, served_model_name=["a", "b"]) as own:
        assert own.max_model_len == 64
        prompt = "Once upon a time there was " * 3
        outputs = [own.generate(prompt, SamplingParams(max_tokens=1))[0] for _ in range(2)]
        assert [output.num_cached_tokens for output in outputs] == [0, 0]
        assert own.generate("Once", model="b")[0].finished
        with pytest.raises(RequestError, match="does not exist"):
            own.generate("Once", model="c")


@pytest.mark.parametrize(
    "call, param, message",
    [
        (lambda llm: llm.generate("x", SamplingParams(temperature=-1)), "temperature", "temperature"),
        (lambda llm: llm.generate("x", SamplingParams(top_p=2)), "top_p", "above 0 and at most 1"),
        (lambda llm: llm.generate("x", temprature=1), "temprature", "did you mean `temperature`"),
        (lambda llm: llm.generate("x", SamplingParams(temperature=math.nan)), "temperature", "temperature is nan"),
        (lambda llm: llm.generate("x", logit_bias={"1": math.inf}), "logit_bias", "numbers must be finite"),
        (lambda llm: llm.generate({"prompt": "x", "multi_modal_data": {}}), "multi_modal_data", "and nothing else"),
        (lambda llm: llm.generate(""), "prompt", "prompt"),
        (lambda llm: llm.generate([[10**6]]), "prompt", "prompt"),
        (lambda llm: llm.generate("a b c " * 5000), "prompt", "2048"),
        (lambda llm: llm.chat([{"role": "user"}, {"content": "x"}]), "messages", "messages"),
        (lambda llm: next(llm.stream("x", SamplingParams(max_tokens=0))), "max_tokens", "max_tokens"),
        (lambda llm: llm.post("/tokenize", {}), "messages", "is required"),
        (lambda llm: llm.chat(QUESTION, tools=[{"type": "magic"}]), "tools", "tools"),
    ],
)
def test_wrong_requests_name_the_field(llm, call, param, message):
    with pytest.raises(RequestError) as refused:
        call(llm)
    assert message in str(refused.value)
    assert refused.value.status in (400, 422)
    assert refused.value.param.startswith(param)
    assert isinstance(refused.value, ValueError)


def test_the_wrong_one_of_many_is_told(llm):
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, min_p=7), SamplingParams(max_tokens=4)]
    with pytest.raises(RequestError) as refused:
        llm.generate(["a", "b", "c"], params)
    assert (refused.value.index, refused.value.param) == (1, "min_p")
    assert str(refused.value).startswith("prompt 1: min_p")
    params[1] = SamplingParams(temperature=math.nan)
    with pytest.raises(RequestError, match="^prompt 1: temperature is nan: numbers must be finite") as refused:
        llm.generate(["a", "b", "c"], params)
    assert (refused.value.index, refused.value.param) == (1, "temperature")
    with pytest.raises(RequestError, match="^prompt 1: ") as refused:
        llm.embed(["a", ""])
    assert refused.value.index == 1


LATE = {"long": "x " * 3000, "empty": "", "no token": [99_999]}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_a_prompt_that_cannot_be_answered_is_found_before_any_is_computed(late):
    first = "A prompt whose pages would be cached. " * 4
    params = SamplingParams(max_tokens=1)
    with LLM(kv_cache_memory="16M", max_num_seqs=1) as own:
        rows = [first, "b", "c", "d", "e", late, "f", late]
        calls = [lambda: own.generate(rows, params), lambda: own.embed(rows)]
        if isinstance(late, str):
            calls.append(lambda: own.score(first, rows))
        for call in calls:
            with pytest.raises(RequestError, match="^prompt 5: "):
                call()
        assert own.generate(first, params)[0].num_cached_tokens == 0
        errors = own.check(rows, params)
        assert [error and error.index for error in errors] == [None] * 5 + [5, None, 7]
        assert [str(error) for error in own.check(rows, pooling_task="embed")[:5]] == ["None"] * 5


def test_prompts_can_be_checked_alone(llm):
    conversation = [{"role": "user", "content": "x " * 3000}]
    [error] = llm.check(conversation)
    assert isinstance(error, RequestError) and error.param == "messages" and "2048" in str(error)
    assert [error is None for error in llm.check([QUESTION, conversation])] == [True, False]
    with pytest.raises(RequestError, match="^prompt 2: .*2048"):
        llm.chat([QUESTION, QUESTION, conversation], SamplingParams(max_tokens=1))
    [good, wrong] = llm.check(["a", "b"], [SamplingParams(), SamplingParams(min_p=7)])
    assert good is None and wrong.param == "min_p" and str(wrong).startswith("prompt 1: ")
    assert llm.check([]) == [] and llm.check("a") == [None]
    assert llm.num_live_requests == 0


def test_prompts_that_no_request_can_hold_are_checked_like_others(llm):
    rows = ["a", float("nan"), None, "b\ud83d", ["a", "b"], "", "c"]
    errors = llm.check(rows)
    kinds = [type(error).__name__ for error in errors]
    assert kinds == ["NoneType", "TypeError", "TypeError", "RequestError", "TypeError", "RequestError", "NoneType"]
    assert [str(error).split(":")[0] for error in errors[3:6]] == ["prompt 3", "prompt 4 is ['a', 'b']", "prompt 5"]
    assert [error.index for error in errors if isinstance(error, RequestError)] == [3, 5]
    lone = [{"role": "user", "content": float("nan")}]
    assert [error is None for error in llm.check([QUESTION, lone, float("nan"), QUESTION])] == [True, False, False, True]
    assert [error is None for error in llm.check(["a", None], pooling_task="embed")] == [True, False]
    with pytest.raises(UnsupportedError, match='pooling_task is \'score\', and can be "embed" or "classify"'):
        llm.check(["a"], pooling_task="score")


@pytest.mark.parametrize("prompts", [[["a", "b"]], [[1, 2], ["a"]], [[[1, 2]]]])
def test_a_prompt_that_is_a_list_has_token_ids(llm, prompts):
    place = len(prompts) - 1
    for call in (llm.generate, llm.embed, lambda prompts: llm.score("a", prompts)):
        with pytest.raises(TypeError, match=f"^prompt {place} is .*give each text as a prompt of its own"):
            call(prompts)
    with pytest.raises(TypeError, match="^prompt 0 is .*a prompt that is a list has token ids"):
        llm.stream(["a", "b"])


def test_an_error_can_be_sent_to_another_process(llm):
    with pytest.raises(RequestError) as refused:
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(min_p=7)])
    error = refused.value
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(copied), vars(copied)) == (str(error), vars(error))


def test_every_api_tells_its_errors(llm):
    for path, body, message in [
        ("/v1/responses", {"input": "x", "temperature": -1}, "temperature"),
        ("/v1/messages", {"messages": QUESTION}, "max_tokens"),
        ("/api/generate", {"prompt": "x", "options": {"temperature": -1}}, "options.temperature"),
        ("/api/pull", {"model": "x"}, "corella pull x"),
    ]:
        with pytest.raises(RequestError, match=message) as refused:
            llm.post(path, body)
        assert refused.value.status in (400, 404)


def test_every_api_answers(llm):
    assert llm.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2})["status"] == "incomplete"
    fields = {"max_tokens": 2, "messages": QUESTION}
    assert llm.post("/v1/messages", fields)["stop_reason"] == "max_tokens"
    fields = {"messages": QUESTION, "stream": False, "options": {"num_predict": 2}}
    assert llm.post("/api/chat", fields)["done_reason"] == "length"


def test_a_stream_where_a_whole_answer_is_read_is_named(llm):
    for call in (
        lambda: llm.generate("x", SamplingParams(max_tokens=2), stream=True),
        lambda: llm.chat(QUESTION, SamplingParams(max_tokens=2), stream=True),
        lambda: llm.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True}),
        lambda: llm.post("/api/generate", {"prompt": "x", "options": {"num_predict": 2}}),
    ):
        with pytest.raises(RequestError, match="stream: must be false") as refused:
            call()
        assert refused.value.param == "stream"


def test_a_stream_that_cannot_go_on_is_the_request_s_fault(llm):
    def tokens(text):
        return llm.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    # A letter whose double consists of the letter's token twice. Only this token is allowed, but not twice in a row.
    twice = next(letter * 2 for letter in string.ascii_letters if tokens(letter * 2) == tokens(letter) * 2)
    params = SamplingParams(max_tokens=4, allowed_token_ids=tokens(twice)[:1], bad_words=[twice])
    with pytest.raises(RequestError) as refused:
        list(llm.stream("x", params))
    assert (refused.value.status, refused.value.code) == (400, "nothing_to_draw")


class Column:
    """A column of a table: its cells can be iterated, and that is all."""

    def __init__(self, *cells):
        self.cells = cells

    def __iter__(self):
        return iter(self.cells)


KINDS = "a prompt is a text, token ids or a dict"


@pytest.mark.parametrize(
    "prompts, message",
    [
        (3, f"prompt 0 is 3: {KINDS}"),
        (None, f"prompt 0 is None: {KINDS}"),
        ([3.5], f"prompt 0 is 3.5: {KINDS}"),
        (Column("hi", math.nan), f"prompt 1 is nan: {KINDS}"),
        (["hi", {"prompt": 3}], f"prompt 1 is 3: {KINDS}"),
        ({"prompt": None}, "prompt 0 is {'prompt': None}: a prompt that is a dict has"),
        ([{"role": "user"}], "prompt 0 is {'role': 'user'}: messages are for `chat`"),
        (b"x", "prompt 0 is b'x': decode the bytes"),
        (["hi", b"x"], "prompt 1 is b'x': decode the bytes"),
    ],
)
def test_prompts_of_no_known_kind_are_named(llm, prompts, message):
    for call in (llm.generate, llm.embed, lambda prompts: llm.score("a", prompts)):
        with pytest.raises(TypeError) as refused:
            call(prompts)
        assert str(refused.value).startswith(message)


@pytest.mark.parametrize("content", [math.nan, object()])
def test_a_message_without_text_is_named(llm, content):
    conversations = [QUESTION, [{"role": "user", "content": content}]]
    with pytest.raises(TypeError, match="^prompt 1: content is .*: the content of a message is a text"):
        llm.chat(conversations)
    with pytest.raises(TypeError, match="^prompt 1 is nan: a conversation is a list of messages"):
        llm.chat([QUESTION, math.nan])


def test_a_table_is_no_prompt(llm):
    class Table(dict):
        columns = ("prompt",)

    with pytest.raises(TypeError, match="give one of its columns"):
        llm.generate(Table(prompt=["hi"]))


def test_a_column_of_numbers_is_not_one_prompt(llm):
    class Column(list):
        dtype = "int64"

    ids = Column([1, 2])
    for call in (llm.generate, llm.embed, llm.check):
        with pytest.raises(TypeError, match="a column of numbers; give texts, or put the column in a list"):
            call(ids)
    assert llm.generate([ids], SamplingParams(max_tokens=1))[0].prompt_token_ids == ids
    assert llm.check(Column(["a", "b"])) == [None, None]


def test_an_answer_always_has_its_text():
    assert SamplingParams(detokenize=True) == SamplingParams()
    with pytest.raises(TypeError, match="SamplingParams has no detokenize=False"):
        SamplingParams(detokenize=False)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("guided_decoding", "use structured_outputs"), ("logits_processors", "logit_bias"), ("output_kind", "`stream`")],
)
def test_parameters_of_vllm_have_counterparts(name, advice):
    with pytest.raises(TypeError, match=advice):
        SamplingParams(**{name: None})


def test_the_name_of_a_form_is_suggested(llm):
    with pytest.raises(RequestError, match="did you mean `regex`"):
        llm.generate("hi", SamplingParams(structured_outputs={"regexp": "a"}))


def test_a_template_belongs_to_the_model(llm):
    with pytest.raises(UnsupportedError, match=r"LLM\(chat_template=...\)"):
        llm.chat(QUESTION, chat_template="{{ messages }}")


def test_a_column_of_token_ids_is_one_prompt(llm):
    [output] = llm.generate(Column(1, 2, 3), SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == [1, 2, 3]


@pytest.mark.parametrize("messages", ["Tell me a story.", QUESTION[0], None])
def test_what_is_no_conversation_is_told(llm, messages):
    with pytest.raises(TypeError, match="a conversation is a list of messages"):
        llm.chat(messages)


@pytest.mark.parametrize("params", [{"max_tokens": 4}, [{"max_tokens": 4}], SamplingParams, "max_tokens", 4])
def test_what_is_no_sampling_params_is_told_with_its_alternative(llm, params):
    for call in (
        lambda: llm.generate("hi", params),
        lambda: llm.generate(["hi"], params),
        lambda: llm.chat(QUESTION, params),
        lambda: llm.stream("hi", params),
    ):
        with pytest.raises(TypeError, match="^sampling_params is .*or write max_tokens=4 as a keyword"):
            call()


def test_a_misspelt_sampling_parameter_is_told_with_the_nearest():
    with pytest.raises(TypeError, match="SamplingParams has no temprature; did you mean temperature"):
        SamplingParams(temprature=1)
    with pytest.raises(TypeError, match="fields of the API are keywords of `generate`"):
        SamplingParams(guided_regex=1)


def test_a_closed_model_says_so():
    llm = LLM(kv_cache_memory="64M")
    llm.close()
    llm.close()
    assert repr(llm) == "<LLM, closed>"
    for call in (
        lambda: llm.generate("x"),
        lambda: llm.chat(QUESTION),
        lambda: llm.stream("x"),
        lambda: llm.astream("x"),
        lambda: llm.post("/tokenize", {"prompt": "x"}),
        lambda: llm.name,
    ):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_fork_says_where_the_threads_are():
    program = """
import os
from corella import LLM, EngineError
llm = LLM(kv_cache_memory="64M")
if os.fork() == 0:
    try:
        llm.generate("x")
    except EngineError as error:
        print(error, flush=True)
    llm.close()
    os._exit(0)
print(os.wait()[1], len(llm.generate("x")), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    said, ended = done.stdout.splitlines()
    assert "forked" in said and "spawn" in said and ended == "0 1", done


def test_a_fork_of_what_awaits_does_not_wait_for_ever():
    program = """
import asyncio, os, sys
from corella import LLM, EngineError, SamplingParams
llm = LLM(kv_cache_memory="64M")
params = SamplingParams(max_tokens=8, seed=1)
before = asyncio.run(llm.agenerate("x", params))[0].text
stream, other = llm.stream("x", params), llm.astream("x", params)
if os.fork() == 0:
    for read in (lambda: next(stream), lambda: asyncio.run(anext(other))):
        try:
            read()
        except EngineError as error:
            print("spawn" in str(error), flush=True)
    # Its own model works, and it may end as any program does.
    own = LLM(kv_cache_memory="64M")
    print(asyncio.run(own.agenerate("x", params))[0].text == before, flush=True)
    sys.exit(0)
print(os.wait()[1], "".join(delta.text for delta in stream) == before, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines() == ["True", "True", "True", "0 True"], done


class Reply:
    """A message as OpenAI's client returns it, an object of Pydantic."""

    role = "assistant"

    def model_dump(self, exclude_none):
        assert exclude_none
        return {"role": self.role, "content": "Hello!"}

    @classmethod
    def model_json_schema(cls):
        return {"$defs": {}}


def test_messages_may_be_objects_of_pydantic(llm):
    params = SamplingParams(max_tokens=4, temperature=0)
    own, plain = ([*QUESTION, reply, *QUESTION] for reply in (Reply(), {"role": "assistant", "content": "Hello!"}))
    assert llm.chat(own, params)[0].outputs == llm.chat(plain, params)[0].outputs
    assert llm.chat([own, own], params)[1].outputs == llm.chat(own, params)[0].outputs


def test_a_half_of_a_character_is_named(llm):
    with pytest.raises(RequestError, match=r"^prompt 1: prompt is no valid text: it has '\\ud83d'.*lone surrogate") as refused:
        llm.generate(["é", "a\ud83d"])
    assert (refused.value.index, refused.value.param) == (1, "prompt")
    with pytest.raises(RequestError, match="^messages is no valid text"):
        llm.chat([{"role": "user", "content": "\ud83d"}])


def test_a_field_that_does_not_exist_cannot_be_set():
    params = SamplingParams(max_tokens=3)
    with pytest.raises(AttributeError, match="max_tokns"):
        params.max_tokns = 3
    params.max_tokens = 4
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params.clone() == SamplingParams(max_tokens=4)
