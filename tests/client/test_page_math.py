"""Tests formulas and the colours of code in answers, with hostile text."""

import json
import os
import re
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, page_of, scrolls_sideways, violations, wait
from server_process import ROOT, ServerProcess

VENDOR = ROOT / "crates/corella-server/page/vendor/katex"
PACKAGES = Path(os.environ.get("CORELLA_NODE_PACKAGES", ROOT / "target/ci-node"))

PRELUDE = """
    const { renderMarkdown } = await import('/page/markdown.js');
    const { highlighted } = await import('/page/highlight.js');
    const box = document.createElement('div');
    box.className = 'markdown';
    document.getElementById('messages').replaceChildren(box);
"""

# What is drawn as formulas, with whether each stands alone; the rest stays text.
FORMULAS = {
    "One $x_1 * y_2$ and *$a$*": [["x_1 * y_2", False], ["a", False]],
    r"\(a\) and \[b\] here": [["a", False], ["b", True]],
    "$$\nx\n\ny\n$$\nafter": [["\nx\n\ny\n", True]],
    "$$x$$": [["x", True]],
    "so $$x$$ is": [["x", True]],
    "- a\n  \\[\n  x\n  \\]\n- b": [["\nx\n", True]],
    "| of $a$ |\n|---|\n| $b$ |": [["a", False], ["b", False]],
    # Money, code and escapes are no formulas.
    "It costs $5 or $10.": [],
    "$ 5 and 6 $": [],
    "$20-$30": [],
    "`$x$` and\n\n```\n$$\nx\n$$\n```": [],
    r"\$x$": [],
    "$$ $$": [],
    "an open $$\n\nx": [],
    "costs $5, but $x$ is": [["x", False]],
}

HOSTILE = [
    r"\href{javascript:alert(1)}{x}",
    r"\url{javascript:alert(1)}",
    r"\includegraphics[width=9em]{https://example.org/x.png}",
    r"\htmlClass{bar}{x}",
    r"\htmlId{send}{x}",
    r"\htmlStyle{position: fixed; inset: 0}{x}",
    r"\htmlData{icon=x}{x}",
    r"\text{<img src=x onerror=alert(1)>}",
    r"<script>document.title = 'run'</script>",
    r"\def\a{\a\a}\a",
    r"\def\a#1{#1#1}\a{\a{\a{\a{\a{\a{\a{\a{\a{\a{x}}}}}}}}}}",
    "{" * 3000,
    r"\frac" * 1000,
    "x" * 100_000,
    r"\rule{9999em}{9999em}",
    r"\kern-9999em\raisebox{9999em}{x}",
    r"\fcolorbox{red}{blue}{x}",
    r"\color{url(https://example.org)}x",
]


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--threads", 1) as server:
        yield server


@pytest.fixture(scope="module")
def page(browser, server):
    faults = []
    with page_of(browser, server, faults=faults) as page:
        run(page, "renderMarkdown(box, '$x$');")
        wait(page, "document.querySelector('.math .katex') !== null")
        yield page
    # The browser tells that it keeps KaTeX from giving an invisible box a style.
    assert all("inline style violates" in fault for fault in faults)


def run(page, script, arg=None):
    return page.evaluate(f"async (arg) => {{ {PRELUDE} {script} }}", arg)


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_are_told_from_text(page, text):
    script = """
        renderMarkdown(box, arg);
        return [...box.querySelectorAll('.math')].map((math) =>
            [math.querySelector('annotation').textContent, math.classList.contains('displayed')]);
    """
    assert run(page, script, text) == FORMULAS[text]


def test_formulas_that_grow_end_as_the_whole_does(page):
    script = """
        for (let length = 1; length <= arg.length; length += 1) {
            renderMarkdown(box, arg.slice(0, length));
        }
        const whole = document.createElement('div');
        renderMarkdown(whole, arg);
        return box.innerHTML === whole.innerHTML;
    """
    assert run(page, script, "\n\n".join(FORMULAS))


@pytest.mark.parametrize("tex", HOSTILE)
@pytest.mark.parametrize("signs", ["$ $", "$$ $$"])
def test_formulas_can_do_nothing_else(page, tex, signs):
    """KaTeX shows the source of a formula that it cannot read, and so does the page."""
    before, after = signs.split()
    script = """
        renderMarkdown(box, arg);
        const names = new Set([...box.querySelectorAll('*')].map((part) => part.localName));
        const attributes = [...box.querySelectorAll('*')].flatMap((part) => [...part.attributes])
            .filter(({ name, value }) => /^on|^id$|^src|^href|^data-/.test(name) || /javascript:|example.org/.test(value));
        const { width, height } = box.getBoundingClientRect();
        return [[...names].filter((name) => ['script', 'img', 'a', 'iframe', 'style', 'link', 'input'].includes(name)),
            attributes.map(({ name }) => name), height < 4000 && width <= innerWidth, document.title];
    """
    assert run(page, script, before + tex + after)[:3] == [[], [], True]
    assert "run" not in page.title()
    assert page.evaluate("document.querySelectorAll('#send').length") == 1


def test_without_katex_formulas_show_their_source(browser, server):
    faults = []
    with page_of(browser, server, faults=faults) as page:
        page.route("**/vendor/katex/katex.min.js", lambda route: route.abort())
        run(page, "renderMarkdown(box, 'So $x^2$ is.');")
        wait(page, "performance.getEntriesByType('resource').some(({ name }) => name.endsWith('katex.min.js'))")
        assert page.text_content(".markdown") == "So $x^2$ is."
        page.unroute("**/vendor/katex/katex.min.js")
    assert all("katex" in fault or "ERR_FAILED" in fault for fault in faults)


CODE = {
    "python": [
        ("# def\nx = 'if' + f\"\"\"a\nb\"\"\"", [("comment", "# def"), ("string", "'if'"), ("string", 'f"""a\nb"""')]),
        ("return foo(12.5e3)", [("keyword", "return"), ("function", "foo"), ("number", "12.5e3")]),
    ],
    "rust": [("let x: &'a str = vec!['b'];", [("keyword", "let"), ("keyword", "str"), ("function", "vec"), ("string", "'b'")])],
    "c": [("/* a\nb */ int x; // y", [("comment", "/* a\nb */"), ("keyword", "int"), ("comment", "// y")])],
    "SQL": [("SELECT a FROM b -- c", [("keyword", "SELECT"), ("keyword", "FROM"), ("comment", "-- c")])],
    "json": [('{"a": [1, true]}', [("string", '"a"'), ("number", "1"), ("keyword", "true")])],
    "sh": [("echo a#b # c", [("keyword", "echo"), ("comment", "# c")])],
    "html": [("<b onclick='x'>&lt;</b>", [("keyword", "<b"), ("string", "'x'"), ("keyword", ">"), ("keyword", "</b"), ("keyword", ">")])],
    "unknown": [("if x", [])],
}


@pytest.mark.parametrize("language", CODE)
def test_code_has_colours_and_keeps_its_text(page, language):
    script = """
        return arg[1].map((text) => {
            const pre = document.createElement('pre');
            pre.append(...highlighted(text, arg[0]));
            const spans = [...pre.querySelectorAll('span')];
            return [pre.textContent, spans.map((span) => [span.className.replace('code-', ''), span.textContent])];
        });
    """
    texts = [text for text, _ in CODE[language]]
    expected = [[text, [list(part) for part in parts]] for text, parts in CODE[language]]
    assert run(page, script, [language, texts]) == expected


@pytest.mark.parametrize("unit", ['"', "'", "`", "/*", "<!--", "#", '"""', "a", "1.", "\\", "<a", "${", "😀", "'\\"])
def test_code_may_be_anything(page, unit):
    script = """
        const languages = ['python', 'rust', 'js', 'html', 'sh', 'sql', 'lua', 'diff', 'yaml'];
        return languages.every((language) => {
            const pre = document.createElement('pre');
            pre.append(...highlighted(arg, language));
            return pre.textContent === arg;
        });
    """
    assert run(page, script, unit * 5000)


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "dark"), (PHONE, "light")])
def test_formulas_and_colours_are_accessible_and_fit(browser, server, size, scheme):
    with page_of(browser, server, size=size, scheme=scheme) as page:
        wide = "$$" + "x + " * 100 + "y$$ and $" + "x + " * 60 + "y$"
        code = "\n\n".join(f"```{language}\n{text}\n```" for language, cases in CODE.items() for text, _ in cases)
        answer = {"role": "assistant", "content": "\n\n".join([*FORMULAS, "text", wide, code])}
        conversation = json.dumps([{"role": "user", "content": "Show me everything."}, answer])
        page.evaluate("(text) => sessionStorage.setItem('corella.conversation', text)", conversation)
        page.reload()
        page.wait_for_selector(".math .katex")
        assert violations(page) == []
        assert not scrolls_sideways(page)
        # Wide formulas scroll by themselves.
        assert page.evaluate("(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.getElementById('scroll'))")


def test_katex_is_the_package_of_the_lock_file():
    """`UPDATE_PAGE=1` takes over the package's files, whose checksum npm has compared with the lock file's."""
    package = PACKAGES / "node_modules/katex"
    names = ["LICENSE", "dist/katex.min.js", "dist/katex.min.css"]
    names += [f"dist/{name}" for name in re.findall(r"fonts/[\w-]+\.woff2", (package / names[2]).read_text())]
    expected = {name.removeprefix("dist/"): (package / name).read_bytes() for name in names}
    if os.environ.get("UPDATE_PAGE"):
        for name, content in expected.items():
            path = VENDOR / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    found = {path.relative_to(VENDOR).as_posix(): path.read_bytes() for path in VENDOR.rglob("*") if path.is_file()}
    assert found.keys() == expected.keys()
    for name, content in expected.items():
        assert found[name] == content, f"{name} differs from the package's"
