"""Tests how the page shows Markdown, with text that ends anywhere and with hostile text."""

import json

import pytest
from browser import DESKTOP, page_of, scrolls_sideways, violations
from server_process import ServerProcess

FENCE = "```"

# Attributes are left out except addresses and the first number of a list.
CASES = {
    "Plain text.": "<p>Plain text.</p>",
    "One\nline\n\nTwo": "<p>One\nline</p><p>Two</p>",
    "**bold** *it* __b__ _i_ `a*b*`": "<p><strong>bold</strong> <em>it</em> <strong>b</strong> <em>i</em> <code>a*b*</code></p>",
    "***both*** and *a **b** c*": "<p><strong><em>both</em></strong> and <em>a <strong>b</strong> c</em></p>",
    "2 * 3 * 4, snake_case_name, **open": "<p>2 * 3 * 4, snake_case_name, **open</p>",
    r"\*not\* `` a`b ``": "<p>*not* <code>a`b</code></p>",
    "# One\n### Three #\ntext": "<h4>One</h4><h4>Three</h4><p>text</p>",
    "- a\n- b\n  1. c\n  2. d\n- e": "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li><li>e</li></ul>",
    "3. a\n4. **b**\n\ntext": '<ol start="3"><li>a</li><li><strong>b</strong></li></ol><p>text</p>',
    "text\n* a": "<p>text</p><ul><li>a</li></ul>",
    f"1. a\n   {FENCE}sh\n   ls\n   {FENCE}\n2. b": "<ol><li><p>a</p><div><pre><code>ls</code></pre></div></li><li>b</li></ol>",
    f"{FENCE}py\nx = '**1**'\n\n  y\n{FENCE}\nafter": "<div><pre><code>x = '**1**'\n\n  y</code></pre></div><p>after</p>",
    f"{FENCE}\nnot\nended": "<div><pre><code>not\nended</code></pre></div>",
    "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    "| a | b |\n|---|--:|\n| `1` | 2 |\nend": (
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td><code>1</code></td><td>2</td></tr></tbody></table></div><p>end</p>"
    ),
    "a | b\nno table": "<p>a | b\nno table</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "[a](https://x.org/b_(c)) [z]": '<p><a href="https://x.org/b_(c)">a</a> [z]</p>',
    "See https://x.org/a_b.": '<p>See <a href="https://x.org/a_b">https://x.org/a_b</a>.</p>',
    # Hostile text.
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    f"{FENCE}\n<script>\n{FENCE}": "<div><pre><code>&lt;script&gt;</code></pre></div>",
    "[a](javascript:alert(1))": "<p>[a](javascript:alert(1))</p>",
    "[a](JaVaScRiPt:alert(1)) [b](data:text/html,x) [c](//x.org) [d](/v1/models)": (
        "<p>[a](JaVaScRiPt:alert(1)) [b](data:text/html,x) [c](//x.org) [d](/v1/models)</p>"
    ),
    '[a](https://x.org"onclick="b)': '<p>[a](<a href="https://x.org/">https://x.org</a>"onclick="b)</p>',
    "[https://a.org](https://b.org)": '<p><a href="https://b.org/">https://a.org</a></p>',
}

PRELUDE = """
    const { renderMarkdown } = await import('/page/markdown.js');
    const html = (box) => {
        const copy = box.cloneNode(true);
        copy.querySelectorAll('.code-head').forEach((head) => head.remove());
        // The colours of code.
        copy.querySelectorAll('pre span').forEach((span) => span.replaceWith(span.textContent));
        for (const element of copy.querySelectorAll('*')) {
            for (const { name, value } of [...element.attributes]) {
                if (name !== 'href' && !(name === 'start' && value !== '1')) {
                    element.removeAttribute(name);
                }
            }
        }
        return copy.innerHTML;
    };
"""


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--threads", 1) as server:
        yield server


@pytest.fixture(scope="module")
def page(browser, server):
    with page_of(browser, server) as page:
        yield page


def run(page, script, arg=None):
    return page.evaluate(f"async (arg) => {{ {PRELUDE} {script} }}", arg)


@pytest.mark.parametrize("text", CASES)
def test_markdown_becomes_elements(page, text):
    script = "const box = document.createElement('div'); renderMarkdown(box, arg); return html(box);"
    assert run(page, script, text) == CASES[text]


def test_links_tell_nothing_about_the_page(page):
    script = """
        const box = document.createElement('div');
        renderMarkdown(box, '[a](https://x.org)');
        const link = box.querySelector('a');
        return [link.rel, link.target];
    """
    assert run(page, script) == ["noopener noreferrer", "_blank"]


def test_text_that_grows_ends_as_the_whole_does(page):
    script = """
        const grown = document.createElement('div');
        let first = null;
        for (let length = 1; length <= arg.length; length += 1) {
            renderMarkdown(grown, arg.slice(0, length));
            if (length > arg.indexOf('\\n\\n') + 3) {
                first ??= grown.firstChild;
            }
        }
        const whole = document.createElement('div');
        renderMarkdown(whole, arg);
        // What is complete is not drawn again.
        return [html(grown) === html(whole), grown.firstChild === first];
    """
    text = "\n\n".join(["First.", *CASES])
    assert run(page, script, text) == [True, True]


@pytest.mark.parametrize(
    "unit", ["*", "**a ", "_a", "[", "[a](", "`", "` `` ", "> ", ">", "- ", " ", "|-", "#", "1. ", "https://", "*a **b ", "\\"]
)
def test_nothing_is_too_strange(page, unit):
    script = "const box = document.createElement('div'); renderMarkdown(box, arg); return box.textContent.length;"
    assert run(page, script, unit * 5000) >= 0


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "dark"), ({"width": 320, "height": 640}, "light")])
def test_an_answer_with_everything_is_accessible_and_fits(browser, server, size, scheme):
    with page_of(browser, server, size=size, scheme=scheme) as page:
        wide = f"{FENCE}\n{'wide ' * 100}\n{FENCE}\n\n|{'a column|' * 12}\n|{'---|' * 12}\n|{'with text|' * 12}"
        # Code that does not end would include the rest.
        complete = [case for case in CASES if case.count(FENCE) != 1]
        answer = {"role": "assistant", "content": "\n\n".join([*complete, wide]), "error": "It broke."}
        conversation = json.dumps([{"role": "user", "content": "Show me everything."}, answer])
        page.evaluate("(text) => sessionStorage.setItem('corella.conversation', text)", conversation)
        page.reload()
        page.wait_for_selector(".markdown .table")
        assert violations(page) == []
        assert not scrolls_sideways(page)
        # Wide content scrolls by itself.
        assert page.evaluate("(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.getElementById('scroll'))")
