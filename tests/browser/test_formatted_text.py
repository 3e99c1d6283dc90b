"""How an answer's text is shown: marked where models mark it, and never taken for markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

# Shows each of several texts in one element, one after the other, and gives its markup at the end.
SHOW = """async (texts) => {
    const { FormattedText } = await import("/page/formatted_text.js");
    const element = document.createElement("div");
    const formatted = new FormattedText(element);
    for (const text of texts) formatted.show(text);
    return element.innerHTML.replaceAll(' tabindex="0"', "");
}"""
HOSTILE = "<img src=x onerror=\"document.title='x'\"> <b>&amp;</b> [a](javascript:alert(1))"
ESCAPED = (
    "&lt;img src=x onerror=\"document.title='x'\"&gt; &lt;b&gt;&amp;amp;&lt;/b&gt; [a](javascript:alert(1))"
)

TEXTS = {
    "nothing": ("", ""),
    "a paragraph": ("one\ntwo\n", "<p>one\ntwo</p>"),
    "two paragraphs": ("one\n\n\ntwo", "<p>one</p><p>two</p>"),
    "markup": (HOSTILE, f"<p>{ESCAPED}</p>"),
    "markup in code": (f"```html\n{HOSTILE}\n```", f'<pre data-language="html"><code>{ESCAPED}</code></pre>'),
    "markup as a language": ("```<b>\nx\n```", '<pre data-language="&lt;b&gt;"><code>x</code></pre>'),
    "code that has not ended": ("a\n```\nx = `y`\n\n# z", "<p>a</p><pre><code>x = `y`\n\n# z</code></pre>"),
    "a fence in code": ("````\n```\nx\n```\n````\nb", "<pre><code>```\nx\n```</code></pre><p>b</p>"),
    "headings": ("# One\ntext\n### Three", "<h3>One</h3><p>text</p><h4>Three</h4>"),
    "a number sign": ("#5 and #hash", "<p>#5 and #hash</p>"),
    "marks in a line": (
        "**bold *and* more** and *slanted* `code **x**` ``a ` b``",
        "<p><strong>bold *and* more</strong> and <em>slanted</em> <code>code **x**</code> <code>a ` b</code></p>",
    ),
    "signs that mark nothing": (
        "2 * 3 * 4, a**b, 2*3*4, ** x **, `",
        "<p>2 * 3 * 4, a**b, 2*3*4, ** x **, `</p>",
    ),
    "lists": (
        "- a\n- b\n  c\n\n- d\n\ne",
        "<ul><li>a</li><li>b\nc</li><li>d</li></ul><p>e</p>",
    ),
    "a list in a list": (
        "3. a\n   - b\n   - c\n4. d",
        '<ol start="3"><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>',
    ),
    "a list that goes back by two": (
        "- a\n  - b\n    - c\n- d",
        "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>",
    ),
    "a list that begins to the right": ("  - a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    "a rule": ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    "a table": (
        "| a | b |\n|---|:-:|\n| **1** | 2 |\n\nc",
        '<div class="table"><table><tbody><tr><th>a</th><th>b</th></tr>'
        "<tr><td><strong>1</strong></td><td>2</td></tr></tbody></table></div><p>c</p>",
    ),
    "bars that are no table": ("a | b\nc | d", "<p>a | b\nc | d</p>"),
}


@pytest.mark.parametrize(("text", "shown"), TEXTS.values(), ids=TEXTS)
def test_a_text_is_shown_the_same_at_once_and_letter_by_letter(page: Page, text: str, shown: str) -> None:
    assert page.evaluate(SHOW, [text]) == shown
    assert page.evaluate(SHOW, [text[:length] for length in range(len(text) + 1)]) == shown
    assert page.title() == "qwen35 chat"


def test_what_has_not_changed_stays_the_same_element(page: Page) -> None:
    kept = """async () => {
        const { FormattedText } = await import("/page/formatted_text.js");
        const element = document.createElement("div");
        const formatted = new FormattedText(element);
        formatted.show("one\\n\\ntwo");
        const [first, second] = element.children;
        formatted.show("one\\n\\ntwo and more\\n\\nthree");
        return [element.children[0] === first, element.children[1] === second, element.children.length];
    }"""
    assert page.evaluate(kept) == [True, False, 3]


def test_a_long_answer_is_shown_in_little_time(page: Page) -> None:
    """A text of 40,000 characters, as a model may write at the most, in 2,000 steps."""
    seconds = """async () => {
        const { FormattedText } = await import("/page/formatted_text.js");
        const text = "Some **words** and `code` in a line of a paragraph.\\n\\n- item\\n- item\\n\\n".repeat(560);
        const formatted = new FormattedText(document.createElement("div"));
        const start = performance.now();
        for (let step = 1; step <= 100; step += 1) formatted.show(text.slice(0, text.length - 2000 + 20 * step));
        return (performance.now() - start) / 1000;
    }"""
    assert page.evaluate(seconds) < 5


@pytest.mark.parametrize(
    "text", ["*" * 5_000, "`" * 5_001, "**a" * 3_000, "*a " * 3_000, "| " * 3_000, "- " * 3_000]
)
def test_no_text_keeps_the_page_busy(page: Page, text: str) -> None:
    seconds = """async (text) => {
        const { FormattedText } = await import("/page/formatted_text.js");
        const start = performance.now();
        new FormattedText(document.createElement("div")).show(text);
        return (performance.now() - start) / 1000;
    }"""
    assert page.evaluate(seconds, text) < 5
