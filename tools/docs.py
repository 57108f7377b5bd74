"""Build the site into _docs: nbdev processes the notebooks; quarto renders them where it is installed, else smalldocs. Prints which."""
from __future__ import annotations
import os, re, shutil, subprocess
from pathlib import Path
from typing import Any
from house import ROOT, settings
from readme import SECTIONS, by_floor, floor_of, section

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
    return proc_nbs(n_workers=0, force=True)      # in this process: torch is imported once, and the next function holds

def show_unknown_annotations() -> None:
    "A signature that names what a later cell defines, or another module's fields, is shown as it is written; nbdev would stop."
    import fastcore.docments as d
    from inspect import Signature, signature
    def written(sym: Any, **kw: Any) -> Signature:
        try: return signature(sym, **kw)
        except NameError: return signature(sym, **kw | {"eval_str": False})
    d.signature = written

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
    subprocess.run(["smalldocs", "render", "--strict", str(cache)], check=True)

def sidebar_yml() -> str:
    "The book's sections, as the reading order has them; without them sixty pages stand in one long list."
    out = ["website:", "  sidebar:", "    contents:", "      - index.ipynb"]
    for _, title, _ in SECTIONS:
        pages = [p.name for s, p in by_floor().items() if section(floor_of(s)) == title]
        if pages: out += [f'      - section: "{title}"', "        contents:", *(f"          - {p}" for p in pages)]
    return "\n".join(out) + "\n"

def strip(cache: Path, names: dict[str, str]) -> None:
    "Remove what only quarto knows, and source links (there is no public address); links between notebooks follow the new names."
    nbdev_yml = cache / "nbdev.yml"
    text = nbdev_yml.read_text(encoding="utf-8").split("\nformat-links:")[0]
    nbdev_yml.write_text("\n".join(line for line in text.splitlines() if not line.endswith((': ""', ': "/"'))) + "\n", encoding="utf-8")
    for p in cache.rglob("*.ipynb"):
        t = re.sub(r"output-file: [^\\]*\\n", "", p.read_text(encoding="utf-8"), count=1)
        t = re.sub(r"\[source\]\(/blob/[^)]*\)(\{[^}]*\})?", "", t)
        t = re.sub(r"\[([^\[\]\n]+)\]\(\.\./[^)\s]+\.md\)", r"\1", t)   # inherited docstrings link to other projects' pages
        for a, b in names.items(): t = t.replace(f"]({a})", f"]({b})")
        p.write_text(t, encoding="utf-8")

def main() -> None:
    quarto = shutil.which("quarto")
    print("docs: quarto" if quarto else "docs: quarto is not installed, so smalldocs")
    out, cache = ROOT / settings()["doc_path"], processed()
    if quarto: subprocess.run([quarto, "render", "--no-cache"], cwd=cache, check=True)
    else: with_smalldocs(cache)
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(cache / out.name, out)
    print("docs: written to", out)

if __name__ == "__main__": main()
