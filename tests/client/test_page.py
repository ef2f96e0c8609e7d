"""Tests the page at `/` in a headless Chromium: chat, controls, probabilities, the picture of the engine."""

import concurrent.futures
import math
import re

import pytest
from browser import (
    DESKTOP,
    PHONE,
    bodies,
    figure,
    keep_answers_going,
    page_of,
    say,
    scrolls_sideways,
    set_control,
    set_theme,
    settings,
    show_engine,
    show_probabilities,
    violations,
    wait,
    wait_answered,
    wait_each,
    wait_figure,
)
from fleet import SLOW, Fleet, complete
from patience import slowed, wait_until
from server_process import ServerProcess

# The model continues after any token.
ON = {"extra_body": {"ignore_eos": True}}

STORY = "Tell me a story about a fox and a lantern."
CONTROLS = {
    "temperature": "0.7",
    "top_p": "0.9",
    "top_k": "40",
    "min_p": "0.01",
    "repetition_penalty": "1.1",
    "presence_penalty": "0.2",
    "frequency_penalty": "0.3",
    "max_tokens": "24",
    "seed": "7",
    "stop": "lantern|wolf",
}
SENT = {name: float(value) for name, value in CONTROLS.items() if name != "stop"}
SENT["stop"] = ["lantern", "wolf"]


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--threads", 1) as server:
        yield server


@pytest.fixture(scope="module")
def slow_server():
    with ServerProcess(*SLOW) as server, slowed(server):
        yield server


def test_an_answer_is_streamed_kept_and_cleared(browser, slow_server):
    with page_of(browser, slow_server) as page:
        assert page.is_visible("#empty")
        keep_answers_going(page)
        set_control(page, "max_tokens", "400")
        say(page, STORY)
        page.wait_for_selector("#stop:not([hidden])")
        # Counts before the end are not certain.
        wait(
            page,
            """document.querySelector('.assistant.running .body')?.textContent.length > 20
                && /^≈ [0-9]+ tokens/.test(document.querySelector('.assistant.running footer').textContent)""",
        )
        early = page.locator(".assistant .body p").first.text_content()[:20]
        answer = wait_answered(page)
        assert answer.startswith(early) and len(answer) > len(early)
        note = page.locator(".assistant footer").text_content()
        assert re.match(r"\d+ tokens · [\d.,]+ tokens/s · first after [\d.]+ m?s", note), note
        # The earlier messages are sent along with the next one.
        sent = bodies(page)
        set_control(page, "max_tokens", "4")
        say(page, "And then?")
        wait(page, "document.querySelectorAll('.message').length === 4")
        wait_answered(page)
        said = [(message["role"], message["content"]) for message in sent[0]["messages"]]
        assert said == [("user", STORY), ("assistant", answer), ("user", "And then?")]

        shown = page.locator(".assistant .body").first.text_content()
        page.reload()
        assert page.locator(".message").count() == 4
        assert page.locator(".assistant .body").first.text_content() == shown
        page.click("#clear")
        assert page.locator(".message").count() == 0
        page.reload()
        assert page.is_visible("#empty")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_ends_the_request_at_once(browser, slow_server, way):
    aborted = lambda: slow_server.metric("corella_request_success_total", finished_reason="abort")
    before = aborted()
    with page_of(browser, slow_server) as page:
        keep_answers_going(page)
        set_control(page, "max_tokens", "2000")
        say(page, STORY)
        wait(page, "document.querySelector('.assistant .body')?.textContent.length > 0")
        if way == "button":
            page.click("#stop")
        else:
            page.keyboard.press("Escape")
        page.wait_for_selector("#send:not([hidden])")
        note = page.locator(".assistant footer").text_content()
        assert re.match(r"≈ \d+ tokens? · .*stopped", note), note
        slow_server.wait_until(lambda: aborted() == before + 1, "the request is aborted")
        # The text so far stays.
        kept = page.locator(".assistant .body").text_content()
        page.reload()
        assert page.locator(".assistant .body").text_content() == kept != ""


def test_every_control_reaches_the_request(browser, server):
    with page_of(browser, server) as page:
        assert page.locator("#sampling input").count() == len(CONTROLS)
        sent = bodies(page)
        for name, value in CONTROLS.items():
            set_control(page, name, value)
        with settings(page):
            page.fill("#system", "You are a fox.")
        summary = page.locator("#settings-summary").text_content()
        assert "system prompt" in summary and "temperature 0.7" in summary
        page.reload()
        say(page, STORY)
        answer = wait_answered(page)
        messages = [{"role": "system", "content": "You are a fox."}, {"role": "user", "content": STORY}]
        [body] = sent
        assert body.pop("stream") and body.pop("stream_options") == {"include_usage": True}
        assert body == {**SENT, "messages": messages, "model": server.model()}
        response = server.client.post("/chat/completions", body=body, cast_to=object)
        assert response["choices"][0]["message"]["content"] == answer

        with settings(page):
            page.click("text=Back to defaults")
            page.fill("#system", "")
        set_control(page, "max_tokens", "2")
        page.click("button[title='Try again']")
        wait_answered(page)
        assert len(sent) == 2 and page.locator(".message").count() == 2
        assert set(sent[1]) == {"messages", "model", "stream", "stream_options", "max_tokens"}
        assert sent[1]["messages"] == [{"role": "user", "content": STORY}]


def test_a_refused_value_leads_to_its_control(browser, server):
    faults = []
    with page_of(browser, server, faults=faults) as page:
        set_control(page, "temperature", "-1")
        say(page, STORY)
        page.wait_for_selector(".assistant .error")
        assert "temperature" in page.locator(".assistant .error").text_content()
        assert page.get_attribute("#sampling-temperature", "aria-invalid") == "true"
        assert page.evaluate("document.activeElement.id") == "sampling-temperature"
        page.fill("#sampling-temperature", "0")
        assert page.get_attribute("#sampling-temperature", "aria-invalid") is None
        page.keyboard.press("Escape")
        set_control(page, "max_tokens", "4")
        page.click("button[title='Try again']")
        assert wait_answered(page) != ""
        assert page.locator(".error:visible").count() == 0
    assert all("400" in fault for fault in faults)


def test_tokens_show_how_likely_they_were(browser, server):
    with page_of(browser, server) as page:
        for name, value in {"seed": "3", "max_tokens": "30"}.items():
            set_control(page, name, value)
        show_probabilities(page)
        say(page, STORY)
        answer = wait_answered(page)
        response = server.client.chat.completions.create(
            model=server.model(),
            messages=[{"role": "user", "content": STORY}],
            seed=3,
            max_tokens=30,
            logprobs=True,
            top_logprobs=5,
        )
        choice = response.choices[0]
        tokens = choice.logprobs.content
        options = page.locator("[role=option]")
        assert options.count() == len(tokens) > 10
        assert options.all_text_contents() == [token.token for token in tokens]
        assert choice.message.content == answer

        at = next(i for i, token in enumerate(tokens) if i > 3 and math.exp(token.logprob) < 0.5)
        card = page.locator("#token-card")
        assert card.is_hidden()
        options.nth(at).hover()
        card.wait_for(state="visible")
        shares = card.locator(".share").all_text_contents()
        expected = [100 * math.exp(top.logprob) for top in tokens[at].top_logprobs]
        own = 100 * math.exp(tokens[at].logprob)
        if own not in expected and tokens[at].token not in [top.token for top in tokens[at].top_logprobs]:
            expected = [own, *expected]
        assert [float(share.removesuffix(" %")) for share in shares] == pytest.approx(expected, abs=0.06)
        page.mouse.move(5, 5)
        card.wait_for(state="hidden")

        # The arrow keys show the same shares.
        page.focus("[role=listbox]")
        for _ in range(at):
            page.keyboard.press("ArrowRight")
        assert card.locator(".share").all_text_contents() == shares
        selected = page.locator("[aria-selected=true]")
        assert selected.count() == 1 and selected.text_content() == tokens[at].token
        assert page.get_attribute("[role=listbox]", "aria-activedescendant") == selected.get_attribute("id")
        page.keyboard.press("Escape")
        assert card.is_hidden()

        show_probabilities(page, False)
        assert page.locator("[role=option]").count() == 0
        assert page.locator(".assistant .body").text_content() in answer
        page.click("button[title='Try again']")
        wait_answered(page)
        show_probabilities(page)
        assert "no probabilities recorded" in page.locator(".assistant footer").text_content()


def has_colour(page, canvas, class_name):
    """Returns whether a canvas has a pixel of about a class's colour: a line between pixels has none of exactly that
    colour."""
    return page.evaluate(
        """([id, name]) => {
            const probe = document.createElement('i');
            probe.className = name;
            document.body.append(probe);
            const wanted = getComputedStyle(probe).backgroundColor.match(/[0-9]+/g).map(Number);
            probe.remove();
            const canvas = document.getElementById(id);
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            for (let at = 0; at < data.length; at += 4) {
                if (data[at + 3] >= 128 && wanted.every((value, i) => Math.abs(data[at + i] - value) <= 24)) {
                    return true;
                }
            }
            return false;
        }""",
        [canvas, class_name],
    )


def test_the_picture_shows_load(browser, slow_server):
    prompts = [list(range(300 + i, 360 + i)) for i in range(6)]
    with page_of(browser, slow_server) as page, concurrent.futures.ThreadPoolExecutor(6) as pool:
        show_engine(page)
        wait_figure(page, "Running", "zero")
        assert page.is_visible("#no-requests")
        answers = [pool.submit(complete, slow_server, prompt, max_tokens=160, **ON) for prompt in prompts]
        # Each of these conditions is true at some time.
        wait_each(
            page,
            [
                figure("Running", "positive"),
                figure("Output tokens/s", "positive"),
                figure("TTFT, median", "known"),
                figure("ITL, median", "known"),
                "document.querySelector('#requests tr')?.textContent.includes('/160')",
                "/[1-9].* in use/.test(document.getElementById('pages-legend').textContent)",
            ],
        )
        for answer in answers:
            answer.result()
        wait_figure(page, "Running", "zero")
        assert page.is_visible("#no-requests")
        # The picture changes, so each check follows a request of its own, whose prompt is not cached.
        prompts = iter([500 + i] * 40 for i in range(1000))
        for canvas, name in [("steps", "prefill"), ("steps", "decode"), ("inter", "median"), ("pages", "cached")]:

            def is_drawn(canvas=canvas, name=name):
                complete(slow_server, next(prompts), max_tokens=4, **ON)
                return has_colour(page, canvas, name)

            wait_until(is_drawn, f"{canvas} has the colour of {name}")
        wait_figure(page, "Running", "zero")
        # The legend's figures equal the metrics'.
        cached = int(slow_server.metric("corella_kv_pages_cached"))
        wait(
            page,
            "(cached) => document.getElementById('pages-legend').textContent.includes(`${cached} cached`)",
            f"{cached:,}",
        )
        assert "prefill" in page.get_attribute("#steps", "aria-label")
        assert page.is_hidden("#legend-drafts")
        assert re.match(r"Corella \S+ · \S+ · context 2,048 tokens · at most \d+ requests", page.text_content("#server"))


def num_streams_left(server):
    return server.metric("corella_http_requests_total", path="/engine/events")


def test_the_engine_is_watched_only_while_it_is_seen(browser):
    # On this test's own server, no stream of another page ends.
    with ServerProcess("--threads", 1) as server, page_of(browser, server, size=PHONE) as page:
        # On a phone, the chat covers the engine.
        left = num_streams_left(server)
        assert page.text_content("#feed-state") == "not watching"
        show_engine(page)
        assert page.is_hidden("#chat") and num_streams_left(server) == left
        page.click("#engine-close")
        server.wait_until(lambda: num_streams_left(server) == left + 1, "the stream ends")
        assert page.is_visible("#chat")
        show_engine(page)
        page.click("#pause")
        server.wait_until(lambda: num_streams_left(server) == left + 2, "the stream ends")
        assert page.text_content("#feed-state") == "paused"
        page.click("text=Resume")
        page.wait_for_selector("#feed-state[data-state=live]")


def test_empty_fields_show_the_defaults_of_the_server(browser, server):
    with page_of(browser, server) as page:
        shown = {"temperature": "0.4", "top_p": "0.8", "top_k": "0", "repetition_penalty": "1", "seed": "default"}
        for name, value in shown.items():
            wait(page, "([name, value]) => document.getElementById(`sampling-${name}`).placeholder === value", [name, value])


def test_the_engine_is_folded_away_until_it_is_wanted(browser, server):
    with page_of(browser, server) as page:
        assert page.is_hidden("#engine")
        # While the engine is folded, the strip shows the figures.
        wait(page, "document.getElementById('strip-figures').textContent.startsWith('0 running')")
        show_engine(page)
        assert page.is_visible("#chat") and page.get_attribute("#strip", "aria-expanded") == "true"
        page.reload()
        page.wait_for_selector("#feed-state[data-state=live]")
        page.click("#strip")
        assert page.is_hidden("#engine") and page.get_attribute("#strip", "aria-expanded") == "false"
        page.reload()
        assert page.is_hidden("#engine")


def is_dark(page):
    colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) < 3 * 128


def test_the_theme_follows_the_system_or_the_switch(browser, server):
    for scheme in ("light", "dark"):
        with page_of(browser, server, scheme=scheme) as page:
            assert is_dark(page) == (scheme == "dark")
            for theme in ("dark", "light"):
                set_theme(page, theme)
                assert is_dark(page) == (theme == "dark")
                page.reload()
                assert is_dark(page) == (theme == "dark")
                assert page.input_value("#theme") == theme
            set_theme(page, "system")
            assert is_dark(page) == (scheme == "dark")


def prepare_state(page, state):
    if state == "empty":
        page.wait_for_selector("#empty")
    elif state == "settings":
        page.click("#settings-open")
    elif state == "answered":
        set_control(page, "max_tokens", "20")
        show_probabilities(page)
        say(page, "x" * 300 + " " + STORY)
        wait_answered(page)
        page.focus("[role=listbox]")
        page.keyboard.press("End")
    elif state == "chats":
        chats = [{"id": name, "saved": 1000 * i, "messages": [user(name * 200)]} for i, name in enumerate("ab")]
        page.evaluate("chats => localStorage.setItem('corella.chats', JSON.stringify(chats))", chats)
        page.reload()
        if page.is_hidden("#side"):
            page.click("#side-toggle")
        page.wait_for_selector(".chat-title")
    elif state == "engine":
        show_engine(page)


def user(text):
    return {"role": "user", "content": text}


def test_the_scale_of_probabilities_is_one_row_of_a_phone(browser, server):
    with page_of(browser, server, size=PHONE) as page:
        show_probabilities(page)
        say(page, STORY)
        wait_answered(page)
        marks = [mark.bounding_box() for mark in page.locator("#token-scale span").all()]
        assert len({mark["y"] for mark in marks}) == 1 and marks[-1]["x"] + marks[-1]["width"] <= PHONE["width"], marks


@pytest.mark.parametrize("state", ["empty", "settings", "answered", "chats", "engine"])
@pytest.mark.parametrize(
    "size, scheme",
    [
        pytest.param(DESKTOP, "light", id="desktop-light"),
        pytest.param(PHONE, "dark", id="phone-dark"),
        pytest.param(DESKTOP, "dark", id="desktop-dark", marks=pytest.mark.night),
        pytest.param(PHONE, "light", id="phone-light", marks=pytest.mark.night),
    ],
)
def test_nothing_is_inaccessible_or_too_wide(browser, server, state, size, scheme):
    with page_of(browser, server, size=size, scheme=scheme) as page:
        prepare_state(page, state)
        assert violations(page) == []
        assert not scrolls_sideways(page)


def test_fingers_and_answers_have_room_on_a_phone(browser, server):
    with page_of(browser, server, size=PHONE) as page:
        prepare_state(page, "answered")
        page.click("#side-toggle")
        parts = page.evaluate(
            """[...document.querySelectorAll('button, select, summary')].filter((part) => part.checkVisibility())
                .map((part) => [part.textContent.trim(), part.getBoundingClientRect()])
                .map(([name, { top, bottom, right }]) => [name, bottom - top, right, top])"""
        )
        # The least size of a target in WCAG 2.2.
        assert [part for part in parts if part[1] < 24] == [] and len(parts) > 8
        page.keyboard.press("Escape")
        # The controls above the conversation are one row, and none is cut.
        row = page.evaluate(
            """[...document.querySelectorAll('.bar :is(button, select)')].filter((part) => part.checkVisibility())
                .map((part) => part.getBoundingClientRect()).map(({ top, bottom, left, right }) => [top + bottom, left, right])"""
        )
        assert len(row) == 5 and max(part[0] for part in row) - min(part[0] for part in row) < 4
        assert all(before[2] <= after[1] for before, after in zip(row, row[1:])) and row[-1][2] <= PHONE["width"]
        top = page.evaluate("document.getElementById('scroll').getBoundingClientRect().top")
        assert top <= PHONE["height"] / 8


@pytest.mark.night
def test_the_table_of_requests_is_accessible_and_fits(browser, slow_server):
    with page_of(browser, slow_server, size=PHONE) as page, concurrent.futures.ThreadPoolExecutor(3) as pool:
        show_engine(page)
        answers = [pool.submit(complete, slow_server, list(range(300, 320 + i)), max_tokens=400, **ON) for i in range(3)]
        page.wait_for_selector("#requests tr")
        # No number is cut.
        assert page.evaluate("(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.getElementById('requests-scroller'))")
        assert page.is_hidden("#requests-scroller th:first-child") and page.is_visible("#requests-scroller th:last-child")
        assert violations(page) == []
        assert not scrolls_sideways(page)
        for answer in answers:
            answer.result()


def test_the_page_works_by_keyboard(browser, server):
    with page_of(browser, server, size=PHONE) as page:
        assert page.evaluate("document.activeElement === document.body")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "message"
    with page_of(browser, server) as page:
        assert page.evaluate("document.activeElement.id") == "message"
        # An empty message is not sent, and causes no error.
        page.keyboard.press("Enter")
        assert page.locator(".message").count() == 0 and page.is_visible("#send")
        page.keyboard.type("One")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        assert page.input_value("#message") == "One\ntwo"
        page.keyboard.press("Enter")
        wait_answered(page)
        assert page.locator(".user .body").text_content() == "One\ntwo"
        assert page.evaluate("document.activeElement.id") == "message"
        assert "Answer: " in page.text_content("#announcer")


def test_a_key_is_asked_for_and_forgotten_with_the_tab(browser):
    faults = []
    with ServerProcess("--threads", 1, "--api-key", "open-sesame-and-stay-open") as server:
        with page_of(browser, server, faults=faults) as page:
            page.wait_for_selector("#key-form:not([hidden])")
            assert violations(page) == []
            say(page, STORY)
            page.wait_for_selector(".assistant .error")
            assert "Enter the API key above" in page.text_content(".assistant .error")
            assert page.input_value("#message") == STORY
            page.fill("#key", "wrong")
            page.click("text=Use it")
            page.wait_for_selector("#key-error:not(:empty)")
            page.fill("#key", "open-sesame-and-stay-open")
            page.click("text=Use it")
            show_engine(page)
            assert page.is_hidden("#key-form")
            set_control(page, "max_tokens", "4")
            page.click("button[title='Try again']")
            assert page.input_value("#message") == ""
            assert wait_answered(page) != ""
            assert "open-sesame-and-stay-open" not in page.evaluate("JSON.stringify(localStorage)")
        assert "open-sesame-and-stay-open" not in server.log()
    assert all("401" in fault for fault in faults)


def test_what_is_said_is_never_markup(browser, server):
    with page_of(browser, server) as page:
        set_control(page, "max_tokens", "4")
        say(page, "<img src=/nothing onerror=\"document.title='run'\"><b>bold</b>")
        wait_answered(page)
        assert page.locator("#messages img, #messages b, #side b").count() == 0
        assert "<b>bold</b>" in page.locator(".user .body").text_content()
        assert page.title() == f"{server.model()} · Corella"


def test_a_lost_server_is_told(browser):
    faults = []
    with ServerProcess(*SLOW) as server, page_of(browser, server, faults=faults) as page:
        keep_answers_going(page)
        show_engine(page)
        set_control(page, "max_tokens", "2000")
        say(page, STORY)
        wait(page, "document.querySelector('.assistant .body')?.textContent.length > 0")
        server.kill()
        page.wait_for_selector(".assistant .error")
        page.wait_for_selector("#feed-state[data-state=trouble]")
        assert violations(page) == []
        port = server.port
        with ServerProcess("--threads", 1, "--served-model-name", "another", port=port):
            page.wait_for_selector("#feed-state[data-state=live]")
            wait(page, "document.getElementById('model').value === 'another'")
            assert page.title() == "another · Corella"
            set_control(page, "max_tokens", "4")
            page.click("button[title='Try again']")
            assert wait_answered(page) != ""


def test_nodes_are_shown_with_their_sessions(browser):
    with Fleet() as fleet, concurrent.futures.ThreadPoolExecutor(2) as pool:
        decode = fleet.decode(*SLOW)
        prefill = fleet.prefill("--threads", 1)
        with page_of(browser, prefill) as page, page_of(browser, decode) as other:
            show_engine(page)
            show_engine(other)
            page.wait_for_selector("#nodes:not([hidden]) #node-rows tr")
            assert "prefill node" in page.text_content("#nodes-note")
            wait(page, "document.getElementById('node-rows').textContent.includes('healthy')")
            answers = [pool.submit(complete, prefill, list(range(300, 420 + i)), max_tokens=300, **ON) for i in range(2)]
            wait(page, "/Sessions[1-9]/.test(document.getElementById('node-figures').textContent)")
            wait(other, "/[1-9][0-9]* received/.test(document.getElementById('pages-legend').textContent)")
            assert "decode node" in other.text_content("#nodes-note")
            for answer in answers:
                answer.result()
            wait(page, "/KV sent[1-9]/.test(document.getElementById('node-figures').textContent)")
            assert violations(page) == [] and violations(other) == []


@pytest.mark.parametrize("path", ["/llm", "/llm/"])
def test_the_page_stays_below_the_path_of_a_proxy(browser, path):
    with ServerProcess("--threads", 1, "--root-path", "/llm") as server:
        with page_of(browser, server, path=path) as page:
            set_control(page, "max_tokens", "4")
            say(page, "Hello.")
            wait_answered(page)
            names = page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
            assert len(names) > 20
            assert [name for name in names if not name.startswith(f"{server.base_url}/llm/")] == []
