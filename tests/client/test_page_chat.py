"""Tests the page's chat after faults, and with earlier conversations."""

import json
import re

import pytest
from browser import (
    PHONE,
    bodies,
    keep_answers_going,
    messages,
    page_of,
    say,
    set_control,
    set_theme,
    wait,
    wait_answered,
)
from fleet import SLOW
from patience import slowed, wait_until
from server_process import ServerProcess

STORY = "Tell me a story about a fox and a lantern."
COMPLETIONS = "**/v1/chat/completions"
REFUSAL = {"error": {"message": "Not now.", "type": "server_error", "param": None, "code": None}}


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--threads", 1) as server:
        yield server


def said(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def hold(page):
    """Holds requests for answers until the test handles them."""
    held = []
    page.route(COMPLETIONS, lambda route: held.append(route))
    return held


def ask(page, text):
    say(page, text)
    return wait_answered(page)


def titles(page):
    return page.locator(".chat-title span").all_text_contents()


def wait_failed(page):
    page.wait_for_selector(".message.assistant:last-child .error")
    page.wait_for_selector("#send:not([hidden])")


def test_a_message_that_is_too_long_comes_back_and_is_not_sent_again(browser, server):
    faults = []
    with page_of(browser, server, faults=faults) as page:
        sent = bodies(page)
        set_control(page, "max_tokens", "4")
        long = "fox and lantern " * 2000
        say(page, long)
        wait_failed(page)
        assert "longer than the model's context of 2,048 tokens" in page.text_content(".assistant .error")
        assert page.input_value("#message") == long
        answer = ask(page, "Hello.")
        assert said(sent[1]) == [("user", "Hello.")]
        assert [message["content"] for message in messages(page)] == ["Hello.", answer]
    assert all("400" in fault for fault in faults)


def test_a_message_without_an_answer_is_not_sent_with_the_next(browser, server):
    faults = []
    with page_of(browser, server, faults=faults) as page:
        sent = bodies(page)
        set_control(page, "max_tokens", "4")
        held = hold(page)
        say(page, "First.")
        page.fill("#message", "Second.")
        # A page reports its requests while a command runs.
        wait_until(lambda: page.evaluate("true") and held, "the page has sent its request")
        held.pop().fulfill(status=503, json=REFUSAL)
        wait_failed(page)
        # Text being written is not replaced, and the first message stays in its place.
        assert page.input_value("#message") == "Second."
        page.unroute(COMPLETIONS)
        page.press("#message", "Enter")
        wait_answered(page)
        assert said(sent[1]) == [("user", "Second.")]
        assert page.locator(".user .body").all_text_contents() == ["First.", "Second."]
    assert all("503" in fault for fault in faults)


def test_signs_of_life_are_no_part_of_an_answer(browser, server):
    def chunk(delta):
        return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    parts = [chunk({"role": "assistant"}), ": still working", chunk({"content": "One"}), ": still working"]
    parts += [chunk({"content": " two."}), "data: [DONE]"]
    with page_of(browser, server) as page:
        body = "".join(part + "\n\n" for part in parts)
        page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=body))
        assert ask(page, STORY) == "One two."
        assert page.locator(".assistant .error").count() == 0


def test_chats_are_kept_opened_and_deleted(browser, server):
    with page_of(browser, server) as page:
        set_control(page, "max_tokens", "4")
        answer = ask(page, "First.")
        page.click("text=New chat")
        ask(page, "Second.")
        page.click("#chats")
        assert titles(page) == ["Second.", "First."]
        page.click(".chat-title >> text=First.")
        assert page.is_hidden("#chat-list")
        assert [message["content"] for message in messages(page)] == ["First.", answer]
        sent = bodies(page)
        ask(page, "More.")
        assert said(sent[0]) == [("user", "First."), ("assistant", answer), ("user", "More.")]
        # A new tab has the list, and the last used chat.
        other = page.context.new_page()
        other.goto(server.base_url + "/")
        other.click("#chats")
        assert titles(other) == ["First.", "Second."]
        other.click("[aria-label='Delete “Second.”']")
        page.click("#chats")
        assert titles(page) == ["First."]
        other.click("#chat-list >> text=Undo")
        assert titles(other) == ["First.", "Second."]
        # The chat on the page leaves it, too.
        other.click("[aria-label='Delete “First.”']")
        assert other.is_visible("#empty") and titles(other)[-1] == "Second."


def test_tabs_that_go_on_with_one_chat_keep_both(browser, server):
    with page_of(browser, server) as page:
        set_control(page, "max_tokens", "4")
        ask(page, "First.")
        other = page.context.new_page()
        other.goto(server.base_url + "/")
        ask(other, "Here.")
        ask(page, "There.")
        page.click("#chats")
        stored = page.evaluate("JSON.parse(localStorage.getItem('corella.chats'))")
        questions = [[m["content"] for m in chat["messages"] if m["role"] == "user"] for chat in stored]
        assert questions == [["First.", "There."], ["First.", "Here."]]


def test_the_list_of_chats_has_a_limit(browser, server):
    with page_of(browser, server) as page:
        chat = {"saved": 1, "messages": [{"role": "user", "content": "Old."}]}
        chats = [{**chat, "id": str(number), "saved": 100 - number} for number in range(50)]
        page.evaluate("chats => localStorage.setItem('corella.chats', JSON.stringify(chats))", chats)
        set_control(page, "max_tokens", "4")
        ask(page, "New.")
        page.click("#chats")
        ids = page.evaluate("JSON.parse(localStorage.getItem('corella.chats')).map(({ id }) => id)")
        assert ids[1:] == [str(number) for number in range(49)]
        assert titles(page)[:2] == ["New.", "Old."]


def test_try_again_keeps_the_old_answer_if_no_new_one_comes(browser, server):
    faults = []
    with page_of(browser, server, faults=faults) as page:
        set_control(page, "max_tokens", "8")
        answer = ask(page, STORY)
        page.route(COMPLETIONS, lambda route: route.fulfill(status=503, json=REFUSAL))
        page.click("text=Try again")
        wait_failed(page)
        assert page.evaluate("document.activeElement.id") == "message"
        assert page.text_content(".assistant .error") == "Not now."
        assert page.text_content(".assistant .body") in answer != ""
        page.reload()
        assert messages(page)[1]["content"] == answer
    assert all("503" in fault for fault in faults)


def test_edit_goes_back_to_a_message(browser, server):
    with page_of(browser, server) as page:
        sent = bodies(page)
        set_control(page, "max_tokens", "4")
        answer = ask(page, "First.")
        ask(page, "Second.")
        hold(page)
        say(page, "Third.")
        assert page.locator("text=Edit").all()[0].is_disabled()
        wait(page, "!document.getElementById('stop').hidden")
        page.click("#stop")
        page.wait_for_selector("#send:not([hidden])")
        assert page.input_value("#message") == "Third."
        page.unroute(COMPLETIONS)
        page.locator("text=Edit").nth(1).click()
        assert page.input_value("#message") == "Second."
        assert page.evaluate("document.activeElement.id") == "message"
        ask(page, "Other.")
        assert said(sent[-1]) == [("user", "First."), ("assistant", answer), ("user", "Other.")]


def test_a_cleared_conversation_can_be_had_back(browser, server):
    with page_of(browser, server) as page:
        assert page.is_hidden("#undo-clear")
        set_control(page, "max_tokens", "4")
        answer = ask(page, "First.")
        page.click("text=New chat")
        page.click("#undo-clear")
        assert page.locator(".user .body").all_text_contents() == ["First."]
        assert messages(page)[1]["content"] == answer
        page.click("text=New chat")
        ask(page, "Second.")
        page.click("text=New chat")
        page.click("#undo-clear")
        assert page.locator(".user .body").all_text_contents() == ["Second."]


def test_tabs_have_their_own_conversations(browser, server):
    with page_of(browser, server) as page:
        set_control(page, "max_tokens", "4")
        ask(page, "First.")
        other = page.context.new_page()
        other.goto(server.base_url + "/")
        assert other.locator(".user .body").all_text_contents() == ["First."]
        ask(other, "Second.")
        page.reload()
        assert page.locator(".user .body").all_text_contents() == ["First."]
        other.reload()
        assert other.locator(".user .body").all_text_contents() == ["First.", "Second."]


def test_what_has_come_survives_leaving_the_page(browser):
    with ServerProcess(*SLOW) as server, slowed(server), page_of(browser, server) as page:
        keep_answers_going(page)
        set_control(page, "max_tokens", "1500")
        say(page, STORY)
        wait(page, "document.querySelector('.assistant.running .body')?.textContent.length > 20")
        page.reload()
        [question, answer] = messages(page)
        assert question["content"] == STORY
        assert len(answer["content"]) > 20 and "stopped" in answer["note"]


def test_escape_puts_the_card_away_before_it_stops_an_answer(browser, server):
    with page_of(browser, server) as page:
        set_control(page, "max_tokens", "8")
        page.check("#probabilities")
        ask(page, STORY)
        hold(page)
        say(page, "And then?")
        page.wait_for_selector("#stop:not([hidden])")
        page.focus("[role=listbox]")
        page.wait_for_selector("#token-card:not([hidden])")
        page.keyboard.press("Escape")
        assert page.is_hidden("#token-card") and page.is_visible("#stop")
        page.focus("#model")
        page.keyboard.press("Escape")
        assert page.is_visible("#stop")
        page.focus("#message")
        page.keyboard.press("Escape")
        page.wait_for_selector("#send:not([hidden])")


def test_the_page_works_without_storage(browser, server):
    with page_of(browser, server, size=PHONE) as page:
        closed = "{ get() { throw new DOMException('closed', 'SecurityError'); } }"
        for name in ("localStorage", "sessionStorage"):
            page.add_init_script(f"Object.defineProperty(window, '{name}', {closed})")
        page.reload()
        wait(page, "!document.getElementById('model').disabled")
        set_theme(page, "dark")
        set_control(page, "max_tokens", "4")
        say(page, STORY)
        page.wait_for_selector(".message.assistant:not(.running) footer button")
        assert re.match(r"4 tokens", page.text_content(".assistant footer"))


def test_the_models_are_read_again_after_a_failure(browser, server):
    faults = []
    with page_of(browser, server, faults=faults, size=PHONE) as page:
        failures = []

        def fail_once(route):
            if failures:
                route.continue_()
            else:
                failures.append(route.request.url)
                route.abort()

        page.route("**/v1/models", fail_once)
        page.reload()
        wait(page, "!document.getElementById('model').disabled")
        assert len(failures) == 1 and page.input_value("#model") == server.model()
