"""Build the site into _docs: nbdev processes the notebooks; quarto renders them where it is installed, else smalldocs. Prints which.

Beside the lessons it has the pages of readme.GUIDE, the notebooks for Colab, a list of everything public,
and a replay of a real run on the first screen.
"""
from __future__ import annotations
import ast, json, os, re, shutil, subprocess
from pathlib import Path
from typing import Any
from house import ROOT, cells, colab_badge, colabs, is_exported, module_of, public_repo, settings, source
from readme import GUIDE, SECTIONS, by_floor, floor_of, section, title_of

REPLAY = ROOT / "examples" / "replay.jsonl"
FRAME = """<iframe src="replay.html" class="replay" title="Replay of an engine's event log"></iframe>

A run of this engine on the demo model, from its event log: blocks of memory, throughput, requests, and each step in words.
*Play*, or drag the cursor. [Alone on a page](replay.html)"""

def processed() -> Path:
    "The notebooks as nbdev makes them ready for a renderer, with our sidebar; returns their folder."
    from nbdev.config import get_config
    from nbdev.doclinks import _build_modidx
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs
    os.chdir(ROOT)
    refresh_quarto_yml()
    _build_modidx()
    (get_config().nbs_path / "sidebar.yml").write_text(sidebar_yml(), encoding="utf-8")
    show_unknown_annotations()
    cache = proc_nbs(n_workers=0, force=True)      # in this process: torch is imported once, and the next function holds
    for nb in [*by_floor().values(), *guides(), ROOT / "nbs/index.ipynb"]: keep_first_words(nb, cache / nb.name)
    for nb in colabs(): shutil.copy(nb, cache / nb.name)
    what = "Each module with its public names, in the order of the floors"
    write_notebook(cache / "api_reference.ipynb", "Everything public", what, api_cells())
    return cache

def show_unknown_annotations() -> None:
    "A signature that names what a later cell defines, or another module's fields, is shown as it is written; nbdev would stop."
    import fastcore.docments as d
    from inspect import Signature, signature
    def written(sym: Any, **kw: Any) -> Signature:
        try: return signature(sym, **kw)
        except NameError: return signature(sym, **kw | {"eval_str": False})
    d.signature = written

def guides() -> list[Path]: return [ROOT / "nbs" / f"{s}.ipynb" for _, _, stems in GUIDE for s in stems]

def markdown(text: str) -> dict[str, Any]: return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}

def first_words(nb: Path) -> str:
    "What stands in the first cell below title and subtitle; the index has the replay before it, lessons a badge if there is a repository."
    rest = re.sub(r"\A# [^\n]+\n+(> [^\n]+\n*)?", "", source(cells(nb)[0])).strip()
    badge = colab_badge(nb.relative_to(ROOT).as_posix(), public_repo(), settings()["branch"]) if module_of(nb) else ""
    return "\n\n".join(x for x in (badge, FRAME if nb.stem == "index" else "", rest) if x)

def keep_first_words(nb: Path, page: Path) -> None:
    "nbdev makes front matter of the first cell and drops the rest of it; put that back."
    text = first_words(nb)
    if not text: return
    d = json.loads(page.read_text(encoding="utf-8"))
    d["cells"].insert(1, markdown(text) | {"id": "first-words"})
    page.write_text(json.dumps(d, indent=1, ensure_ascii=False), encoding="utf-8")

def public_names(nb: Path) -> list[tuple[str, str]]: # (name, first line of its docstring)
    "Public functions and classes of a lesson, in order."
    found = (n for c in cells(nb) if is_exported(c) for n in ast.parse(source(c)).body)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [(n.name, (ast.get_docstring(n) or "").split("\n")[0]) for n in found if isinstance(n, kinds) and n.name[0] != "_"]

def api_cells() -> list[str]:
    "Markdown: a heading and a table for each module."
    out = []
    for nb in by_floor().values():
        module, names = module_of(nb), public_names(nb)
        if not module: continue
        rows = [f"| [`{n}`]({nb.name}#{n.lower()}) | {escape(what)} |" for n, what in names]
        table = ["", "| name | what |", "|---|---|", *rows] if rows else []
        out.append("\n".join([f"## `llminfer.{module}`", "", f"[{nb.stem[:3].strip('_')}, {title_of(nb)}]({nb.name})", *table]))
    return out

def escape(text: str) -> str: return re.sub(r"([|<>*_$])", r"\\\1", text) if "`" not in text else text.replace("|", "\\|")

def write_notebook(path: Path, title: str, subtitle: str, texts: list[str]) -> None:
    front = {"cell_type": "raw", "metadata": {}, "source": [f"---\ntitle: {title}\ndescription: {subtitle}\n---\n"]}
    cs = [c | {"id": f"cell-{i}"} for i, c in enumerate([front, *map(markdown, texts)])]
    kernel = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    path.write_text(json.dumps({"cells": cs, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, ensure_ascii=False), encoding="utf-8")

def with_smalldocs(cache: Path) -> None:
    "Name pages as nbdev does, take out what only quarto knows, render."
    from nbdev.config import nbpath2html
    names = {}
    for p in sorted(cache.rglob("*.ipynb")):
        page = nbpath2html(p).with_suffix(".ipynb")
        if p != page: names[p.relative_to(cache).as_posix()] = p.rename(page).relative_to(cache).as_posix()
    sidebar = cache / "sidebar.yml"
    text = sidebar.read_text(encoding="utf-8")
    for a, b in names.items(): text = re.sub(rf"(?<=[ /]){re.escape(a)}$", b, text, flags=re.M)
    sidebar.write_text(text, encoding="utf-8")
    strip(cache, names)
    (cache / "replay.html").write_text("", encoding="utf-8")      # the page comes when all is rendered; links to it are checked now
    subprocess.run(["smalldocs", "render", "--strict", str(cache)], check=True)

def sidebar_yml() -> str:
    "Pages first, then the book's sections as the reading order has them; without sections eighty pages stand in one long list."
    out = ["website:", "  sidebar:", "    contents:", "      - index.ipynb"]
    def add(title: str, pages: list[str]) -> None:
        out.extend([f'      - section: "{title}"', "        contents:", *(f"          - {p}" for p in pages)])
    for title, _, stems in GUIDE: add(title, [f"{s}.ipynb" for s in stems])
    for _, title, _ in SECTIONS:
        pages = [p.name for s, p in by_floor().items() if section(floor_of(s)) == title]
        if pages: add(title, pages)
    add("Reference", ["api_reference.ipynb"])
    add("In Colab", [p.name for p in colabs()])
    return "\n".join(out) + "\n"

def strip(cache: Path, names: dict[str, str]) -> None:
    "Remove what only quarto knows, and source links (there is no public address); links between notebooks follow the new names."
    nbdev_yml = cache / "nbdev.yml"
    text = nbdev_yml.read_text(encoding="utf-8").split("\nformat-links:")[0]
    nbdev_yml.write_text("\n".join(line for line in text.splitlines() if not line.endswith((': ""', ': "/"'))) + "\n", encoding="utf-8")
    for p in cache.rglob("*.ipynb"):
        t = re.sub(r"output-file: [^\\]*\\n", "", p.read_text(encoding="utf-8"), count=1)
        t = re.sub(r"\[source\]\(/blob/[^)]*\)(\{[^}]*\})?", "", t)
        t = re.sub(r"\]\(\.\./examples/(\w+\.ipynb)\)", r"](\1)", t)
        t = re.sub(r"\[([^\[\]\n]+)\]\(\.\./[^)\s]+\.md\)", r"\1", t)   # inherited docstrings link to other projects' pages
        for a, b in names.items(): t = t.replace(f"]({a})", f"]({b})").replace(f"]({a}#", f"]({b}#")
        p.write_text(t, encoding="utf-8")

def write_replay(site: Path) -> None:
    "The page of the first screen's frame."
    from llminfer.tracing import Trace
    Trace.load(REPLAY).to_html(site / "replay.html")

def main() -> None:
    quarto = shutil.which("quarto")
    print("docs: quarto" if quarto else "docs: quarto is not installed, so smalldocs")
    out, cache = ROOT / settings()["doc_path"], processed()
    if quarto: subprocess.run([quarto, "render", "--no-cache"], cwd=cache, check=True)
    else: with_smalldocs(cache)
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(cache / out.name, out)
    write_replay(out)
    print("docs: written to", out)

if __name__ == "__main__": main()
