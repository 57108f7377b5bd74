"""Build the site into _docs: with quarto where it is installed, else with nbdev's own processing and smalldocs. Prints which."""
from __future__ import annotations
import os, re, shutil, subprocess
from pathlib import Path
from house import ROOT, settings

def with_smalldocs() -> Path:
    "Process the notebooks as nbdev does for quarto, name pages as it does, render with smalldocs; returns the site's folder."
    from nbdev.config import get_config, nbpath2html
    from nbdev.doclinks import _build_modidx
    from nbdev.quarto import nbdev_sidebar, refresh_quarto_yml
    from nbdev.serve import proc_nbs
    os.chdir(ROOT)
    cfg = get_config()
    refresh_quarto_yml()
    _build_modidx()
    nbdev_sidebar.__wrapped__(path=cfg.nbs_path)
    cache = proc_nbs(n_workers=2, force=True)
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
    return cache / settings()["doc_path"]

def strip(cache: Path, names: dict[str, str]) -> None:
    "Remove what only quarto knows, and source links (there is no public address); links between notebooks follow the new names."
    nbdev_yml = cache / "nbdev.yml"
    text = nbdev_yml.read_text(encoding="utf-8").split("\nformat-links:")[0]
    nbdev_yml.write_text("\n".join(line for line in text.splitlines() if not line.endswith((': ""', ': "/"'))) + "\n", encoding="utf-8")
    for p in cache.rglob("*.ipynb"):
        t = re.sub(r"output-file: [^\\]*\\n", "", p.read_text(encoding="utf-8"), count=1)
        t = re.sub(r"\[source\]\(/blob/[^)]*\)(\{[^}]*\})?", "", t)
        for a, b in names.items(): t = t.replace(f"]({a})", f"]({b})")
        p.write_text(t, encoding="utf-8")

def main() -> None:
    if shutil.which("quarto"):
        print("docs: quarto")
        subprocess.run(["nbdev-docs"], cwd=ROOT, check=True)
        return
    print("docs: quarto is not installed, so smalldocs")
    out = ROOT / settings()["doc_path"]
    built = with_smalldocs()
    shutil.rmtree(out, ignore_errors=True)
    shutil.move(str(built), str(out))
    print("docs: written to", out)

if __name__ == "__main__": main()
