"""The reliability campaign: the fault table F1-F22, the input table I1-I11 and the load table L1-L9, each row with its count.

python -m tests.reliability.run [ROW ...] [--seed N] [--count N] [--sample] [--nightly] [--out FILE]

Without rows: everything but the nightly rows (L3, L6, L7 and F22 run with --nightly). --sample takes the counts of `make test`.
With --out, rows that the file already has with the same seed and full count are kept, so that an interrupted campaign goes on where it stopped."""
from __future__ import annotations
import argparse, json, os, signal, sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools"), str(ROOT / "benchmarks")]
from reliability.table import FAMILIES, KINDS, Counted, load_tables


def row_of(c: Counted, load: tuple[float, ...]) -> dict[str, Any]:
    f = FAMILIES[c.family]
    return {"title": f.title, "goal": f.goal, "tried": c.tried, "good": c.good, "ok": c.ok, "counted": f.counted, "seed": c.seed, "seconds": c.seconds, "load_before": round(load[0], 2),
            "load_after": round(os.getloadavg()[0], 2), "date": datetime.now(UTC).isoformat(timespec="seconds"), "notes": c.notes, "bad": c.bad[:5]} | ({"error": c.error} if c.error else {})


def totals(rows: dict[str, Any]) -> dict[str, int]:
    "Sums over the rows that are promised as one number; forced preemptions and the soak are figures of their own."
    total = lambda kind, what: sum(r[what] for k, r in rows.items() if k[0] == kind and r["counted"])
    out = {"faults_injected": total("F", "tried"), "faults_survived": total("F", "good"), "inputs_tried": total("I", "tried"), "inputs_answered": total("I", "good")}
    out |= {"loads_tried": sum(k[0] == "L" for k in rows), "loads_held": sum(r["ok"] for k, r in rows.items() if k[0] == "L")}
    if "F8" in rows: out |= {"preemptions_forced": rows["F8"]["tried"], "preemptions_wrong": rows["F8"]["tried"] - rows["F8"]["good"]}
    if "F22" in rows: out |= {"soak_requests": rows["F22"]["tried"], "soak_answered": rows["F22"]["good"]}
    if errors := sum("error" in r for r in rows.values()): out["harness_errors"] = errors
    return out | {"bystander_requests": sum(r["notes"].get("bystander_requests", 0) for r in rows.values()), "bystanders_wrong": sum(r["notes"].get("bystander_wrong", 0) for r in rows.values())}


def record(rows: dict[str, Any], seed: int, sample: bool, note: str) -> dict[str, Any]:
    from llminfer.artifacts import environment
    order = sorted(rows, key=lambda k: (list(KINDS).index(k[0]), int(k[1:])))
    return {"kind": "reliability", "seed": seed, "sample": sample, "note": note, **totals(rows), "families": {k: rows[k] for k in order},
            "environment": environment() | {"date": datetime.now(UTC).isoformat(timespec="seconds"), "load": [round(x, 2) for x in os.getloadavg()], "audit": True}}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rows", nargs="*", help="F1 ... F22, I1 ... I11, L1 ... L9")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--count", type=int)
    p.add_argument("--sample", action="store_true")
    p.add_argument("--nightly", action="store_true", help="the long rows too")
    p.add_argument("--note", default="", help="kept in the record: what else the machine did")
    p.add_argument("--out", type=Path)
    a = p.parse_args(argv)
    os.environ |= {"LLMINFER_AUDIT": "1", "HF_HUB_OFFLINE": "1"}     # the pool's books are checked after every step, here and in every child
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tables = load_tables("".join(k for k in KINDS if not a.rows or any(r.startswith(k) for r in a.rows)))
    if unknown := [r for r in a.rows if r not in tables]: p.error(f"there is no row {unknown[0]}; there are {' '.join(tables)}")
    old = json.loads(a.out.read_text(encoding="utf-8")) if a.out and a.out.exists() else {}
    rows: dict[str, Any] = old.get("families", {}) if (old.get("seed"), old.get("sample")) == (a.seed, a.sample) else {}
    bad = 0
    for name in a.rows or [k for k, f in tables.items() if a.nightly or not f.nightly]:
        f = tables[name]
        want = a.count if a.count is not None else f.sample if a.sample else f.goal
        if not a.rows and name in rows and rows[name]["ok"] and rows[name]["tried"] >= want: continue
        load = os.getloadavg()
        c = f(want, a.seed)
        rows[name] = row_of(c, load)
        print(f"{name:4} {'ok ' if c.ok else 'BAD' if c.bad or not c.error else 'ERR'} {c.good}/{c.tried} of {f.goal}  {c.seconds:7.1f} s  {f.title}  {json.dumps(c.notes)}", flush=True)
        for line in c.bad[:5]: print("    ", line, flush=True)
        if c.error: print(f"     harness error (outside of any case) after {c.tried} of {want} cases, the others were not tried: {c.error}", flush=True)
        bad += not c.ok
        if a.out:
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text(json.dumps(record(rows, a.seed, a.sample, a.note or old.get("note", "")), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(totals(rows)), flush=True)
    if stopped := [f"{k} ({r['title']}): {r['error']}" for k, r in rows.items() if "error" in r]: print("harness errors (outside of any case):", *stopped, sep="\n    ")
    return int(bad > 0)


if __name__ == "__main__": sys.exit(main())
