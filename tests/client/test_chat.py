"""`corella chat`, typed in a terminal and piped."""

import json
import re
import subprocess

import pytest
from patience import PATIENCE_S
from server_process import BINARY
from terminal import OPTIONS, PROMPT, Terminal


@pytest.fixture
def terminal(tmp_path):
    return Terminal(tmp_path)


def pipe(text, *options):
    result = subprocess.run(
        [BINARY, "chat", *OPTIONS, *options], input=text, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return result.returncode, result.stdout, result.stderr


def test_a_conversation_in_a_terminal(terminal):
    assert "there is no answer yet" in terminal.ask("/stats")
    terminal.ask("/set max_tokens 12")
    first = terminal.ask("Tell me a story about a fox.")
    assert len(first.split()) > 10
    stats = re.search(r"prompt (\d+) tokens, (\d+) of them cached; answer 12 ", terminal.ask("/stats"))
    assert int(stats[2]) == 0
    terminal.ask("And then?")
    again = re.search(r"prompt (\d+) tokens, (\d+) of them cached", terminal.ask("/stats"))
    assert int(again[1]) > int(stats[1]) + 12, "the first turn is part of the second prompt"
    assert int(again[2]) > 0, "and it is cached"
    terminal.ask("/clear")
    assert terminal.ask("Tell me a story about a fox.") == first
    terminal.write("\x04")
    assert terminal.leave() == 0


def test_commands(terminal):
    assert "/system TEXT" in terminal.ask("/help")
    assert "there is no system message" in terminal.ask("/system")
    terminal.ask("/system Be brief.")
    assert "Be brief." in terminal.ask("/system")
    assert "temperature 0" in terminal.ask("/set")
    assert "did you mean temperature?" in terminal.ask("/set temprature 1")
    assert "did you mean /stats?" in terminal.ask("/stat")
    assert "top_p is a number from 0 to 1" in terminal.ask("/set top_p 7")
    terminal.ask("/set seed 18446744073709551615")
    assert "seed" in terminal.ask("hello"), "the server's error is shown"
    terminal.ask("/set seed")
    terminal.ask("/set max_tokens 3")
    assert "max_tokens or the end of the context" in terminal.ask("hello")
    terminal.write("/exit\n")
    assert terminal.leave() == 0


@pytest.mark.parametrize("parting", ["/bye", "/quit", "exit"])
def test_words_that_leave(terminal, parting):
    assert "/save FILE" in terminal.ask("/?")
    terminal.write(parting + "\n")
    assert terminal.leave() == 0


def test_lines_end_at_spaces_in_a_terminal_only(terminal):
    question = "Tell me a story about a fox."
    status, raw, _ = pipe(question + "\n", "--max-tokens", "60")
    assert status == 0 and max(map(len, raw.splitlines())) > 100, "what is piped has the model's lines"
    terminal.set_columns(50)
    terminal.ask("/set max_tokens 60")
    shown = terminal.ask(question).rstrip("\n").removesuffix("(max_tokens or the end of the context was reached)")
    lines = shown.splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 50
    assert shown.split() == raw.split(), "no word is broken"
    terminal.write("\x04")
    assert terminal.leave() == 0


def test_a_conversation_goes_on_from_a_file(terminal, tmp_path):
    saved = tmp_path / "fox.json"
    terminal.ask("/system You tell stories.")
    terminal.ask("/set max_tokens 8")
    assert "there is no answer yet" in terminal.ask("/retry")
    first = terminal.ask("Tell me about a fox.")
    assert terminal.ask("/retry") == first, "a greedy answer is the same again"
    terminal.ask(f"/save {saved}")
    body = json.loads(saved.read_text())
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant"], "once, not twice"
    assert body["messages"][1]["content"] == "Tell me about a fox." and body["max_tokens"] == 8
    second = terminal.ask("And an owl?")
    terminal.ask("/clear")
    terminal.ask("/system off")
    terminal.ask("/set max_tokens")
    terminal.ask(f"/load {saved}")
    assert "You tell stories." in terminal.ask("/system")
    assert terminal.ask("And an owl?") == second
    notes = tmp_path / "notes"
    notes.write_text("mine")
    assert "holds no conversation" in terminal.ask(f"/save {notes}")
    assert notes.read_text() == "mine"
    assert "is not JSON" in terminal.ask(f"/load {notes}")
    terminal.write("exit\n")
    assert terminal.leave() == 0


def test_an_answer_is_stopped_and_the_conversation_goes_on(terminal):
    terminal.ask("/set max_tokens 2000000000")
    shown = terminal.ask("hello")
    assert "/clear starts a new conversation" in shown, "more tokens than the context has are refused"
    terminal.ask("/set max_tokens")
    terminal.ask("/set ignore_eos true")
    terminal.write("Tell me a long story.\n")
    terminal.read_until("\n")
    terminal.read_until(" ")
    terminal.write("\x03")
    assert "(stopped)" in terminal.read_until("\n" + PROMPT)
    terminal.ask("/set max_tokens 4")
    terminal.ask("Go on.")
    stats = terminal.ask("/stats")
    assert "answer 4 tokens" in stats
    terminal.write("\x04")
    assert terminal.leave() == 0


def test_several_lines_are_one_message(terminal):
    terminal.ask("/set max_tokens 2")
    terminal.write('"""\n')
    terminal.read_until("... ")
    terminal.write("one\n")
    terminal.read_until("... ")
    terminal.ask('two"""')
    fenced = re.search(r"prompt (\d+) tokens", terminal.ask("/stats"))[1]
    terminal.ask("/clear")
    terminal.write("one\\\n")
    terminal.read_until("... ")
    terminal.ask("two")
    assert re.search(r"prompt (\d+) tokens", terminal.ask("/stats"))[1] == fenced
    terminal.write("\x04")
    assert terminal.leave() == 0


def test_lines_that_are_piped_in():
    status, answers, log = pipe("Tell me about a fox.\nAnd an owl?\n", "--max-tokens", "8")
    assert (status, log) == (0, "")
    _, first, _ = pipe("Tell me about a fox.\n", "--max-tokens", "8")
    assert answers.startswith(first)
    assert len(answers) > len(first) + 5


def test_a_script_ends_at_its_first_mistake():
    status, answers, log = pipe("/set temprature 1\nhello\n")
    assert (status, answers) == (2, "")
    assert log.startswith("error: ") and "did you mean temperature?" in log
