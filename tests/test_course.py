"""The course and its site: every lesson has the shape that a reader relies on, every page is found, and the first screen works in a browser."""
from __future__ import annotations
import json, re, shutil
from pathlib import Path
from typing import Iterator
import pytest
from playwright.sync_api import BrowserContext
import docs, readme
from house import ROOT, cells, module_of, notebooks, source
from support.browser import chromium

LESSONS = readme.by_floor()

def prose(nb: Path) -> list[str]: return [source(c) for c in cells(nb) if c["cell_type"] == "markdown"]

@pytest.mark.parametrize("stem", LESSONS)
def test_a_lesson_says_how_long_it_runs_asks_a_reader_and_leads_on(stem: str) -> None:
    cs = cells(LESSONS[stem])
    assert re.search(r"[Rr]uns on a CPU in \d+ s", source(cs[0])), "the first cell says `Runs on a CPU in N s.`"
    at = max((i for i, c in enumerate(cs) if c["cell_type"] == "markdown" and "## Exercises" in source(c)), default=None)
    assert at is not None, "no exercises"
    asked = "\n".join(source(c) for c in cs[at:] if c["cell_type"] == "markdown")
    assert len(re.findall(r"(?m)^\d\. ", asked)) >= 2, "two exercises or more"
    assert re.search("[Cc]heck", asked) or any(c["cell_type"] == "code" for c in cs[at:]), "an exercise with a check"
    after = [t for t in prose(LESSONS[stem]) if re.search(r"(?m)^(## )?\**Next\b", t)]
    assert after and ".ipynb)" in re.split(r"(?m)^(?:## )?\**Next\b", after[-1])[-1], "Next says where to go, with a link"

def test_every_page_is_in_the_sidebar_once_and_in_the_index() -> None:
    listed = re.findall(r"- (\w+\.ipynb)$", docs.sidebar_yml(), re.M)
    assert len(listed) == len(set(listed)) and {p.name for p in notebooks()} <= set(listed)
    assert {"api_reference.ipynb", "llminfer_colab.ipynb"} <= set(listed)
    index = "\n".join(prose(ROOT / "nbs/index.ipynb"))
    for stem in (s for _, _, stems in readme.GUIDE for s in stems): assert f"]({stem}.ipynb)" in index and module_of(ROOT / f"nbs/{stem}.ipynb") is None
    assert {p.stem for p in notebooks() if p.stem not in LESSONS} == {"index"} | {s for _, _, stems in readme.GUIDE for s in stems}

def test_pages_print_what_they_say_from_records_and_hold_no_numbers_of_speed_in_prose() -> None:
    for stem in ("findings", "what_it_bought", "serving_evaluation"):
        for text in prose(ROOT / f"nbs/{stem}.ipynb"):
            assert not re.search(r"\d(\.\d+)? ?(tok/s|tokens a second|us\b|ms\b|times (faster|as fast))", text), text

def test_findings_have_an_entry_for_each_kind_of_record() -> None:
    text = "\n".join(source(c) for c in cells(ROOT / "nbs/findings.ipynb"))
    entries = re.findall(r"(?m)^### F(\d+)\. .+\*.+\*$", text)
    assert entries == [str(i + 1) for i in range(len(entries))] and len(entries) > 20 and "Negative" in text and "regressed" in text.lower()
    used = set(re.findall(r'record\("(\w+)"\)', text))
    assert {"ladder", "layers_h200", "gpu_vs_vllm", "cpu_vs_hf", "speculation", "quant_table", "serving_eval", "trace_cost"} <= used

def test_first_words_are_kept_and_names_have_their_pages() -> None:
    nb = LESSONS["08_kv_cache"]
    assert docs.first_words(nb).startswith("Runs on a CPU in") and "colab" not in docs.first_words(nb)
    assert docs.first_words(ROOT / "nbs/index.ipynb").startswith('<iframe src="replay.html"')
    text = "\n".join(docs.api_cells())
    assert "| [`BlockPool`](08_kv_cache.ipynb#blockpool) | " in text and text.count("## `llminfer.") == len([p for p in LESSONS.values() if module_of(p)])

# --- the site ----------------------------------------------------------------------------------------------------------------------------

PAGES = ("index", "findings", "scope", "08_kv_cache")

@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A few pages, rendered as `make docs` renders all of them; links to the others are left out."
    cache = tmp_path_factory.mktemp("site")
    for f in ("_quarto.yml", "styles.css", "nbdev.yml"): shutil.copy(ROOT / "nbs" / f, cache / f)
    (cache / "sidebar.yml").write_text("website:\n  sidebar:\n    contents:\n" + "".join(f"      - {p}.ipynb\n" for p in PAGES))
    for stem in PAGES:
        nb = ROOT / f"nbs/{stem}.ipynb"
        docs.write_notebook(cache / nb.name, readme.title_of(nb), "x", [docs.first_words(nb), *prose(nb)[1:]])
    for p in cache.glob("*.ipynb"):
        known = "|".join((*PAGES, "replay"))
        p.write_text(re.sub(rf"\]\((?!(?:{known})\.)[^)\s]+\.(?:ipynb|html)[^)\s]*\)", "]", p.read_text()))
    docs.with_smalldocs(cache)
    out = cache / docs.settings()["doc_path"]
    docs.write_replay(out)
    return out

@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with chromium(tmp_path_factory.mktemp("chromium")) as context: yield context

@pytest.mark.parametrize("width", [1280, 360])
def test_first_screen_has_a_replay_that_plays(site: Path, browser: BrowserContext, width: int) -> None:
    page, faults = browser.new_page(), list[str]()
    page.set_viewport_size({"width": width, "height": 800})
    page.on("pageerror", lambda e: faults.append(str(e)))
    page.goto(f"file://{site}/index.html")
    frame = page.frame_locator("iframe.replay")
    frame.get_by_role("button", name="Play").click()
    frame.locator(".title", has_text=re.compile(r"Step ([3-9]|\d\d+) of")).wait_for()
    box = page.locator("iframe.replay").bounding_box()
    assert box and box["y"] < 400 and box["width"] > 0.8 * min(width, 800) and page.evaluate("document.documentElement.scrollWidth") == width
    page.goto(f"file://{site}/kv_cache.html")
    assert "Runs on a CPU in" in page.inner_text("main") and page.evaluate("document.documentElement.scrollWidth") == width
    page.goto(f"file://{site}/scope.html")
    assert page.locator("main li").count() >= 4 and not faults
    page.close()

def test_replay_is_one_of_the_engine() -> None:
    events = [json.loads(x) for x in docs.REPLAY.read_text(encoding="utf-8").splitlines()]
    kinds = {e["event"] for e in events}
    assert kinds >= {"arrive", "admit", "alloc", "share", "step", "finish"} and docs.REPLAY.stat().st_size < 300_000
