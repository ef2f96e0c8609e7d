"""The built-in model answers what the documents ask of it, and what people type first."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_process import ROOT, ServerProcess

sys.path.append(str(ROOT / "models/nano"))

import first_things

SEEDS = range(4)


@pytest.fixture(scope="module")
def replies():
    """Each prompt's case, an answer to it and whether that ended, for each seed."""
    cases = first_things.drawn() + first_things.first()
    assert len(cases) > 50
    with ServerProcess("--kv-cache-memory", "64M") as server, ThreadPoolExecutor(8) as pool:
        asked = first_things.Server(server.base_url)
        jobs = [(case, seed) for case in cases for seed in SEEDS]
        return list(pool.map(lambda job: (job[0], *asked.reply(job[0], seed=job[1])), jobs))


def check_rare(replies, is_wrong, share):
    """Draws differ by instruction set, so a small share of the answers may be wrong."""
    wrong = [(case.where, case.shown, reply) for case, reply, has_ended in replies if is_wrong(case, reply, has_ended)]
    assert len(wrong) <= share * len(replies), wrong


def test_the_prompts_of_the_documents_are_answered(replies):
    of_documents = [each for each in replies if each[0].where != "first"]
    check_rare(of_documents, lambda _, reply, __: first_things.REFUSAL.search(reply), 0.05)


def test_what_people_type_first_is_answered(replies):
    first = [each for each in replies if each[0].where == "first"]
    check_rare(first, lambda _, reply, __: first_things.REFUSAL.search(reply), 0.05)


def test_the_answers_end_by_themselves(replies):
    check_rare(replies, lambda _, __, has_ended: not has_ended, 0.03)


def test_the_answers_are_of_the_wanted_kind(replies):
    """Stories where stories are asked for, right sums, and the model's name where that is asked."""
    check_rare(replies, lambda case, reply, _: not first_things.is_kind(case, reply), 0.1)
