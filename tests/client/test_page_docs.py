"""Tests the page of the API at `/docs`."""

import json
import subprocess
import urllib.request

import pytest
from browser import DESKTOP, PHONE, page_of, scrolls_sideways, violations, wait
from patience import PATIENCE_S
from server_process import ServerProcess


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--threads", 1) as server:
        yield server


def paths(page):
    """Returns the paths that are shown and not filtered out."""
    return page.evaluate(
        """[...document.querySelectorAll('#operations .entry')].filter((entry) => entry.checkVisibility())
            .map((entry) => entry.querySelector('.path').textContent)"""
    )


def operations(server):
    with urllib.request.urlopen(server.base_url + "/openapi.json", timeout=PATIENCE_S) as response:
        document = json.load(response)
    return [(method, path) for path, methods in document["paths"].items() for method in methods]


@pytest.fixture
def page(browser, server):
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    faults = []
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(server.base_url + "/docs")
    page.wait_for_selector("#schemas .entry")
    yield page
    context.close()
    assert faults == []


def test_every_operation_is_shown_once(page, server):
    page.evaluate("document.querySelectorAll('.entry').forEach((entry) => { entry.open = true; })")
    wait(page, "[...document.querySelectorAll('.entry')].every((entry) => entry.querySelector('.content').childNodes.length > 0)")
    shown = page.evaluate(
        """[...document.querySelectorAll('#operations .entry')].flatMap((entry) => {
            const method = entry.querySelector('.method').textContent.toLowerCase();
            const others = [...entry.querySelectorAll('.content > p code')].map((code) => code.textContent);
            return [entry.querySelector('.path').textContent, ...others].map((path) => [method, path]);
        })"""
    )
    assert sorted(map(tuple, shown)) == sorted(operations(server))
    # Each link leads to an entry.
    lost = page.evaluate(
        """[...document.querySelectorAll('.type a')].map((link) => link.getAttribute('href').slice(1))
            .filter((name) => document.getElementById(name) === null)"""
    )
    assert lost == []
    assert violations(page) == [] and page.text_content("#failure") == ""


def test_the_filter_and_addresses_find_entries(page):
    page.fill("#filter", "embed ollama")
    assert paths(page) == ["/api/embed", "/api/embeddings"]
    page.fill("#filter", "no such thing")
    assert paths(page) == [] and page.is_visible("#no-match")
    page.evaluate("location.hash = '#post-v1-chat-completions'")
    page.wait_for_selector("#post-v1-chat-completions[open]")
    page.click("#post-v1-chat-completions a >> text=ChatMessage")
    page.wait_for_selector("#ChatMessage[open] .content")
    assert "role" in page.text_content("#ChatMessage")


EXAMPLES = ["v1-chat-completions", "v1-completions", "v1-responses", "v1-messages", "api-chat", "api-generate", "tokenize"]


def test_examples_work_as_they_are(page):
    for name in EXAMPLES:
        page.click(f"#post-{name} summary")
        example = page.text_content(f"#post-{name} pre").replace("curl ", "curl -sS --fail-with-body ", 1)
        done = subprocess.run(["bash", "-c", example], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        # Ollama's answers are a line for each piece.
        first = json.loads(done.stdout.splitlines()[0])
        assert first.get("done_reason") != "load", first


def test_it_fits_a_phone_and_a_proxy(browser):
    with ServerProcess("--threads", 1, "--root-path", "/llm", "--api-key", "secret") as server:
        context = browser.new_context(viewport=PHONE, color_scheme="dark")
        page = context.new_page()
        page.goto(server.base_url + "/llm/docs")
        page.wait_for_selector("#schemas .entry", timeout=1000 * PATIENCE_S)
        page.evaluate("document.querySelectorAll('.entry').forEach((entry) => { entry.open = true; })")
        wait(page, "[...document.querySelectorAll('.entry')].every((entry) => entry.querySelector('.content').childNodes.length > 0)")
        assert not scrolls_sideways(page) and violations(page) == []
        assert f"curl {server.base_url}/llm/v1/models" in page.text_content("#get-v1-models pre")
        context.close()
