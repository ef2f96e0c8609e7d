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
    show_probabilities,
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
        # Playwright hands out a page's requests only while one of its commands runs.
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


def wait_titles(page, expected):
    wait_until(lambda: titles(page) == expected, lambda: f"{titles(page)} become {expected}")


def test_chats_are_kept_opened_and_deleted(browser, server):
    with page_of(browser, server) as page:
        set_control(page, "max_tokens", "4")
        answer = ask(page, "First.")
        page.click("#clear")
        ask(page, "Second.")
        assert titles(page) == ["Second.", "First."]
        page.click(".chat-title >> text=First.")
        assert [message["content"] for message in messages(page)] == ["First.", answer]
        # To look at a chat is not to use it.
        assert titles(page) == ["Second.", "First."]
        sent = bodies(page)
        ask(page, "More.")
        assert said(sent[0]) == [("user", "First."), ("assistant", answer), ("user", "More.")]
        assert titles(page) == ["First.", "Second."]
        # A new tab has the list, and the last used chat. Each tab notices what the other changes.
        other = page.context.new_page()
        other.goto(server.base_url + "/")
        wait_titles(other, ["First.", "Second."])
        other.hover("#side li:has-text('Second.')")
        other.click("button[title='Delete “Second.”']")
        wait_titles(page, ["First."])
        other.click("#side >> text=Undo")
        assert titles(other) == ["First.", "Second."]
        wait_titles(page, ["First.", "Second."])
        # A deleted chat also disappears from the page that shows it.
        other.hover("#side li:has-text('First.')")
        other.click("button[title='Delete “First.”']")
        assert other.is_visible("#empty") and titles(other) == ["Second."]
        other.reload()
        wait_titles(other, ["Second."])


def test_a_chat_can_be_renamed(browser, server):
    with page_of(browser, server) as page:
        set_control(page, "max_tokens", "4")
        ask(page, "First.")

        def rename(text, key):
            page.hover("#side li")
            page.click("button[title^='Rename']")
            page.keyboard.type(text)
            page.keyboard.press(key)

        rename("Foxes <b>and</b> lanterns", "Enter")
        wait_titles(page, ["Foxes <b>and</b> lanterns"])
        rename("Something else", "Escape")
        assert titles(page) == ["Foxes <b>and</b> lanterns"]
        rename("  ", "Enter")
        # The name outlives further messages and the page.
        ask(page, "Second.")
        page.reload()
        wait_titles(page, ["Foxes <b>and</b> lanterns"])
        assert page.locator(".user .body").all_text_contents() == ["First.", "Second."]


def test_the_side_bar_lies_over_the_chat_of_a_phone(browser, server):
    with page_of(browser, server, size=PHONE) as page:
        set_control(page, "max_tokens", "4")
        ask(page, "First.")
        page.click("#new-chat")
        assert page.is_hidden("#side") and page.is_visible("#empty")
        page.click("#side-toggle")
        assert page.evaluate("document.activeElement.id") == "clear"
        page.keyboard.press("Escape")
        assert page.is_hidden("#side") and page.evaluate("document.activeElement.id") == "side-toggle"
        page.click("#side-toggle")
        page.click(".chat-title >> text=First.")
        assert page.is_hidden("#side") and page.locator(".user .body").all_text_contents() == ["First."]
        # The chat below the side bar can be used again.
        ask(page, "Second.")


def test_tabs_that_go_on_with_one_chat_keep_both(browser, server):
    with page_of(browser, server) as page:
        set_control(page, "max_tokens", "4")
        ask(page, "First.")
        other = page.context.new_page()
        other.goto(server.base_url + "/")
        ask(other, "Here.")
        ask(page, "There.")
        stored = page.evaluate("JSON.parse(localStorage.getItem('corella.chats'))")
        questions = [[m["content"] for m in chat["messages"] if m["role"] == "user"] for chat in stored]
        assert questions == [["First.", "There."], ["First.", "Here."]]


def test_the_list_of_chats_has_a_limit(browser, server):
    with page_of(browser, server) as page:
        chat = {"saved": 1, "messages": [{"role": "user", "content": "Old."}]}
        chats = [{**chat, "id": str(number), "saved": 1000 - number} for number in range(200)]
        page.evaluate("chats => localStorage.setItem('corella.chats', JSON.stringify(chats))", chats)
        set_control(page, "max_tokens", "4")
        ask(page, "New.")
        ids = page.evaluate("JSON.parse(localStorage.getItem('corella.chats')).map(({ id }) => id)")
        assert ids[1:] == [str(number) for number in range(199)]
        assert titles(page)[:2] == ["New.", "Old."]


def test_the_oldest_chats_give_way_where_the_storage_is_full(browser, server):
    with page_of(browser, server) as page:
        large = [{"id": str(i), "saved": 10 - i, "messages": [{"role": "user", "content": str(i) * 900_000}]} for i in range(5)]
        page.evaluate("chats => localStorage.setItem('corella.chats', JSON.stringify(chats))", large)
        set_control(page, "max_tokens", "4")
        ask(page, "New.")
        page.evaluate(
            """() => {
                let text = '';
                for (const step of [100_000, 1000, 50]) {
                    try {
                        for (;;) {
                            localStorage.setItem('filler', text + 'x'.repeat(step));
                            text += 'x'.repeat(step);
                        }
                    } catch {
                        // It is full.
                    }
                }
            }"""
        )
        ask(page, "And more.")
        ids = page.evaluate("JSON.parse(localStorage.getItem('corella.chats')).map(({ id }) => id)")
        assert ids[1:] == [str(number) for number in range(4)]
        assert titles(page)[0].startswith("New.")


def test_try_again_keeps_the_old_answer_if_no_new_one_comes(browser, server):
    faults = []
    with page_of(browser, server, faults=faults) as page:
        set_control(page, "max_tokens", "8")
        answer = ask(page, STORY)
        page.route(COMPLETIONS, lambda route: route.fulfill(status=503, json=REFUSAL))
        page.click("button[title='Try again']")
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
        assert page.locator("button[title=Edit]").all()[0].is_disabled()
        wait(page, "!document.getElementById('stop').hidden")
        page.click("#stop")
        page.wait_for_selector("#send:not([hidden])")
        assert page.input_value("#message") == "Third."
        page.unroute(COMPLETIONS)
        page.locator("button[title=Edit]").nth(1).click()
        assert page.input_value("#message") == "Second."
        assert page.evaluate("document.activeElement.id") == "message" and page.is_visible("#editing")
        # Until the edited message is sent, nothing is lost.
        page.keyboard.press("Escape")
        assert page.input_value("#message") == "" and page.is_hidden("#editing")
        page.locator("button[title=Edit]").nth(1).click()
        page.reload()
        assert page.locator(".user .body").all_text_contents() == ["First.", "Second.", "Third."]
        page.locator("button[title=Edit]").nth(1).click()
        ask(page, "Other.")
        assert said(sent[-1]) == [("user", "First."), ("assistant", answer), ("user", "Other.")]
        assert page.locator(".user .body").all_text_contents() == ["First.", "Other."]
        assert page.is_hidden("#editing")


def test_actions_show_where_they_are_looked_for(browser, server):
    opacity = "name => getComputedStyle(document.querySelector(`.user button[title='${name}']`).parentNode).opacity"
    with page_of(browser, server) as page:
        set_control(page, "max_tokens", "4")
        ask(page, "First.")
        page.mouse.move(5, 5)
        assert page.evaluate(opacity, "Edit") == "0"
        page.hover(".user .body")
        assert page.evaluate(opacity, "Edit") == "1"
        page.mouse.move(5, 5)
        page.focus(".user button[title=Copy]")
        assert page.evaluate(opacity, "Edit") == "1"
        # The last answer always shows its actions and its speed.
        assert page.evaluate("getComputedStyle(document.querySelector('.assistant .actions')).opacity") == "1"
        assert "tokens/s" in page.text_content(".assistant footer")


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_copy_takes_the_text_as_it_was_written(browser, server, has_clipboard):
    text = "Some `code`:\n\n```py\nx = 1\n```"
    with page_of(browser, server) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        answer = {"role": "assistant", "content": text}
        conversation = json.dumps([{"role": "user", "content": "Show."}, answer])
        page.evaluate("text => sessionStorage.setItem('corella.conversation', text)", conversation)
        if not has_clipboard:
            # Pages of other machines without HTTPS have no clipboard.
            page.add_init_script("window.clipboard = navigator.clipboard; Object.defineProperty(navigator, 'clipboard', { value: undefined });")
        page.reload()
        read = "(window.clipboard ?? navigator.clipboard).readText()"
        for button, expected in [(".code-head button", "x = 1"), (".assistant footer button[title=Copy]", text)]:
            page.click(button)
            wait(page, "button => document.querySelector(button).textContent === 'Copied'", button)
            assert page.evaluate(read) == expected


def test_the_end_is_followed_unless_the_reader_looks_elsewhere(browser, server):
    def chunk(content):
        return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]}) + "\n\n"

    at_end = "(({ scrollTop, clientHeight, scrollHeight }) => scrollHeight - scrollTop - clientHeight < 8)(document.getElementById('scroll'))"
    with page_of(browser, server) as page:
        # The test gives the answer, one part at a time.
        page.evaluate(
            """() => {
                const fetched = window.fetch;
                window.fetch = (url, options) => String(url).endsWith('/v1/chat/completions')
                    ? Promise.resolve(new Response(new ReadableStream({ start(control) { window.answer = control; } })))
                    : fetched(url, options);
            }"""
        )

        def give(text):
            page.evaluate("text => answer.enqueue(new TextEncoder().encode(text))", chunk(text))
            last = text.split()[-1]
            wait(page, "last => document.querySelector('.assistant .body').textContent.trimEnd().endsWith(last)", last)

        say(page, STORY)
        wait(page, "window.answer !== undefined")
        give("line\n\n" * 60 + "one")
        wait(page, at_end)
        assert page.is_hidden("#to-end")
        page.hover("#scroll")
        page.mouse.wheel(0, -30)
        wait(page, f"!{at_end}")
        top = page.evaluate("document.getElementById('scroll').scrollTop")
        give("\n\nline" * 60 + " two")
        assert page.evaluate("document.getElementById('scroll').scrollTop") == top
        page.click("#to-end")
        wait(page, at_end)
        give("\n\nline" * 60 + " three")
        wait(page, at_end)
        page.evaluate("answer.enqueue(new TextEncoder().encode('data: [DONE]\\n\\n'))")
        wait_answered(page)


def test_a_cleared_conversation_can_be_had_back(browser, server):
    with page_of(browser, server) as page:
        assert page.is_hidden("#undo-clear")
        set_control(page, "max_tokens", "4")
        answer = ask(page, "First.")
        page.click("#clear")
        page.click("#undo-clear")
        assert page.locator(".user .body").all_text_contents() == ["First."]
        assert messages(page)[1]["content"] == answer
        page.click("#clear")
        ask(page, "Second.")
        page.click("#clear")
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
        show_probabilities(page)
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
        page.click("#side-toggle")
        assert page.is_visible("#no-chats")


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
