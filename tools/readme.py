"""Write README.md from nbs/index.ipynb, whose lists are brought up to date first, and the badges of the Colab notebooks.
`--check` only says if all of them are current.
`--measure [notebook ...]` runs notebooks (all of them if none is named) and notes their seconds in tools/seconds.json."""
from __future__ import annotations
import json, math, os, re, resource, subprocess, sys
from pathlib import Path
from typing import Any
from house import ROOT, cells, colab_badge, colabs, directives, module_of, notebooks, public_repo, settings, source, subtitle

MARK, SECONDS = "<!-- floors: written by tools/readme.py -->", ROOT / "tools" / "seconds.json"
HEAD = "| notebook | idea | module | minutes | where | seconds |"
Floor = tuple[int, str]

SECTIONS: list[tuple[Floor, str, str]] = [   # first floor, title, what a reader gets from it
    ((0, ""), "The door", "What goes in and what comes out, as plain data, checked once."),
    ((3, "a"), "The model", "A decoder-only transformer whose attention is passed in, and the files that weights come in."),
    ((6, ""), "Text", "Ids from text, and text from ids while they still arrive."),
    ((8, ""), "Memory, attention, choice", "Where keys and values live, how they are read, and how a row of logits becomes a token."),
    ((10, "a"), "The engine", "Who computes what in the next step, and the loop that makes it happen. The heart of the book."),
    ((14, ""), "On a GPU", "Steps captured and replayed, and the kernels in them; lessons run on a CPU, a GPU's numbers are stored."),
    ((16, ""), "More from every step", "Fewer steps, fewer bytes, more models, held to a grammar."),
    ((20, "a"), "One engine, many backends", "Where the parts are assembled, and other people's engines behind the same protocol."),
    ((23, ""), "Serving", "The engine behind asyncio, HTTP and metrics."),
    ((26, ""), "Evidence and the command line", "Measured against others, and used from a terminal."),
]
PLAN: dict[int, tuple[str, str]] = {   # floors that no notebook has built yet
    20: ("parallel", "Tensor parallel over several GPUs"),
}
PATHS = [   # name, what for, notebooks (None: every one)
    ("One hour", "why a serving engine is not a loop around `generate`", ["03_interfaces", "08_kv_cache", "11_batching", "13_core"]),
    ("One day", "every part of the engine once, without side rooms, and a server at the end",
        ["01_request", "03_interfaces", "04_model", "07_streaming", "08_kv_cache", "09_attention", "10_sampling", "11_batching",
            "12_runner", "13_core", "22_engine", "25_api"]),
    ("One week", "everything, with the exercises", None),
]

GUIDE: list[tuple[str, str, list[str]]] = [   # pages beside the lessons: section, what a reader gets, notebooks
    ("Evidence", "What was measured, what it bought, and how.",
        ["what_it_bought", "findings", "serving_evaluation", "benchmark_method"]),
    ("Overview", "One picture of the house, its limits, and its words.",
        ["architecture", "scope", "compare_backends", "what_is_larger", "file_formats", "glossary"]),
    ("How to", "One task a page.",
        ["howto_colab", "howto_server", "howto_model", "howto_family", "howto_kernel"]),
]

def floor_of(stem: str) -> Floor:
    m = re.match(r"(\d+)([a-z]?)_", stem)
    assert m, f"a notebook's name begins with its floor: {stem}"
    return int(m[1]), m[2]

def minutes(nb: Path) -> int:
    "To read: 200 words a minute, and 0.3 minutes for each code cell that is shown."
    text = [source(c) for c in cells(nb) if c["cell_type"] == "markdown"]
    shown = [c for c in cells(nb) if c["cell_type"] == "code" and not {"hide", "export"} & set(directives(c))]
    return math.ceil(len(" ".join(text).split()) / 200 + 0.3 * len(shown))

def seconds() -> dict[str, float]: return json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}

def place(nb: Path) -> str:
    "Where a notebook's code runs: GPU if it has cells for one, or builds kernels."
    return "CPU, GPU" if any("cuda" in directives(c) or re.search(r"^\s*import triton", source(c), re.M) for c in cells(nb)) else "CPU"

def row(nb: Path, took: dict[str, float]) -> str:
    (_, letter), s = floor_of(nb.stem), took.get(nb.stem)
    name = f"{'&nbsp;&nbsp;↳ ' if letter else ''}[{nb.stem}]({nb.name})"
    idea = subtitle(nb).replace("|", "\\|")
    shown, ran = name if letter else f"**{name}**", "" if s is None else math.ceil(s)
    return f"| {shown} | {idea} | `{module_of(nb) or ''}` | {minutes(nb)} | {place(nb)} | {ran} |"

def by_floor() -> dict[str, Path]: return {p.stem: p for p in notebooks() if p.stem[:2].isdigit()}

def section(floor: Floor) -> str: return [title for first, title, _ in SECTIONS if first <= floor][-1]

def floor_table() -> str:
    "The reading order in sections: what is built, from the notebooks themselves, and what is planned."
    built, took = by_floor(), seconds()
    rows = [(floor_of(s), s, row(p, took)) for s, p in built.items()]
    have = {n for (n, letter), _, _ in rows if not letter}
    rows += [((n, ""), name, f"| {n:02d}_{name} | {idea} | | | | planned |") for n, (name, idea) in PLAN.items() if n not in have]
    out = [MARK, "", paths(built)]
    for _, title, what in SECTIONS:
        here = [text for floor, _, text in sorted(rows) if section(floor) == title]
        out += ["", f"### {title}", "", what, "", HEAD, "|---|---|---|---|---|---|", *here]
    return "\n".join(out)

def path_minutes(stems: list[str] | None) -> int:
    built = by_floor()
    return sum(minutes(p) for s, p in built.items() if stems is None or s in stems)

def paths(built: dict[str, Path]) -> str:
    "One line a path: how long it takes to read, and its notebooks."
    lines = []
    for name, why, stems in PATHS:
        n = path_minutes(stems)
        how = f"{n} minutes" if n < 100 else f"{n / 60:.0f} hours"
        links = ": " + ", ".join(f"[{s[:2]}]({built[s].name})" for s in stems if s in built) if stems else ""
        lines.append(f"- **{name}**, {why} ({how} of reading){links}.")
    return "\n".join(lines)

def measure(names: list[str]) -> None:
    "Run notebooks one after another and note the seconds of one core that each took, its imports included: a busy machine changes little."
    took, env = seconds(), os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for nb in notebooks():
        if names and nb.stem not in names: continue
        t = resource.getrusage(resource.RUSAGE_CHILDREN)
        rc = subprocess.run(["nbdev-test", str(nb)], cwd=ROOT, env=env, capture_output=True).returncode
        u = resource.getrusage(resource.RUSAGE_CHILDREN)
        if not rc: took[nb.stem] = round(u.ru_utime + u.ru_stime - t.ru_utime - t.ru_stime, 1)
        print(f"{nb.stem}: {'failed, not noted' if rc else took[nb.stem]}", flush=True)
    kept = {p.stem for p in notebooks()}
    SECONDS.write_text(json.dumps({k: took[k] for k in sorted(took) if k in kept}, indent=0) + "\n", encoding="utf-8")

def outputs(cell: dict[str, Any]) -> str:
    "A code cell's stored text outputs."
    return "".join("".join(o.get("text") or o.get("data", {}).get("text/plain", [])) for o in cell["outputs"]).rstrip()

def readme(index: list[dict[str, Any]]) -> str:
    "Markdown of the index: prose as it is but for links to notebooks, code fenced (unless `echo: false`), outputs indented."
    nbs = settings()["nbs_path"]
    parts = ["<!-- Built from nbs/index.ipynb by tools/readme.py: edit the notebook, then `make readme`. -->"]
    for c in index:
        if c["cell_type"] == "markdown":
            parts.append(re.sub(r"\]\((\w+\.ipynb)\)", rf"]({nbs}/\1)", source(c).strip()).replace("](../", "]("))
        elif "hide" not in directives(c):
            code = "\n".join(line for line in source(c).splitlines() if not line.startswith("#|")).strip()
            out = outputs(c)
            if "#| echo: false" in source(c): parts.append(f"```\n{out}\n```")
            else: parts += [f"```python\n{code}\n```", *(["\n".join("    " + line for line in out.splitlines())] if out else [])]
    return "\n\n".join(parts) + "\n"

COLAB_MARK, GUIDE_MARK = "<!-- colabs: written by tools/readme.py -->", "<!-- guide: written by tools/readme.py -->"

def colab_list(repo: str) -> str:
    "The notebooks for Colab: a line each."
    lines = [f"- [{p.stem}](../examples/{p.name}): {subtitle(p)}. {colab_badge(f'examples/{p.name}', repo)}".rstrip() for p in colabs()]
    return "\n".join([COLAB_MARK, "", *lines])

def title_of(nb: Path) -> str: return source(cells(nb)[0]).splitlines()[0].removeprefix("# ")

def guide_list() -> str:
    "The pages beside the lessons, in the index."
    nbs, out = ROOT / settings()["nbs_path"], [GUIDE_MARK, ""]
    for title, what, stems in GUIDE:
        pages = [(s, nbs / f"{s}.ipynb") for s in stems]
        out += [f"**{title}.** {what}", "", *(f"- [{title_of(p)}]({s}.ipynb): {subtitle(p)}" for s, p in pages), ""]
    return "\n".join(out).rstrip()

def with_repo(nb: Path, repo: str) -> str:
    "A Colab notebook with the badge under its title and the source in its install cell; without a public repository neither."
    d = json.loads(nb.read_text(encoding="utf-8"))
    head = re.sub(r"\n*\[!\[Open In Colab\][^\n]*", "", source(d["cells"][0]))
    badge = colab_badge(f"examples/{nb.name}", repo, settings()["branch"])
    below = f"\n\n{badge}" if badge else ""
    d["cells"][0]["source"] = re.sub(r"(\n> [^\n]+)", lambda m: m[1] + below, head, count=1).splitlines(keepends=True)
    address, where = f"git+https://github.com/{repo}" if repo else "", r'(os\.environ\.get\("LLMINFER_SOURCE", )"[^"]*"'
    for c in d["cells"]: c["source"] = re.sub(where, lambda m: f'{m[1]}"{address}"', source(c)).splitlines(keepends=True)
    return json.dumps(d, indent=1, ensure_ascii=False) + "\n"

def with_lists(nb: Path) -> str:
    "A notebook whose marked cells hold what this file writes."
    d = json.loads(nb.read_text(encoding="utf-8"))
    lists = {MARK: floor_table, GUIDE_MARK: guide_list, COLAB_MARK: lambda: colab_list(public_repo())}
    for c in d["cells"]:
        for mark, text in lists.items():
            if source(c).startswith(mark): c["source"] = text().splitlines(keepends=True)
    return json.dumps(d, indent=1, ensure_ascii=False) + "\n"

def build() -> dict[str, str]:
    "What the index, README.md, the page of the Colab notebooks and those notebooks themselves ought to hold, by path."
    pages = {f"nbs/{s}.ipynb": with_lists(ROOT / f"nbs/{s}.ipynb") for s in ("index", "howto_colab")}
    pages["README.md"] = readme(json.loads(pages["nbs/index.ipynb"])["cells"])
    return pages | {p.relative_to(ROOT).as_posix(): with_repo(p, public_repo()) for p in colabs()}

def stale() -> list[str]:
    "Files that are not what `build` makes."
    return [p for p, text in build().items() if not (ROOT / p).exists() or (ROOT / p).read_text(encoding="utf-8") != text]

if __name__ == "__main__":
    if "--measure" in sys.argv: measure([Path(a).stem for a in sys.argv[2:]])
    old = stale()
    if "--check" in sys.argv: sys.exit(f"not current, run make readme: {', '.join(old)}" if old else 0)
    for path, text in build().items(): (ROOT / path).write_text(text, encoding="utf-8")
    print("written:", ", ".join(old) or "nothing, all current")
