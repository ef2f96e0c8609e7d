"""A headless Chromium, and the tests' actions on the server's page."""

import contextlib
import json
import shutil

from axe_playwright_python.sync_playwright import Axe
from patience import PATIENCE_S, wait_until
from playwright.sync_api import sync_playwright

DESKTOP = {"width": 1360, "height": 860}
PHONE = {"width": 360, "height": 740}


@contextlib.contextmanager
def chromium():
    path = shutil.which("chromium")
    assert path, "Chromium is missing: cargo xtask set-up installs it"
    with sync_playwright() as playwright:
        # The sandbox needs rights that containers seldom give.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def page_of(browser, server, size=DESKTOP, scheme="light", faults=None, path="/"):
    """Opens the page of a server. Errors in it fail the test, unless `faults` collects them."""
    context = browser.new_context(viewport=size, color_scheme=scheme)
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    collected = [] if faults is None else faults
    page.on("console", lambda message: message.type == "error" and collected.append(message.text))
    page.on("pageerror", lambda error: collected.append(str(error)))
    try:
        page.goto(server.base_url + path)
        wait(page, "!document.getElementById('model').disabled || !document.getElementById('key-form').hidden")
        yield page
        if faults is None:
            assert collected == []
    finally:
        context.close()


def wait(page, expression, arg=None):
    """Waits until an expression is true. Playwright's own way needs `eval`, which the page's policy forbids."""
    wait_until(lambda: page.evaluate(expression, arg), expression)


def wait_each(page, expressions):
    """Waits until each of some expressions was true at some time, in any order."""
    missing = list(expressions)

    def none_is_missing():
        missing[:] = [expression for expression in missing if not page.evaluate(expression)]
        return not missing

    wait_until(none_is_missing, lambda: missing)


def say(page, text):
    page.fill("#message", text)
    page.press("#message", "Enter")


def wait_answered(page):
    """Waits for the end of the answer, and returns its text as the model wrote it."""
    page.wait_for_selector(".message.assistant:last-child:not(.running) footer button")
    page.wait_for_selector("#send:not([hidden])")
    return messages(page)[-1]["content"]


def messages(page):
    """Returns the conversation that the tab keeps."""
    return json.loads(page.evaluate("sessionStorage.getItem('corella.conversation')"))


@contextlib.contextmanager
def settings(page):
    """Opens the settings for a while."""
    page.click("#settings-open")
    yield
    page.click("#settings-close")


def set_control(page, name, value):
    with settings(page):
        page.fill(f"#sampling-{name}", value)


def set_theme(page, theme):
    with settings(page):
        page.select_option("#theme", theme)


def show_probabilities(page, are_shown=True):
    with settings(page):
        page.set_checked("#probabilities", are_shown)


def show_engine(page):
    """Unfolds the picture of the engine, and waits until it is live."""
    page.click("#strip" if page.is_visible("#strip") else "#engine-toggle")
    page.wait_for_selector("#feed-state[data-state=live]")


def bodies(page):
    """Collects the bodies of the chat requests that the page sends from now on."""
    sent = []

    def note(request):
        if request.url.endswith("/v1/chat/completions"):
            sent.append(json.loads(request.post_data))

    page.on("request", note)
    return sent


def keep_answers_going(page):
    """Ignores end tokens: on a busy machine, a short answer might end before the browser shows its first word."""

    def without_end(route):
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/chat/completions", without_end)


def figure(label, condition):
    """Returns an expression that is true when a figure of the engine satisfies a condition."""
    return """([label, condition]) => {
        const figures = [...document.querySelectorAll('#figures div')];
        const figure = figures.find((figure) => figure.firstChild.textContent === label);
        const text = figure.lastChild.textContent;
        return { positive: Number.parseFloat(text) > 0, zero: text === '0', known: text !== '–' }[condition];
    }""".join(["(", f")({json.dumps([label, condition])})"])


def wait_figure(page, label, condition):
    wait(page, figure(label, condition))


def violations(page):
    """Returns axe-core's findings, one per line."""
    response = Axe().run(page).response
    return [
        f"{violation['id']}: {violation['help']}: {[node['html'][:200] for node in violation['nodes']]}"
        for violation in response["violations"]
    ]


def scrolls_sideways(page):
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
