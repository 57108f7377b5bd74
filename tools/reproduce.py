"""Check every number that comes from a record, without a GPU: `make reproduce`.

1. records follow their JSON Schema, have the seal of their bytes, and do not contradict themselves;
2. every registered comparison gives the verdict that it documents;
3. every notebook cell that reads a record is run again, alone, and prints what is stored in the notebook;
4. README.md is what nbs/index.ipynb says, and every claim of benchmarks/claims.toml stands where it says, with the record's number;
5. the figures are drawn again (`--figures FOLDER` keeps them).

    python tools/reproduce.py [--figures FOLDER] [--only records,registered,notebooks,pages,figures]
    python tools/reproduce.py --seal RECORD...      # after a measurement: note the hash of these records (all: of every one)
"""
from __future__ import annotations
import argparse, ast, asyncio, contextlib, inspect, io, json, os, re, sys, tempfile, tomllib
from importlib import import_module
from pathlib import Path
from typing import Any
from house import ROOT, cells, directives, module_of, notebooks, source

BENCH = ROOT / "benchmarks"
PARTS = ("records", "registered", "notebooks", "pages", "figures")
MARK = re.compile(r"benchmarks[/\"' ,]+records")


def records_in(folder: Path) -> dict[str, Any]:
    "Name to content; a .jsonl is a list."
    out: dict[str, Any] = {}
    for p in sorted(folder.iterdir()):
        if p.suffix == ".json" and p.name != "SEALS.json": out[p.name] = json.loads(p.read_text(encoding="utf-8"))
        if p.suffix == ".jsonl": out[p.name] = [json.loads(x) for x in p.read_text(encoding="utf-8").splitlines()]
    return out


def check_schemas(records: dict[str, Any], folder: Path) -> list[str]:
    "Each record against record.json, and against the schema of its kind if there is one."
    import jsonschema
    schemas = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))}
    out = []
    for name, r in records.items():
        if isinstance(r, list): continue
        kind = r.get("kind") or ("benchmark" if "schema_version" in r else "")
        for schema in (schemas[k] for k in dict.fromkeys(("record" if kind != "benchmark" else kind, kind)) if k in schemas):
            for e in sorted(jsonschema.Draft202012Validator(schema).iter_errors(r), key=lambda e: list(e.path))[:3]:
                out.append(f"{name}: {'.'.join(map(str, e.path)) or 'the record'}: {e.message[:120]}")
    return out


def check_records(bench: Path) -> list[str]:
    from llminfer.registered import check_record, check_seals
    folder, seals = bench / "records", bench / "records" / "SEALS.json"
    records = records_in(folder)
    out = check_schemas(records, folder / "schema")
    out += check_seals(folder, json.loads(seals.read_text(encoding="utf-8")) if seals.exists() else {})
    return out + [f"{name}: {x}" for name, r in records.items() if isinstance(r, dict) for x in check_record(r)]


def told_records(bench: Path) -> str:
    "What was checked, and in how many records derived numbers could be."
    from llminfer.registered import CHECKS
    records = [r for r in records_in(bench / "records").values() if isinstance(r, dict)]
    return f"schemas and seals; derived numbers of {sum(r.get('kind') in CHECKS for r in records)} of {len(records)}"


def check_registered(bench: Path) -> list[str]:
    from llminfer.registered import judge, read_registration
    records, out = records_in(bench / "records"), []
    for f in sorted((bench / "registered").glob("*.toml")):
        try:
            r = read_registration(f)
            j = judge(r, [records[n] for n in r.records if n in records])
            values = ", ".join(f"{v:.4g}" for v in j.values)
            if not j.agrees: out.append(f"registered/{f.name}: the verdict is {j.verdict} ({values}), documented is {j.documented}")
        except ValueError as e: out.append(f"registered/{f.name}: {e}")
    return out


def told_registered(bench: Path) -> str:
    "How many registrations there are, and how many of them are no predictions."
    from llminfer.registered import read_registration
    late = [read_registration(f).retrospective for f in (bench / "registered").glob("*.toml")]
    return f"each of {len(late)} gives its documented verdict; {sum(late)} were written after their run"


def names_of(tree: ast.AST) -> tuple[set[str], set[str]]: # (names that are set, names that are read) by some code
    "Only what is at the top counts as set; what a function reads counts as read."
    made: set[str] = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store): made.add(n.id)
        elif isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)): made.add(n.name)
        elif isinstance(n, (ast.Import, ast.ImportFrom)): made |= {(a.asname or a.name).split(".")[0] for a in n.names}
    return made, {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def record_cells(nb: Path) -> list[tuple[int, list[int]]]:
    "Cells that print from a record, each with the cells before it that it needs."
    code = {i: c for i, c in enumerate(cells(nb)) if c["cell_type"] == "code"}
    trees = {i: ast.parse(re.sub(r"^[%!].*$", "", source(c), flags=re.M)) for i, c in code.items()}
    made = {i: names_of(t) for i, t in trees.items()}
    exported = {i for i, c in code.items() if any(d.split()[0] in ("export", "exports", "default_exp") for d in directives(c) if d)}
    tainted: set[str] = set()
    out = []
    for i in code:
        if i in exported: continue
        sets, reads = made[i]
        if MARK.search(source(code[i])) or reads & tainted:
            tainted |= sets - {n for n in sets if len(n) == 1}
            if stored(code[i]): out.append((i, needed(i, made, exported)))
    return out


def needed(i: int, made: dict[int, tuple[set[str], set[str]]], exported: set[int]) -> list[int]:
    "Walk back: the newest cell before that sets each name that is read, and not set by its reader itself (the letter of a loop, mostly)."
    want, out = made[i][1] - made[i][0], [i]
    for j in sorted((k for k in made if k < i and k not in exported), reverse=True):
        if made[j][0] & want:
            out.insert(0, j)
            want = (want - made[j][0]) | (made[j][1] - made[j][0])
    return out


def stored(cell: dict[str, Any]) -> str:
    "Printed text of a cell; a picture or a table is no text."
    return "".join("".join(o.get("text", "")) for o in cell["outputs"] if o.get("name") == "stdout").strip()


def rerun(nb: Path, parts: list[int]) -> str:
    "Run cells in an empty world, its own library there, and return what the last one prints."
    code, out, scope = cells(nb), io.StringIO(), dict[str, Any]({"__name__": "__main__"})
    if module := module_of(nb): scope |= {k: v for k, v in vars(import_module(f"llminfer.{module}")).items() if not k.startswith("__")}
    home = os.getcwd()
    os.chdir(nb.parent)
    try:
        for k in parts:
            out = io.StringIO()
            text = compile(source(code[k]), f"{nb.name}[{k}]", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                result = eval(text, scope)
                if inspect.iscoroutine(result): asyncio.run(result)
    finally: os.chdir(home)
    return out.getvalue().strip()


def needs_no_record(nb: Path, parts: list[int]) -> bool: return not any(MARK.search(source(cells(nb)[k])) for k in parts)


def check_notebooks(nbs: list[Path]) -> tuple[list[str], int]: # (problems, cells that were compared)
    "What a cell prints from a record is what the notebook has stored."
    out, n = [], 0
    for nb in nbs:
        if not MARK.search(nb.read_text(encoding="utf-8").replace("\\\"", "\"")): continue
        for i, parts in record_cells(nb):
            if needs_no_record(nb, parts): continue
            want = stored(cells(nb)[i])
            try: got = rerun(nb, parts)
            except Exception as e:
                out.append(f"{nb.name} cell {i} cannot be run alone: {type(e).__name__}: {str(e)[:100]}")
                continue
            n += 1
            if got != want: out.append(f"{nb.name} cell {i}: the page says {first_difference(want, got)}")
    return out, n


def first_difference(page: str, record: str) -> str:
    pairs = zip((page + "\n").splitlines() + [""] * 99, (record + "\n").splitlines() + [""])
    return next((f"{a[:110]!r}, the record {b[:110]!r}" for a, b in pairs if a != b), "something else")


def check_pages(root: Path) -> list[str]:
    "README, and the claims in prose."
    import readme
    from llminfer.registered import pick
    out = [f"{p} is not what the notebooks say: run make readme" for p in readme.stale()] if root == ROOT else []
    for c in tomllib.loads((root / "benchmarks/claims.toml").read_text(encoding="utf-8"))["claim"]:
        page = root / c["page"]
        text = page.read_text(encoding="utf-8")
        if page.suffix == ".ipynb": text = "\n".join(source(x) for x in cells(page) if x["cell_type"] == "markdown")
        try:
            record = json.loads((root / "benchmarks/records" / c["record"]).read_text(encoding="utf-8"))
            number = c["format"].format(*(scaled(pick(record, p), c.get("times", 1)) for p in c["values"]))
        except (ValueError, OSError, IndexError) as e: out.append(f"claim in {c['page']}: {e}"); continue
        if c["text"].format(number) not in text: out.append(f"{c['page']} does not say {c['text'].format(number)!r}, as {c['record']} does")
    return out


def scaled(v: Any, times: float) -> Any: return v * times if isinstance(v, (int, float)) and times != 1 else v


def draw_figures(bench: Path, folder: Path) -> list[str]: # files
    "The figures that come from records alone."
    from llminfer import plots
    records, out = records_in(bench / "records"), []
    if ladder := records.get("ladder.json"):
        for model in dict.fromkeys(r["model"] for r in ladder["rows"]):
            batches = sorted({r["batch"] for r in ladder["rows"] if r["model"] == model and "batch" in r})
            out.append(plots.save_png([plots.waterfall_chart(ladder, model, b) for b in batches], folder / f"waterfall_{model}.png"))
    if v := records.get("gpu_vs_vllm.json"):
        out.append(plots.save_png([plots.ratio_chart(v), plots.roofline_chart(v)], folder / "against_vllm.png"))
    return out


def seal(names: list[str], bench: Path = BENCH) -> None:
    "Note the hash of some records; each must first agree with itself."
    from llminfer.registered import check_record, seal_of
    folder = bench / "records"
    file, records = folder / "SEALS.json", records_in(folder)
    seals = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for n in (list(records) if names == ["all"] else [Path(n).name for n in names]):
        if n not in records: sys.exit(f"error: {folder / n} does not exist")
        problems = check_record(records[n]) if isinstance(records[n], dict) else []
        if problems: sys.exit(f"error: {n} is not sealed: {problems[0]}")
        seals[n] = seal_of(folder / n)
    file.write_text(json.dumps({k: v for k, v in sorted(seals.items()) if k in records}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(seals)} seals in {file}")


def main(argv: list[str] | None = None) -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--figures", type=Path)
    ap.add_argument("--only", default=",".join(PARTS))
    ap.add_argument("--seal", nargs="+", metavar="RECORD")
    a = ap.parse_args(argv)
    if a.seal:
        seal(a.seal)
        return 0
    problems, parts = [], a.only.split(",")
    if unknown := set(parts) - set(PARTS): ap.error(f"--only knows {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    def step(name: str, found: list[str], what: str) -> None:
        problems.extend(found)
        print(f"{name:11s} {'ok' if not found else f'{len(found)} problems':12s} {what}", *(f"\n  {x}" for x in found))
    if "records" in parts: step("records", check_records(BENCH), told_records(BENCH))
    if "registered" in parts: step("registered", check_registered(BENCH), told_registered(BENCH))
    if "notebooks" in parts:
        found, n = check_notebooks(notebooks())
        step("notebooks", found, f"{n} cells that print from records")
    if "pages" in parts: step("pages", check_pages(ROOT), "README and claims in prose")
    if "figures" in parts:
        with tempfile.TemporaryDirectory() as tmp:
            folder = a.figures or Path(tmp)
            try: step("figures", [], f"{len(draw_figures(BENCH, folder))} drawn" + (f" in {folder}" if a.figures else ""))
            except (ValueError, KeyError) as e: step("figures", [f"{type(e).__name__}: {e}"], "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
