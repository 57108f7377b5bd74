"""What the tools and tests know about the house: its settings, its notebooks and their floors."""
from __future__ import annotations
import configparser, json, re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

def settings(root: Path = ROOT) -> dict[str, str]:
    "The values of settings.ini."
    c = configparser.ConfigParser(interpolation=None)
    c.read(root / "settings.ini", encoding="utf-8")
    return dict(c["DEFAULT"])

def public_repo(root: Path = ROOT) -> str:
    "owner/name of the public repository, or nothing."
    repo = settings(root).get("public_repo", "").strip()
    if repo and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+", repo):
        raise ValueError(f"settings.ini: public_repo must be owner/name, got {repo!r}")
    return repo

def colab_badge(
    path: str,   # of a notebook, from the root
    repo: str,   # owner/name; empty: no badge
    branch: str = "main",
) -> str: # Markdown
    "The picture that opens a notebook in Colab."
    if not repo: return ""
    return f"[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/{repo}/blob/{branch}/{path})"

def colabs(root: Path = ROOT) -> list[Path]:
    "The notebooks that are made for Colab."
    return sorted((root / "examples").glob("llminfer_*colab.ipynb"))

def notebooks(root: Path = ROOT) -> list[Path]:
    "Every notebook of the book, by name; hidden folders and files that begin with `_` are not part of it."
    nbs = root / settings(root)["nbs_path"]
    return sorted(p for p in nbs.rglob("*.ipynb") if not any(part[0] in "._" for part in p.relative_to(nbs).parts))

def cells(nb: Path) -> list[dict[str, Any]]: return json.loads(nb.read_text(encoding="utf-8"))["cells"]

def source(cell: dict[str, Any]) -> str: return "".join(cell["source"])

def directives(cell: dict[str, Any]) -> list[str]:
    "`#| name args` lines at the head of a code cell, without the `#|`."
    out = []
    for line in source(cell).splitlines():
        if not line.startswith("#|"): break
        out.append(line[2:].strip())
    return out if cell["cell_type"] == "code" else []

def is_exported(cell: dict[str, Any]) -> bool: return any(d.split()[0] in ("export", "exports", "exporti") for d in directives(cell) if d)

def module_of(nb: Path) -> str | None:
    "The module that a notebook exports, from `#| default_exp`; None if it exports none."
    return next((d.split()[1] for c in cells(nb) for d in directives(c) if d.startswith("default_exp ")), None)

def floors(root: Path = ROOT) -> dict[str, tuple[int, str]]:
    "Module name (without `llminfer.`) to floor, the head of its notebook's file name: 04 is (4, ''), 04a above it is (4, 'a')."
    out: dict[str, tuple[int, str]] = {}
    for nb in notebooks(root):
        mod, m = module_of(nb), re.match(r"(\d+)([a-z]?)_", nb.name)
        if mod and m:
            if mod in out: raise ValueError(f"two notebooks export llminfer.{mod}; the second is {nb.name}")
            out[mod] = int(m[1]), m[2]
    return out

def subtitle(nb: Path) -> str:
    "The `> one line` under a notebook's title."
    m = re.search(r"^> (.+)$", source(cells(nb)[0]), re.M)
    return m[1] if m else ""
