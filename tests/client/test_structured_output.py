"""Answers that must follow a schema, checked by a validator that is independent of the masks."""

import asyncio
import json
import os
import re
import tarfile
from collections import Counter
from datetime import date
from decimal import Decimal
from pathlib import Path

import jsonschema
import openai
import pytest
from patience import PATIENCE_S
from pydantic import BaseModel, Field
from server_process import ROOT, ServerProcess

SCHEMAS = Path(__file__).resolve().parents[1] / "schemas" / "schemas.jsonl"
# The source of the package `jsonschema` has the JSON-Schema-Test-Suite; `cargo xtask e2e` fetches it.
SUITE = Path(os.environ.get("CORELLA_SCHEMA_SUITE", ROOT / "target/ci-schema-suite"))
MAX_TOKENS = 160
CONCURRENCY = 8


@pytest.fixture(scope="module")
def server():
    with ServerProcess() as server:
        yield server


def answers(server, schemas):
    """Yields text and finish reason of an answer to each schema, or the error that refuses it."""

    async def ask(client, places, at, schema):
        async with places:
            try:
                answer = await client.chat.completions.create(
                    model=server.model(),
                    messages=[{"role": "user", "content": "A fox."}],
                    max_tokens=MAX_TOKENS,
                    temperature=1.0,
                    seed=at,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "answer", "schema": schema},
                    },
                )
            except openai.BadRequestError as error:
                return error
            choice = answer.choices[0]
            return choice.message.content, choice.finish_reason

    async def ask_all():
        places = asyncio.Semaphore(CONCURRENCY)
        async with openai.AsyncOpenAI(
            base_url=server.base_url + "/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
        ) as client:
            asked = [ask(client, places, at, schema) for at, schema in enumerate(schemas)]
            return await asyncio.gather(*asked)

    server.model()
    return asyncio.run(ask_all())


@pytest.mark.night
def test_answers_follow_500_schemas(server):
    schemas = [json.loads(line) for line in SCHEMAS.read_text().splitlines()]
    assert len(schemas) == 500
    counts, refused = Counter(), []
    for at, (schema, answer) in enumerate(zip(schemas, answers(server, schemas))):
        jsonschema.Draft202012Validator.check_schema(schema)
        if isinstance(answer, openai.BadRequestError):
            assert answer.param.startswith("response_format.json_schema.schema"), answer
            refused.append(f"{at}: {answer.message[:200]}")
            continue
        text, reason = answer
        counts[reason] += 1
        if reason == "stop":
            value = json.loads(text)
            assert is_valid(value, schema), (at, text, schema)
        else:
            assert reason == "length"
            assert_beginning(text, schema, at)
    print(f"{dict(counts)}, {len(refused)} refused:", *refused, sep="\n")
    assert len(refused) <= 50
    # Both kinds of ends occurred.
    assert counts["stop"] > 200 and counts["length"] > 10


def suite():
    """The schemas of the JSON-Schema-Test-Suite for draft 2020-12, by file and description."""
    with tarfile.open(next(SUITE.glob("jsonschema-*.tar.gz"))) as archive:
        for member in archive:
            if re.search("/json/tests/draft2020-12/[^/]*[.]json$", member.name):
                for case in json.load(archive.extractfile(member)):
                    yield f"{Path(member.name).stem}: {case['description']}", case["schema"]


@pytest.mark.night
def test_answers_follow_the_test_suite(server):
    """Tests constraints of any kind: unsupported constraints are refused, and no constraint is left out silently."""
    cases = dict(suite())
    counts, refused = Counter(), Counter()
    for (name, schema), answer in zip(cases.items(), answers(server, cases.values())):
        if isinstance(answer, openai.BadRequestError):
            assert answer.param.startswith("response_format.json_schema.schema"), (name, answer)
            refused[name.split(":")[0]] += 1
            continue
        text, reason = answer
        counts[reason] += 1
        if reason == "stop":
            assert is_valid(json.loads(text), schema), (name, text, schema)
    print(f"{dict(counts)}, {refused.total()} of {len(cases)} refused: {dict(refused)}")
    assert counts["stop"] > 50


def is_valid(value, schema):
    checker = jsonschema.FormatChecker(["ipv4", "uuid", "email"])
    # RFC 3339 has a year 0000, but Python's dates do not.
    is_date = lambda text: not isinstance(text, str) or bool(date.fromisoformat(re.sub("^0000", "2000", text)))  # noqa: E731
    checker.checks("date", raises=ValueError)(is_date)
    validator = jsonschema.Draft202012Validator(exact(schema), format_checker=checker)
    return validator.is_valid(exact(value))


def exact(value):
    """Reads numbers as written: 5305.5305 is a multiple of 0.0001, but not in floating point."""

    def number(text):
        written = Decimal(text)
        whole = written.to_integral_value()
        return int(whole) if whole == written else written

    return json.loads(json.dumps(value), parse_float=number)


def assert_beginning(text, schema, at):
    """The complete part of the text is valid, and the open part can still become valid."""
    value = closed(text)
    assert is_valid(value, loosened(schema)), (at, text, schema)


def loosened(schema):
    """Returns the schema without the rules that an object or array can only satisfy when complete."""
    if isinstance(schema, list):
        return [loosened(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    loose = {}
    for key, value in schema.items():
        if key in ("required", "minItems", "minProperties"):
            continue
        if key in ("properties", "$defs"):
            loose[key] = {name: loosened(part) for name, part in value.items()}
        elif key in ("enum", "const"):
            loose[key] = value
        else:
            loose["anyOf" if key == "oneOf" else key] = loosened(value)
    return loose


SCALAR = re.compile(
    r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
    r"|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null"
)
OPEN_SCALAR = re.compile(
    r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*(?:\\(?:u[0-9a-fA-F]{0,3})?)?'
    r"|-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]*)?)?"
    r"|t|tr|tru|f|fa|fal|fals|n|nu|nul"
)
SPACE = re.compile(r"[ \t\r\n]*")


class Cut(Exception):
    """The text ends here."""


def closed(text):
    """Returns the value of a text that was cut off, without the scalar or the key that is open at its end."""
    at = 0

    def skip():
        nonlocal at
        at = SPACE.match(text, at).end()
        if at == len(text):
            raise Cut

    def take(char):
        nonlocal at
        skip()
        assert text[at] == char, f"{char} is missing at {at} of {text}"
        at += 1

    def scalar():
        nonlocal at
        match = SCALAR.match(text, at)
        # A number that reaches up to the end may have more digits to come.
        if match is None or (match.end() == len(text) and match[0][-1].isdigit()):
            assert OPEN_SCALAR.fullmatch(text, at), f"no JSON at {at} of {text}"
            raise Cut
        at = match.end()
        return json.loads(match[0])

    def read(keep):
        nonlocal at
        skip()
        if text[at] == "{":
            value = {}
            keep(value)
            members(value)
        elif text[at] == "[":
            value = []
            keep(value)
            elements(value)
        else:
            keep(scalar())

    def members(value):
        nonlocal at
        at += 1
        skip()
        if text[at] == "}":
            at += 1
            return
        while True:
            skip()
            assert text[at] == '"', f"no key at {at} of {text}"
            key = scalar()
            take(":")
            read(lambda inner: value.__setitem__(key, inner))
            skip()
            if text[at] == "}":
                at += 1
                return
            take(",")

    def elements(value):
        nonlocal at
        at += 1
        skip()
        if text[at] == "]":
            at += 1
            return
        while True:
            read(value.append)
            skip()
            if text[at] == "]":
                at += 1
                return
            take(",")

    whole = [{}]
    try:
        read(lambda value: whole.__setitem__(0, value))
    except Cut:
        pass
    assert at <= len(text)
    return whole[0]


@pytest.mark.parametrize(
    "text, value",
    [
        ('{"a": 1, "b": [true, {"c": "x', {"a": 1, "b": [True, {}]}),
        ('{"a": 12', {}),
        ('{"a": "x\\u00', {}),
        ('{"a"', {}),
        ("", {}),
    ],
)
def test_what_was_cut_off_is_closed(text, value):
    assert closed(text) == value


@pytest.mark.parametrize("text", ["{1", '{"a" 1', "[tru3", '{"a": 01', '{"a":1]'])
def test_what_is_no_beginning_of_json_is_noticed(text):
    with pytest.raises(AssertionError):
        closed(text)


def test_pydantic_models_are_parsed(server):
    class Pet(BaseModel):
        name: str = Field(max_length=10)
        legs: int = Field(ge=0, le=8)

    class Owner(BaseModel):
        pets: list[Pet] = Field(min_length=1, max_length=2)
        is_home: bool

    answer = server.client.chat.completions.parse(
        model=server.model(),
        messages=[{"role": "user", "content": "A fox and its owner."}],
        response_format=Owner,
        max_tokens=400,
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Owner)
    assert all(pet.legs <= 8 and len(pet.name) <= 10 for pet in parsed.pets)


def test_a_bad_schema_is_told_with_its_place(server):
    schema = {"type": "object", "properties": {"a": {"type": "text"}}}
    with pytest.raises(openai.BadRequestError) as error:
        server.client.chat.completions.create(
            model=server.model(),
            messages=[{"role": "user", "content": "A fox."}],
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        )
    assert error.value.param == "response_format.json_schema.schema.properties.a"
