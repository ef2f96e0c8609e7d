"""Tests that the picture of the engine distinguishes old news from new, and that its numbers are true."""

import itertools
import re

import pytest
from browser import PHONE, page_of, scrolls_sideways, show_engine, violations, wait, wait_figure
from pairing_proxy import post
from patience import held, wait_until
from server_process import ServerProcess
from wander import site_of


@pytest.fixture
def server():
    with ServerProcess("--threads", 1) as server:
        yield server


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_silence_is_told_and_ends(browser, server, scheme):
    with page_of(browser, server, scheme=scheme) as page:
        show_engine(page)
        wait_figure(page, "Running", "zero")
        with held(server.process):
            wait(page, "/^no news for [0-9]+ s$/.test(document.getElementById('feed-state').textContent)")
            shown = page.text_content("#feed-state")
            assert page.get_attribute("#engine", "data-stale") is not None
            assert set(page.locator("#figures dd").all_text_contents()) == {"–"}
            told = page.text_content("#feed-announcer")
            assert told.startswith("Engine: no news")
            assert violations(page) == []
            # The seconds continue, and are not announced.
            wait(page, "(shown) => document.getElementById('feed-state').textContent !== shown", shown)
            assert page.text_content("#feed-state").startswith("no news for")
            assert page.text_content("#feed-announcer") == told
        page.wait_for_selector("#engine:not([data-stale]) #feed-state[data-state=live]")
        wait_figure(page, "Running", "zero")


def test_a_server_that_is_gone_leaves_no_figures(browser, server):
    faults = []
    with page_of(browser, server, faults=faults) as page:
        show_engine(page)
        wait_figure(page, "Running", "zero")
        server.kill()
        wait(page, "document.getElementById('feed-state').textContent.startsWith('not reachable')")
        assert page.get_attribute("#engine", "data-stale") is not None
        assert set(page.locator("#figures dd").all_text_contents()) == {"–"}
        assert page.text_content("#no-requests").startswith("Not known")
        # The display does not flicker while the page reconnects.
        page.evaluate(
            """() => {
                const state = document.getElementById('feed-state');
                window.seen = [];
                new MutationObserver(() => seen.push(state.textContent)).observe(state, { childList: true });
            }"""
        )
        failed = []
        page.on("requestfailed", lambda request: failed.append(request.url.endswith("/engine/events")))
        wait_until(lambda: page.evaluate("true") and sum(failed) >= 2, "it tries again")
        assert page.evaluate("seen") == []


def test_numbers_are_rounded_as_people_read_them(browser, server):
    with page_of(browser, server) as page:
        rates = page.evaluate(
            """async () => {
                const { rate } = await import('/page/format.js');
                return [0, 0.01, 0.42, 0.996, 1, 4.25, 9.97, 42.4, 4200.3].map(rate);
            }"""
        )
        assert rates == ["0", "< 0.1", "0.4", "1", "1", "4.3", "10", "42", "4,200"]
        tops = page.evaluate(
            """async () => {
                const { ceiling } = await import('/page/chart.js');
                return Array.from({ length: 3000 }, (_, i) => [i + 8, ceiling(i + 8, [2, 4, 8, 20])]);
            }"""
        )
        # The scale is a square root: half height means a quarter of the top, which must be whole.
        assert all(top >= 0.999 * most and top % 4 == 0 for most, top in tops)


def test_blocks_that_came_from_other_nodes_are_counted(browser):
    node = ("--threads", 1, "--cluster-listen", "127.0.0.1:0", "--block-fetch", "always")
    with ServerProcess(*node) as first, ServerProcess(*node) as second:
        named, beginnings = {"kv_transfer_params": {"cached_blocks": site_of(first)}}, itertools.count(300)
        with page_of(browser, second) as page:
            show_engine(page)
            wait(page, "document.getElementById('node-figures').textContent.includes('Blocks fetched0')")

            def is_counted():
                body = {"prompt": [next(beginnings), *range(400, 499)], "max_tokens": 1}
                assert post(first.port, "/v1/completions", body)[0] == 200
                assert post(second.port, "/v1/completions", body | named)[0] == 200
                return re.search("Blocks fetched[1-9]", page.text_content("#node-figures"))

            # On a busy machine a prompt is computed before its blocks have come. The next one is requested then.
            wait_until(is_counted, "blocks are counted")


def figures_of(page, name):
    """Returns the texts of a list of figures by their labels."""
    return page.evaluate(
        """(name) => Object.fromEntries([...document.querySelectorAll(`#${name} div`)]
            .map((figure) => [...figure.children].map(({ textContent }) => textContent)))""",
        name,
    )


def test_the_tiers_of_the_cache_are_shown_where_there_is_a_disk(browser, server, tmp_path):
    with page_of(browser, server) as page:
        show_engine(page)
        wait_figure(page, "Running", "zero")
        assert page.is_hidden("#tiers")
    small = ("--threads", 1, "--kv-cache-memory", "64M", "--kv-disk", f"{tmp_path},8M")
    with ServerProcess(*small) as stored, page_of(browser, stored, size=PHONE) as page:
        show_engine(page)
        body = {"prompt": list(range(400, 499)), "max_tokens": 1}

        def is_shown():
            assert post(stored.port, "/v1/completions", body)[0] == 200
            return re.match("[1-9]", figures_of(page, "tier-figures").get("Pages on disk", ""))

        wait_until(is_shown, "pages are on the disk")
        figures = figures_of(page, "tier-figures")
        room = int(stored.metric("corella_kv_disk_max_blocks"))
        assert figures["Pages on disk"].endswith(f" of {room:,}")
        assert re.fullmatch("[1-9][0-9,]* of [0-9,]+", figures["Pages in memory"])
        assert figures["Read from disk"] == "0 pages"
        assert re.fullmatch("[0-9.]+ [KM]iB 0 B read", figures["Written to disk"])
        assert violations(page) == []
        # No figure is cut, and the page is not wider than a phone.
        assert page.evaluate(
            """[...document.querySelectorAll('#tiers dd')]
                .every(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)"""
        )
        assert not scrolls_sideways(page)


def test_it_fits_a_very_wide_screen(browser, server):
    with page_of(browser, server, size={"width": 2560, "height": 1300}) as page:
        box = page.locator("#composer").bounding_box()
        pane = page.locator("#chat").bounding_box()
        assert box["width"] < 60 * 16
        left, right = box["x"] - pane["x"], pane["x"] + pane["width"] - box["x"] - box["width"]
        assert abs(left - right) < 4
