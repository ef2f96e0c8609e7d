"""Editing a line of `corella chat` while typing it, in a real terminal."""

import re
import stat

import pytest
from terminal import END, HOME, LEFT, PROMPT, UP, Terminal, control

NO_SYSTEM = "there is no system message"
MAX_ENTRIES = 1000


@pytest.fixture
def terminal(tmp_path):
    return Terminal(tmp_path)


def history(home):
    return home / ".local/state/corella/chat_history"


def leave(terminal):
    terminal.write(control("D"))
    assert terminal.leave() == 0


def test_keys_of_readline(terminal):
    terminal.ask("/system helo" + LEFT + "l")
    assert terminal.ask("/system") == "hello"
    terminal.ask("stem b extra" + control("W") + "c" + control("A") + "/s" + END + "d" + HOME + LEFT + control("F") * 2 + "y")
    assert terminal.ask("/system") == "b cd"
    terminal.ask("rubbish" + control("U") + "/system off" + control("H") * 3 + "x")
    assert terminal.ask("/system") == "x"
    terminal.ask("/system é🦜" + LEFT + "\x7f" + "a")
    assert terminal.ask("/system") == "a🦜"
    leave(terminal)


def test_earlier_entries_come_back(tmp_path):
    terminal = Terminal(tmp_path)
    terminal.ask("/system one")
    terminal.ask("/system two")
    terminal.ask(UP + UP)
    assert terminal.ask("/system") == "one"
    leave(terminal)
    # The next program knows these entries, and finds an entry by a part of its text.
    terminal = Terminal(tmp_path)
    terminal.ask(control("R") + "two")
    assert terminal.ask(UP) == "" and terminal.ask("/system") == "two"
    leave(terminal)
    kept = history(tmp_path)
    assert kept.read_text().splitlines()[1:4] == ["/system one", "/system two", "/system one"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


def test_several_lines_come_back_as_one_entry(tmp_path):
    terminal = Terminal(tmp_path)
    terminal.write('"""/system one\n')
    terminal.read_until("... ")
    terminal.ask('back\\slash"""')
    leave(terminal)
    terminal = Terminal(tmp_path)
    terminal.write(UP)
    terminal.read_until("slash")
    terminal.write("\n")
    terminal.read_until("\n" + PROMPT)
    assert terminal.ask("/system") == "one\nback\\slash"
    leave(terminal)


def test_the_history_is_bounded_and_private(tmp_path):
    kept = history(tmp_path)
    kept.parent.mkdir(parents=True)
    kept.write_text("#V2\n" + "".join(f"message {number}\n" for number in range(1500)))
    kept.chmod(0o644)
    terminal = Terminal(tmp_path)
    terminal.ask("/stats")
    entries = kept.read_text().splitlines()[1:]
    assert (len(entries), entries[0], entries[-1]) == (MAX_ENTRIES, "message 501", "/stats")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    terminal.write("\x1b[200~/system " + "x" * 17_000 + "\x1b[201~\n")
    terminal.read_until("\n" + PROMPT)
    assert len(terminal.ask("/system").replace("\n", "")) == 17_000
    terminal.ask("/help")
    entries = kept.read_text().splitlines()[1:]
    assert entries[-3:] == ["/stats", "/system", "/help"], "what is very long is not kept"
    assert len(entries) == MAX_ENTRIES
    leave(terminal)


@pytest.mark.parametrize("switch", [("--no-history", {}), (None, {"CORELLA_NO_HISTORY": "1"})])
def test_the_history_can_be_off(tmp_path, switch):
    option, variables = switch
    terminal = Terminal(tmp_path, *filter(None, [option]), **variables)
    terminal.ask("/system one")
    terminal.ask("/system two")
    terminal.ask(UP + UP)
    assert terminal.ask("/system") == "one", "this conversation's own entries come back all the same"
    leave(terminal)
    assert not history(tmp_path).exists()
    history(tmp_path).parent.mkdir(parents=True)
    history(tmp_path).write_text("#V2\n/system old\n")
    terminal = Terminal(tmp_path, *filter(None, [option]), **variables)
    terminal.ask(UP)
    assert terminal.ask("/system") == NO_SYSTEM
    leave(terminal)
    assert history(tmp_path).read_text() == "#V2\n/system old\n"


def test_the_folder_of_the_history_is_the_users(tmp_path):
    terminal = Terminal(tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
    terminal.ask("/stats")
    leave(terminal)
    assert (tmp_path / "state/corella/chat_history").read_text() == "#V2\n/stats\n"
    assert not history(tmp_path).exists()


def test_a_history_that_cannot_be_kept_does_not_end_the_conversation(tmp_path):
    history(tmp_path).mkdir(parents=True)
    terminal = Terminal(tmp_path)
    assert b"the input history is not kept" in terminal.raw
    terminal.ask("/system one")
    assert terminal.ask("/system") == "one"
    leave(terminal)


def test_pasted_lines_are_one_message(terminal):
    assert b"\x1b[?2004h" in terminal.raw, "the terminal marks what is pasted"
    terminal.ask("/set max_tokens 2")
    terminal.write("\x1b[200~one\ntwo\x1b[201~")
    terminal.read_until("two")
    terminal.write("\n")
    terminal.read_until("\n" + PROMPT)
    pasted = re.search(r"prompt (\d+) tokens", terminal.ask("/stats"))[1]
    terminal.ask("/clear")
    terminal.write("one\\\n")
    terminal.read_until("... ")
    terminal.ask("two")
    assert re.search(r"prompt (\d+) tokens", terminal.ask("/stats"))[1] == pasted
    terminal.write("\x1b[200~/system Be brief.\r\nBe kind.\r\n\x1b[201~")
    terminal.read_until("kind.")
    terminal.write("\n")
    terminal.read_until("\n" + PROMPT)
    assert terminal.ask("/system") == "Be brief.\nBe kind."
    leave(terminal)


def test_control_c_drops_the_line_and_does_not_leave(terminal):
    terminal.write("/system no" + control("C"))
    assert "leaves" not in terminal.read_until("\n" + PROMPT)
    assert terminal.ask("/system") == NO_SYSTEM
    terminal.write('"""\n')
    terminal.read_until("... ")
    terminal.write("/system no\n")
    terminal.read_until("... ")
    terminal.write(control("C"))
    terminal.read_until("\n" + PROMPT)
    assert terminal.ask("/system") == NO_SYSTEM
    terminal.write(control("C"))
    assert "leaves" not in terminal.read_until("\n" + PROMPT)
    terminal.write(control("C"))
    assert "Ctrl-D or /exit leaves" in terminal.read_until("\n" + PROMPT)
    assert terminal.ask("/system") == NO_SYSTEM
    leave(terminal)


def test_control_d_deletes_in_a_line_and_leaves_from_an_empty_one(terminal):
    terminal.ask("/system one" + LEFT * 3 + control("D") + "a")
    assert terminal.ask("/system") == "ane"
    terminal.ask("/system two" + control("D"))
    assert terminal.ask("/system") == "two"
    leave(terminal)


def test_tab_completes_commands_and_settings(terminal):
    terminal.ask("/sy\tBe brief.")
    assert terminal.ask("/system") == "Be brief."
    terminal.ask("/set max\t7")
    assert "max_tokens 7" in terminal.ask("/set")
    terminal.write("/set top_\t\t")
    assert terminal.read_until("top_k").count("top_p") == 1
    terminal.read_until(PROMPT + "/set top_")
    terminal.ask(control("U") + "/clear")
    leave(terminal)


def test_what_is_typed_ahead_is_not_lost(terminal):
    terminal.write("/system one\n/set seed 3\n/system\n")
    terminal.read_until("\none\n")
    terminal.read_until(PROMPT)
    assert "seed 3" in terminal.ask("/set")
    leave(terminal)


def test_bytes_that_are_no_text_do_not_end_the_conversation(terminal):
    terminal.write(b"/system gr\xfc\xdfe\n")
    assert "not UTF-8" in terminal.read_until("\n" + PROMPT)
    terminal.write(control("U"))
    assert terminal.ask("/system") == NO_SYSTEM
    leave(terminal)


def test_a_terminal_that_only_shows_text_gets_text(tmp_path):
    terminal = Terminal(tmp_path, TERM="dumb")
    terminal.ask("/system one")
    assert terminal.ask("/system") == "one"
    assert b"\x1b" not in terminal.raw
    leave(terminal)
    assert not history(tmp_path).exists()
