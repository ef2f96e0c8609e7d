"""What the corpus promises, in seconds and without PyTorch: run with pytest."""

import json
import random
import re
from pathlib import Path

import corpus
from words import LISTS, is_held_word, made_up

HERE = Path(__file__).parent


def training(count=3000):
    """Dialogues of all stages of training."""
    rng = random.Random("test")
    out = []
    for corpus.STAGE in (4, 3, 2, 1):
        out += [corpus.dialogue(rng) for _ in range(count // 4)]
    return out


def test_the_same_seed_writes_the_same_text():
    assert training(50) == training(50)
    again = [d.messages for d in corpus.held_out(3, 4)]
    assert again == [d.messages for d in corpus.held_out(3, 4)]


def test_word_lists_are_apart():
    for kind, (train, held) in LISTS.items():
        assert not set(map(str.lower, train)) & set(map(str.lower, held)), kind
        assert len(set(train)) == len(train) and len(set(held)) == len(held), kind


def test_made_up_words_are_apart():
    rng = random.Random(5)
    assert all(is_held_word(made_up(rng, True)) for _ in range(200))
    assert not any(is_held_word(made_up(rng, False)) for _ in range(200))


def test_wordings_are_apart():
    for w in corpus.Wording.all:
        assert w.train and w.held and not set(w.train) & set(w.held)
    for r in corpus.RELATIONS:
        assert r.say and r.say_held and not set(r.say) & set(r.say_held), r.name
        for a in r.asks:
            assert a.direct and a.indirect and a.direct_held and a.indirect_held, (r.name, a.slot)
            assert not set(a.direct) & set(a.direct_held) and not set(a.indirect) & set(a.indirect_held)


def test_keys_are_apart():
    assert not set(corpus.FIELDS) & set(corpus.FIELDS_HELD)
    spread = lambda table: {key for keys in table.values() for key in keys}
    assert not (spread(corpus.KEY_OF) | set(corpus.FIELDS)) & spread(corpus.KEY_OF_HELD)


def test_no_held_out_turn_occurs_in_training():
    met = {text.lower() for messages in training(8000) for role, text in messages if role == "user"}
    for d in corpus.held_out(2024, 60):
        assert d.messages[-2][1].lower() not in met, d.messages[-2]


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
    assert found > 100


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
            assert not re.search(r"[<>¶]|\[(?!\"|\d|\])", re.sub("->|=>|>>", "", text)), text
            assert "  " not in text, text
