"""What the corpus promises, in seconds and without PyTorch: run with pytest."""

import itertools
import json
import math
import random
import re

import pytest

import corpus
import first_things
from wordings import HELD, RELATIONS, RELATIONS_HELD
from words import LISTS, is_held_word, made_up


@pytest.fixture(autouse=True)
def end_of_the_plan(monkeypatch):
    """The corpus as training sees it last: with all that joined it on the way."""
    for name, value in (("PHRASES", True), ("LAST", True), ("STRANGER", 3), ("FRESH", True), ("FIRST_SHARE", 0.25)):
        monkeypatch.setattr(corpus, name, value)


def training(count=3000):
    rng = random.Random("test")
    return [corpus.dialogue(rng) for _ in range(count)]


def test_the_same_seed_writes_the_same_text():
    assert training(50) == training(50)
    again = [d.messages for d in corpus.held_out(3, 4)]
    assert again == [d.messages for d in corpus.held_out(3, 4)]


def test_the_held_out_set_does_not_know_the_plan(monkeypatch):
    late = [d.messages for d in corpus.held_out(3, 4)]
    for name, value in (("PHRASES", False), ("LAST", False), ("STRANGER", 1), ("FRESH", False), ("FIRST_SHARE", 0.0)):
        monkeypatch.setattr(corpus, name, value)
    assert late == [d.messages for d in corpus.held_out(3, 4)]


def test_word_lists_are_apart():
    for kind, (train, held) in LISTS.items():
        assert not set(map(str.lower, train)) & set(map(str.lower, held)), kind
        assert len(set(train)) == len(train) and len(set(held)) == len(held), kind


def test_words_of_the_files_are_apart():
    kept = {part.lower() for _, held in LISTS.values() for word in held for part in word.split()}
    for words in (corpus.RARE_WORDS, corpus.RARE_NAMES):
        assert len(words) > 400 and kept.isdisjoint(part.lower() for word in words for part in word.split())


def test_made_up_words_are_apart():
    rng = random.Random(5)
    assert all(is_held_word(made_up(rng, True)) for _ in range(200))
    assert not any(is_held_word(made_up(rng, False)) for _ in range(200))


def shapes(template):
    """Everything that a template can say, without marks and capitals."""
    parts = [p[1:-1].split("|") if p[0] == "[" else [p] for p in re.findall(r"\[[^\]]*\]|[^\[\]]+", template)]
    many = math.prod(map(len, parts)) > 4000
    for choice in itertools.product(*([p[:3] for p in parts] if many else parts)):
        yield re.sub(r"[^\w<>]+", " ", "".join(choice).lower()).strip()


def assert_apart(train, held, where):
    met = {shape for template in train for shape in shapes(template)}
    assert held, where
    for template in held:
        assert met.isdisjoint(shapes(template)), (where, template)


def test_wordings_are_apart():
    for w in corpus.Wording.all:
        # The held-out set asks for one sum at a time, its ways to write a pair were all known, and it says what it says.
        if w.name not in ("DRILL", "PAIR_STYLE", "STATE") and not w.name.startswith("FIRST_"):
            assert_apart(w.train, w.held, w.name)
    for name in ("ADD", "SUB", "MUL"):
        assert_apart(corpus.FIRST_WORDINGS[name].train, HELD.get(name) or ["<none>"], name)
    for name, held in RELATIONS_HELD.items():
        r = RELATIONS[name]
        assert held.asks and held.asks.keys() <= r.asks.keys()
        if r.say:
            assert_apart(r.say, held.say, name)
            before = {shape.removesuffix("<s>") for template in corpus.STATE.train for shape in shapes(template)}
            bare = [shape[len(b):] for template in held.say for shape in shapes(template) for b in before if shape.startswith(b)]
            assert set(bare).isdisjoint(shape for template in r.say for shape in shapes(template)), name
        for slot, ask in held.asks.items():
            assert_apart(r.asks[slot].direct + r.asks[slot].indirect, ask.direct + ask.indirect, (name, slot))
    assert RELATIONS_HELD.keys() <= RELATIONS.keys()


def test_keys_are_apart():
    spread = lambda table: {key for keys in table.values() for key in keys}
    assert not (spread(corpus.KEY_OF) | set(corpus.FIELDS)) & (spread(corpus.KEY_OF_HELD) | set(corpus.FIELDS_HELD))


def test_no_held_out_turn_occurs_in_training():
    met = {text.lower() for messages in training(8000) for role, text in messages if role == "user"}
    for d in corpus.held_out(2024, 60):
        assert d.messages[-2][1].lower() not in met, d.messages[-2]


def test_first_things_are_apart():
    assert len(first_things.paraphrases()) == 100
    held = {corpus.plainly(case.shown) for case in first_things.paraphrases()}
    met = {corpus.plainly(text) for messages in training(20000) for role, text in messages if role == "user"}
    assert met.isdisjoint(held), met & held


def test_prompts_are_drawn_from_the_documents():
    cases = {case.shown for case in first_things.drawn()}
    assert {"Tell me a story about a cat who found a key.", "Make a list of five fruits.", "Tell me a story about a fox. / And then?",
            "Be brief. / Say hello. / Say it again.", "You tell stories for children. / Tell me a story.", "Once upon a time"} <= cases
    assert cases.isdisjoint(first_things.ELSEWHERE)


def test_held_out_sums_are_apart():
    for messages in training():
        for role, text in messages:
            for a, b in re.findall(r"(\d+) \+ (\d+) = ", text if role == "assistant" else ""):
                assert not corpus.held_pair(int(a), int(b))
    for d in corpus.held_out(1, 30):
        if d.skill == "sums":
            a, b = map(int, re.match(r"(\d+) \+ (\d+)", d.check["sum"]).groups())
            assert corpus.held_pair(a, b) and a >= 10 and b >= 10


def test_sums_are_right():
    found = 0
    for messages in training():
        for role, text in messages:
            for a, op, b, c in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", text if role == "assistant" else ""):
                assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op] == int(c)
                found += 1
    assert found > 500


def test_json_is_valid():
    found = 0
    for messages in training():
        for role, text in messages:
            if role == "assistant" and text[0] in "{[":
                assert corpus.dumps(json.loads(text)) == text
                found += 1
    assert found > 400


def test_lists_do_not_repeat():
    found = 0
    for messages in training():
        for role, text in messages:
            if role == "assistant" and text.startswith("1. "):
                items = [line.split(". ", 1)[1] for line in text.splitlines()]
                assert len(set(items)) == len(items), text
                found += 1
    assert found > 60


def test_stories_use_what_was_asked_for():
    from evaluate import judge

    for held in (False, True):
        for i in range(300):
            d = corpus.story(corpus.Context(random.Random(i), held))
            assert judge(d.check, d.messages[-1][1]), d


def test_wanted_replies_pass_their_own_check():
    from evaluate import judge

    for d in corpus.held_out(11, 40):
        assert judge(d.check, d.messages[-1][1]), d


def test_templates_leave_no_marks():
    for messages in training():
        for role, text in messages:
            assert not re.search(r"[<>¶]|\[(?!\"|\d|\])", re.sub("->|=>|>>>?|</?(text|doc|context|note)>", "", text)), text
            assert "  " not in text, text
