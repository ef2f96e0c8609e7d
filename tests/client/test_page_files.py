"""Tests text files that go with a message of the page's chat."""

import pytest
from browser import PHONE, bodies, messages, page_of, say, scrolls_sideways, set_control, violations, wait, wait_answered
from server_process import ServerProcess

COMPLETIONS = "**/v1/chat/completions"
REFUSAL = {"error": {"message": "Not now.", "type": "server_error", "param": None, "code": None}}


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--threads", 1) as server:
        yield server


def file(name, text):
    return {"name": name, "mimeType": "text/plain", "buffer": text if isinstance(text, bytes) else text.encode()}


def attach(page, *files):
    """Attaches files, and returns the names of all that are attached."""
    before = page.locator("#files li").count()
    page.set_input_files("#file", list(files))
    wait(page, "before => document.querySelectorAll('#files li').length > before || document.getElementById('file-error').textContent !== ''", before)
    return page.locator("#files .file-name").all_text_contents()


def test_files_are_sent_with_the_message_and_kept(browser, server):
    with page_of(browser, server) as page:
        sent = bodies(page)
        set_control(page, "max_tokens", "4")
        assert attach(page, file("a.py", "x = '```'\n"), file("<b>.txt", "größer")) == ["a.py", "<b>.txt"]
        say(page, "What is this?")
        wait_answered(page)
        expected = "File a.py:\n````\nx = '```'\n````\n\nFile <b>.txt:\n```\ngrößer\n```\n\nWhat is this?"
        assert sent[0]["messages"] == [{"role": "user", "content": expected}]
        assert page.is_hidden("#files")
        page.reload()
        assert page.locator(".user .file-name").all_text_contents() == ["a.py", "<b>.txt"]
        page.click(".user summary >> nth=0")
        assert page.locator(".user pre").first.text_content() == "x = '```'\n"
        assert violations(page) == []
        # An edit begins with the message's files.
        page.locator("button[title=Edit]").first.click()
        page.click("button[title='Remove a.py']")
        page.press("#message", "Enter")
        wait_answered(page)
        assert sent[1]["messages"][0]["content"] == "File <b>.txt:\n```\ngrößer\n```\n\nWhat is this?"
        assert len(messages(page)) == 2


def test_a_file_alone_is_a_message_and_names_its_chat(browser, server):
    with page_of(browser, server) as page:
        sent = bodies(page)
        set_control(page, "max_tokens", "4")
        page.press("#message", "Enter")
        attach(page, file("notes.txt", "Foxes."))
        page.press("#message", "Enter")
        wait_answered(page)
        assert [body["messages"][0]["content"] for body in sent] == ["File notes.txt:\n```\nFoxes.\n```"]
        assert page.text_content(".chat-title span") == "notes.txt"


def test_what_is_no_text_or_too_large_is_refused(browser, server):
    kib = 1024
    with page_of(browser, server, size=PHONE) as page:
        cases = [
            (file("photo.png", b"\x89PNG\r\n\x1a\n\x00\x01"), "photo.png is not a text file"),
            (file("zeros.bin", b"a\x00b"), "zeros.bin is not a text file"),
            (file("log" * 60, "x" * (256 * kib + 1)), "has 256 KiB"),
        ]
        for refused, reason in cases:
            assert attach(page, refused) == []
            assert reason in page.text_content("#file-error")
        # The limit is that of all files together.
        assert attach(page, file("one", "ö" * (64 * kib)), file("two", "x" * (128 * kib))) == ["one", "two"]
        assert attach(page, file("three", "x")) == ["one", "two"]
        assert "at most 256 KiB together" in page.text_content("#file-error")
        page.click("button[title='Remove two']")
        assert attach(page, *(file(f"{i}", "x") for i in range(12))) == ["one", *(f"{i}" for i in range(9))]
        assert "at most 10 files" in page.text_content("#file-error")
        assert violations(page) == [] and not scrolls_sideways(page)


def test_files_can_be_dropped_and_pasted(browser, server):
    drop = """([kind, type, name]) => {
        const data = new DataTransfer();
        data.items.add(new File(['Foxes.'], name, { type: 'text/plain' }));
        if (type) {
            data.setData('text/plain', 'A table.');
        }
        const target = document.getElementById('message');
        const event = kind === 'drop'
            ? new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true })
            : new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });
        return target.dispatchEvent(event);
    }"""
    with page_of(browser, server) as page:
        assert not page.evaluate(drop, ["drop", "", "dropped.txt"])
        wait(page, "document.querySelectorAll('#files li').length === 1")
        assert not page.evaluate(drop, ["paste", "", "pasted.txt"])
        wait(page, "document.querySelectorAll('#files li').length === 2")
        # Text is pasted as text, whatever else comes with it.
        assert page.evaluate(drop, ["paste", "text", "table.png"])
        assert page.locator("#files .file-name").all_text_contents() == ["dropped.txt", "pasted.txt"]


def test_files_come_back_with_a_message_that_got_no_answer(browser, server):
    faults = []
    with page_of(browser, server, faults=faults) as page:
        set_control(page, "max_tokens", "4")
        page.route(COMPLETIONS, lambda route: route.fulfill(status=503, json=REFUSAL))
        attach(page, file("notes.txt", "Foxes."))
        say(page, "What is this?")
        page.wait_for_selector(".assistant .error")
        page.wait_for_selector("#files li")
        assert page.input_value("#message") == "What is this?"
        page.unroute(COMPLETIONS)
        page.click("button[title='Try again']")
        assert page.is_hidden("#files") and page.input_value("#message") == ""
        assert wait_answered(page) != ""
    assert all("503" in fault for fault in faults)
