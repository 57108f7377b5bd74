"""The chat page in Chromium: streaming Markdown that cannot become HTML, stop, regenerate, settings, export, bench, keyboard, narrow screens."""
from __future__ import annotations
import json, re
from pathlib import Path
from typing import Any, Iterator
import pytest
from playwright.sync_api import BrowserContext, Page, expect
from house import ROOT
from llminfer.loading import make_tiny
from support.browser import chromium
from support.fake_openai import PAGE, Fake, fake_openai
from support.served import served

@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with chromium(tmp_path_factory.mktemp("chromium"), accept_downloads=True) as context: yield context

@pytest.fixture
def server() -> Iterator[tuple[str, Fake]]:
    with fake_openai() as s: yield s

@pytest.fixture
def page(browser: BrowserContext, server: tuple[str, Fake]) -> Iterator[Page]:
    "The page of a fresh server (a port of its own, so a store of its own); an error in its console, or a request elsewhere, fails the test."
    page, faults = browser.new_page(), list[str]()
    page.on("pageerror", lambda e: faults.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith((server[0], "data:", "blob:")) else faults.append("asks " + r.url))
    page.goto(server[0])
    page.wait_for_selector(".dot.ready")
    yield page
    page.close()
    assert not faults, faults

def ask(page: Page, text: str) -> str:
    "Send a message, wait for the end of the answer, return its text."
    page.fill("#text", text)
    page.keyboard.press("Enter")
    expect(page.locator("#log")).to_have_attribute("aria-busy", "false", timeout=15000)      # not wait_for_function: the real server's policy forbids eval
    return page.inner_text("#log .turn:last-child .md")

def rendered(page: Page, text: str) -> str:
    "What the page's Markdown makes of a text: its HTML, whole and then piece by piece, which must agree."
    return page.evaluate("""text => {
        const whole = document.createElement('div'), grown = document.createElement('div'), view = new Markdown(grown);
        new Markdown(whole).update(text);
        for (let n = 1; n <= text.length; n++) view.update(text.slice(0, n));
        if (whole.innerHTML !== grown.innerHTML) throw new Error('streamed differs: ' + grown.innerHTML + ' from ' + whole.innerHTML);
        return whole.innerHTML; }""", text)

# --- Markdown --------------------------------------------------------------------------------------------------------------------------

MARKDOWN = [("plain\ntext", "<p>plain<br>text</p>"), ("# A *b*", "<h1>A <em>b</em></h1>"), ("**b** `c*d*` ~~s~~ snake_case_name 2*3*4", "<p><strong>b</strong> <code>c*d*</code> <s>s</s> snake_case_name 2<em>3</em>4</p>"),
    ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"), ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'), ("> q\n> r", "<blockquote><p>q<br>r</p></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"), (r"\*not\* 1 < 2 & 3", "<p>*not* 1 &lt; 2 &amp; 3</p>"), ("half **open and `code", "<p>half **open and `code</p>"),
    ("- [x] done", '<ul><li class="task"><input type="checkbox" disabled="">done</li></ul>')]

def test_markdown(page: Page) -> None:
    for text, want in MARKDOWN: assert rendered(page, text) == want, text
    table = rendered(page, "| a | b |\n|---|---:|\n| 1 | `x\\|y` |")
    assert "<th><span>a</span></th>" in table and '<td style="text-align: right;"><span><code>x|y</code></span></td>' in table
    code = rendered(page, "```python\na < b\n\n# no heading\n```\nafter")
    assert "<span>python</span>" in code and "<code>a &lt; b\n\n# no heading</code>" in code and code.endswith("<p>after</p>")
    assert '<a href="https://e.org/a_b" target="_blank" rel="noopener noreferrer nofollow">https://e.org/a_b</a>.' in rendered(page, "see https://e.org/a_b.")

HOSTILE = ["<img src=x onerror=window.pwned=1>", "<script>window.pwned=1</script>", "[x](javascript:window.pwned=1)", "[x](JaVaScRiPt:alert)", "![x](data:text/html,<b>)", "<svg/onload=window.pwned=1>",
    "`<img src=x onerror=window.pwned=1>`", "```\n<script>window.pwned=1</script>\n```", "| <b>a</b> |\n|---|\n| <iframe src=//e> |", "# <style>*{display:none}</style>", "[<img src=x onerror=window.pwned=1>](https://e.org)",
    "&lt;script&gt;", "- <details open ontoggle=window.pwned=1>", "[a](https://e.org\" onclick=\"window.pwned=1)", "```\" onmouseover=\"window.pwned=1\n", "![i](https://e.org/track.png)"]

def test_model_text_never_becomes_html(page: Page, server: tuple[str, Fake]) -> None:
    server[1].answer = lambda prompt: HOSTILE[int(prompt)]
    for i, text in enumerate(HOSTILE):
        html = rendered(page, text)
        tags = set(re.findall(r"<([a-z0-9]+)[ >]", html))
        assert not tags & {"img", "script", "svg", "iframe", "style", "details", "b", "object", "form"}, (text, html)
        assert not re.search(r"<[^>]* on\w+=", html) and not re.search(r'href="(?!https?:|mailto:)', html), (text, html)
    ask(page, "0")
    ask(page, "1")
    assert page.evaluate("window.pwned") is None and page.inner_text("#log .turn:last-child .md") == HOSTILE[1]

def test_hostile_lengths_do_not_freeze_the_page(page: Page) -> None:
    for text in ("*" * 60000, "[" * 60000, "`" * 60001 + "x", "**a " * 15000, "> " * 20000, "- " * 20000, "|" * 30000 + "\n" + "|-" * 15000, "_a" * 30000, "[a](" * 15000, "\n".join(" " * (i % 9) + "- x" for i in range(4000)), "https://" * 8000):
        ms = page.evaluate("text => { const t = performance.now(); new Markdown(document.createElement('div')).update(text); return performance.now() - t; }", text)
        assert ms < 4000, (text[:20], ms)    # a bound on a hang: a few ms to 100 ms measured

# --- chat ------------------------------------------------------------------------------------------------------------------------------

def test_an_answer_and_its_numbers(page: Page, server: tuple[str, Fake]) -> None:
    server[1].answer, server[1].delay, server[1].cached = (lambda prompt: ["Hel", "lo **wo", "rld**", "!"]), 0.02, 8
    assert ask(page, "hi") == "Hello world!"
    foot = page.inner_text("#log .turn:last-child .foot")
    assert "8 tokens" in foot and "8/10 cached" in foot and "to first" in foot and "tok/s" in foot     # tokens of usage: twice the pieces
    assert page.inner_text("#live") == "Answer complete, 8 tokens"
    server[1].finish = "length"
    ask(page, "more?")
    assert "cut at max tokens" in page.inner_text("#log .turn:last-child .foot")
    assert [m["role"] for m in server[1].requests[-1]["messages"]] == ["user", "assistant", "user"] and server[1].requests[-1]["messages"][1]["content"] == "Hello **world**!"
    assert server[1].requests[-1]["stream_options"]["include_usage"] and "temperature" not in server[1].requests[-1]      # an empty field is the server's choice

def test_stop_keeps_the_text_and_closes_the_connection(page: Page, server: tuple[str, Fake]) -> None:
    server[1].answer, server[1].delay = (lambda prompt: (f"w{i} " for i in range(10**6))), 0.01
    for how in ("key", "button"):
        page.fill("#text", "go")
        page.keyboard.press("Enter")
        page.wait_for_selector("#log .turn:last-child .md p")
        assert page.get_attribute("#send", "aria-label") == "Stop" and page.inner_text("#live") == "Answering"
        if how == "key": page.keyboard.press("Escape")
        else: page.click("#send")
        expect(page.locator("#log .turn:last-child .note")).to_have_text("stopped")
        assert page.inner_text("#log .turn:last-child .md").startswith("w0 w1")
    for _ in range(100):
        if not server[1].open: break
        page.wait_for_timeout(50)
    assert server[1].open == 0 and server[1].broken == 2 and page.get_attribute("#send", "aria-label") == "Send"

def test_regenerate_and_edit(page: Page, server: tuple[str, Fake]) -> None:
    ask(page, "one")
    ask(page, "two")
    server[1].answer = lambda prompt: ["another answer"]
    page.locator("#log .turn:last-child").get_by_label("Ask again").click()
    expect(page.locator("#log .turn:last-child .md")).to_have_text("another answer")
    assert [m["content"] for m in server[1].requests[-1]["messages"]] == ["one", "You said: one", "two"]
    page.locator("#log .turn.user").first.hover()
    page.get_by_label("Edit and ask again").first.click()
    assert page.input_value("#text") == "one" and page.locator("#log .turn").count() == 0
    ask(page, "uno")
    assert [m["content"] for m in server[1].requests[-1]["messages"]] == ["uno"]

def test_errors_are_told_and_not_sent_again(page: Page, server: tuple[str, Fake]) -> None:
    def broken(prompt: str) -> Iterator[str]:
        yield "half an "
        raise RuntimeError("the device fell off")
    server[1].answer = broken
    assert ask(page, "hi").strip() == "half an" and page.inner_text("#log .turn:last-child .error") == "the device fell off"
    server[1].status, server[1].message = 400, "the prompt has 9000 tokens, the context 8192"
    ask(page, "long")
    assert page.inner_text("#log .turn:last-child [role=alert]") == "the prompt has 9000 tokens, the context 8192"
    server[1].status, server[1].answer = 200, lambda prompt: ["fine"]
    assert ask(page, "short") == "fine" and [m["content"] for m in server[1].requests[-1]["messages"]] == ["hi", "half an ", "short"]

def test_settings_reach_the_request_and_stay(page: Page, server: tuple[str, Fake]) -> None:
    page.click("#open-settings")
    for name, value in {"temperature": "0.5", "top_k": "7", "max_tokens": "33", "seed": "4", "system": "be brief"}.items(): page.fill(f"[name={name}]", value)
    page.fill("[name=top_p]", "3")                      # out of range: never sent
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).not_to_be_visible()
    ask(page, "hi")
    r = server[1].requests[-1]
    assert (r["temperature"], r["top_k"], r["max_tokens"], r["seed"]) == (0.5, 7, 33, 4) and "top_p" not in r and r["messages"][0] == {"role": "system", "content": "be brief"}
    page.reload()
    page.wait_for_selector(".dot.ready")
    assert page.locator("#log .turn").count() == 2      # the conversation is kept
    ask(page, "again")
    r = server[1].requests[-1]
    assert r["temperature"] == 0.5 and [m["content"] for m in r["messages"]] == ["be brief", "hi", "You said: hi", "again"]

def test_conversations_are_kept_deleted_exported_and_imported(page: Page, server: tuple[str, Fake], tmp_path: Path) -> None:
    ask(page, "first **question**")
    page.click("#new")
    ask(page, "second")
    assert page.locator("#chats .open").all_inner_texts() == ["second", "first **question**"]
    page.locator("#chats .open").nth(1).click()
    assert page.inner_text("#log .turn.user .body") == "first **question**"
    page.click("#open-settings")
    with page.expect_download() as d: page.click("#export-json")
    d.value.save_as(tmp_path / "c.json")
    with page.expect_download() as d: page.click("#export-md")
    assert Path(d.value.path()).read_text() == "# first **question**\n\n**You**\n\nfirst **question**\n\n**Answer**\n\nYou said: first **question**\n"
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["model"] == "fake" and [(m["role"], m["content"]) for m in saved["messages"]] == [("user", "first **question**"), ("assistant", "You said: first **question**")]
    from llminfer.chat import read_messages
    assert [t.user for t in read_messages(tmp_path / "c.json")[1]] == ["first **question**"]          # `llminfer chat --load` reads it
    (tmp_path / "bad.json").write_text('{"messages": [{"role": "x"}]}')
    page.set_input_files("#import-file", tmp_path / "bad.json")
    expect(page.locator("#io-note")).to_have_text("Not imported: this file holds no list of messages")
    page.set_input_files("#import-file", tmp_path / "c.json")
    expect(page.locator("#chats .open")).to_have_count(3)
    page.locator("#chats .bin").first.click()
    expect(page.locator("#chats .open")).to_have_count(2)

def test_a_key_is_asked_for_and_not_stored_unless_asked(page: Page, server: tuple[str, Fake]) -> None:
    server[1].key, server[1].message = "sesame", "an API key is needed"
    page.reload()
    expect(page.locator("#model-note")).to_have_text("wants an API key: see Settings")
    page.click("#open-settings")
    page.fill("[name=key]", "sesame")
    page.keyboard.press("Tab")
    page.wait_for_selector(".dot.ready")
    assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
    page.check("[name=remember]")
    assert "sesame" in page.evaluate("JSON.stringify(localStorage)")
    page.keyboard.press("Escape")
    ask(page, "open")
    assert server[1].keys[-1] == "Bearer sesame"
    page.click("#open-settings")
    page.fill("[name=base]", server[0] + "/v1")         # another address: the key does not follow
    page.keyboard.press("Tab")
    expect(page.locator("#model-note")).to_have_text("wants an API key: see Settings")
    assert server[1].keys[-1] is None and "sesame" not in page.evaluate("JSON.stringify(localStorage)")

def test_a_server_that_loads_is_waited_for(page: Page, server: tuple[str, Fake]) -> None:
    server[1].status = 503
    page.reload()
    expect(page.locator("#model-note")).to_have_text("loading the model")
    page.fill("#text", "hi")
    assert page.is_disabled("#send")
    server[1].status = 200
    page.wait_for_selector(".dot.ready")
    assert page.is_enabled("#send")

# --- bench -----------------------------------------------------------------------------------------------------------------------------

def bench(page: Page, count: int, mode: str, tokens: int = 12) -> str:
    page.click("#tab-bench")
    page.select_option("[name=count]", str(count))
    page.select_option("[name=mode]", mode)
    page.fill("[name=tokens]", str(tokens))
    page.click("#bench-go")
    expect(page.locator("#bench-go")).to_have_text("Start", timeout=30000)
    return page.inner_text("#verdict")

def test_bench_compares_concurrent_with_sequential(page: Page, server: tuple[str, Fake]) -> None:
    server[1].answer, server[1].delay = (lambda prompt: ["a "] * 6), 0.03
    verdict = bench(page, 8, "both")
    faster = re.fullmatch(r"Concurrent gives ([\d.]+) times the tokens per second of one after another\.", verdict)
    assert faster and float(faster[1]) > 2 and server[1].most == 8, (verdict, server[1].most)
    assert len(server[1].requests) == 16 and all(r["temperature"] == 0 and r["max_tokens"] == 12 for r in server[1].requests)
    score = dict(zip(page.locator("#score dt").all_inner_texts(), page.locator("#score dd").all_inner_texts()))
    assert score["tokens"] == "96" and score["active"] == "0" and float(score["combined tok/s"]) > 0
    assert page.locator(".pane").count() == 8 and all(re.match(r"12 tok", t) for t in page.locator(".pane p").all_inner_texts())
    widths = [page.evaluate(f"document.querySelector('.lane.{m} i').style.width") for m in ("sequential", "concurrent")]
    assert widths[0] == "100%" and float(widths[1][:-1]) < 60
    server[1].most = 0
    assert re.fullmatch(r"[\d.]+ tokens per second over 16 prompts\.", bench(page, 16, "concurrent")) and server[1].most == 12
    d = page.evaluate("JSON.parse(results())")
    assert d["model"] == "fake" and d["runs"][0]["tokens"] == 192 and len(d["runs"][0]["requests_detail"]) == 16

def test_bench_stops_and_tells_failures(page: Page, server: tuple[str, Fake]) -> None:
    server[1].answer, server[1].delay = (lambda prompt: (f"{i} " for i in range(10**6))), 0.01
    page.click("#tab-bench")
    page.click("#bench-go")
    page.wait_for_function("document.querySelector('.pane p').textContent.includes('tok')")
    page.click("#bench-go")
    expect(page.locator("#verdict")).to_have_text("Stopped.")
    server[1].status, server[1].message = 503, "the queue is full"
    assert bench(page, 8, "concurrent") == "Failed: the queue is full" and page.is_enabled("#bench-shuffle")

# --- the real server -------------------------------------------------------------------------------------------------------------------

def test_the_page_of_a_real_server(browser: BrowserContext, tmp_path: Path) -> None:
    "Under the server's own Content-Security-Policy, with its own numbers."
    model = make_tiny(tmp_path / "tiny", seed=7)
    with served("-m", model, "--served-model-name", "tiny") as s:
        page, faults = browser.new_page(), list[str]()
        page.on("pageerror", lambda e: faults.append(str(e)))
        page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.goto(s.url)
        page.wait_for_selector(".dot.ready")
        assert page.inner_text("#model-name") == "tiny" and page.inner_text("#model-note") == "context 512"
        page.click("#open-settings")
        page.fill("[name=max_tokens]", "12")
        page.fill("[name=temperature]", "0")
        page.fill("[name=system]", "be brief")
        page.keyboard.press("Escape")
        first, asked = ask(page, "hello"), [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        status, want, _ = s.ask("/v1/chat/completions", {"model": "tiny", "messages": asked, "max_tokens": 12, "temperature": 0})
        content, n = page.evaluate("current.messages[1].content"), want["usage"]["completion_tokens"]
        assert status == 200 and content == want["choices"][0]["message"]["content"] and first and f"{n} token" in page.inner_text("#log .turn:last-child .foot")
        ask(page, "and then?")
        assert re.search(r"[1-9]\d*/\d+ cached", page.inner_text("#log .turn:last-child .foot"))       # the prefix cache, seen from a browser
        assert re.fullmatch(r"Concurrent gives [\d.]+ times the tokens per second of one after another\.", bench(page, 8, "both"))
        page.click("#tab-chat")
        page.fill("#text", "word " * 900)
        page.keyboard.press("Enter")
        expect(page.locator("#log .turn:last-child .error")).to_contain_text("512")                   # both sizes, nothing cut off
        page.close()
        assert [f for f in faults if "400" not in f] == [] and s.end() == 0

# --- hands, eyes, ears -----------------------------------------------------------------------------------------------------------------

def test_everything_has_a_name_and_the_keyboard_reaches_it(page: Page) -> None:
    ask(page, "hi")
    page.click("#open-settings")
    unnamed = page.evaluate("""() => [...document.querySelectorAll('button, input, textarea, select, a[href]')].filter(e => {
        const label = e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent; return !label?.trim(); }).map(e => e.outerHTML.slice(0, 80))""")
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert unnamed == [] and len(ids) == len(set(ids)) and page.evaluate("document.documentElement.lang") == "en"
    page.keyboard.press("Escape")
    seen = list[Any]()
    page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label') || document.activeElement.className"))
    assert {"new", "tab-chat", "theme", "open-settings", "text"} <= set(seen)
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#view-bench") and page.get_attribute("#tab-bench", "aria-selected") == "true"
    page.keyboard.press("/")
    assert page.is_visible("#view-chat") and page.evaluate("document.activeElement.id") == "text"

CONTRAST = """() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number), lum = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const back = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > .9) return c; } return [255, 255, 255]; };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || !e.checkVisibility?.({ opacityProperty: true }) || e.closest(':disabled') || ['SCRIPT', 'STYLE'].includes(e.tagName)) continue;
    const a = lum(parse(getComputedStyle(e).color)), b = lum(back(e)), ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) bad.push([e.tagName, e.className, e.textContent.slice(0, 30), Math.round(ratio * 100) / 100]);
  }
  return bad; }"""

@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_in_both_themes(page: Page, server: tuple[str, Fake], theme: str) -> None:
    server[1].answer, server[1].finish = (lambda prompt: ["# h\n\n`code` [l](https://e.org)\n\n```py\nx\n```\n> q"]), "length"
    if page.evaluate("document.documentElement.dataset.theme") != theme: page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    for look in ("empty", "answer", "settings", "bench"):
        if look == "answer": ask(page, "hi")
        if look == "settings": page.click("#open-settings")
        if look == "bench":
            page.keyboard.press("Escape")
            bench(page, 8, "concurrent")
        assert page.evaluate(CONTRAST) == [], look
    page.reload()
    page.wait_for_selector(".dot.ready")
    assert page.evaluate("document.documentElement.dataset.theme") == theme

def test_a_narrow_screen(page: Page, server: tuple[str, Fake]) -> None:
    server[1].answer = lambda prompt: ["a" * 400 + "\n\n```\n" + "code " * 80 + "\n```\n\n| a | b |\n|---|---|\n| " + "x" * 200 + " | y |"]
    page.set_viewport_size({"width": 360, "height": 640})
    ask(page, "w" * 300)
    for view in ("#tab-chat", "#tab-bench"):
        page.click(view)
        assert page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)") <= 360
        assert page.evaluate("[...document.querySelectorAll('header *, #composer *, .bench-head *')].filter(e => e.checkVisibility() && e.getBoundingClientRect().right > 361).length") == 0
    page.click("#menu")
    page.wait_for_timeout(300)
    assert page.evaluate("document.activeElement.id") == "new" and page.get_attribute("#menu", "aria-expanded") == "true"
    page.keyboard.press("Escape")
    page.wait_for_timeout(300)
    assert not page.is_visible("#new") and page.evaluate("document.activeElement.id") == "menu"
    page.click("#open-settings")
    assert page.locator("#settings").bounding_box()["width"] <= 360  # type: ignore[index]

def test_the_page_is_one_file_without_addresses_elsewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=(?![\"']?data:)", text) and "@import" not in text and "innerHTML" not in text and "eval(" not in text
    found = set(re.findall(r"https?://[\w./-]+", text))
    assert found <= {"http://www.w3.org/2000/svg"}, found
    assert len(text) < 100_000 and PAGE.is_relative_to(ROOT)
