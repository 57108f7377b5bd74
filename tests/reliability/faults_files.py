"""F15-F18: adapters, weight files and full disks."""
from __future__ import annotations
import errno, json, os, random, resource, shutil, struct, subprocess, threading
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Callable, Iterator
import test_adapters as lora
import torch
from typer.testing import CliRunner
from llminfer import cli
from llminfer.adapters import AdapterError, make_adapter
from llminfer.artifacts import BenchmarkResult, RunMetrics
from llminfer.config import ConfigError
from llminfer.formats import LoadError
from llminfer.loading import load_model, make_tiny
from llminfer.tracing import Trace
from reliability.table import Counted, family
from support.checkpoints import IDS, edit_json, one_line, shard, to_gguf
from support.engines import paged, settle, tiny


@family("F15", "Adapter load fails (missing file, wrong rank, wrong base, truncated)", 40, 8)
def broken_adapters(seed: int, count: int, c: Counted) -> None:
    "Beside a running request, which does not notice; the scores of everybody stay as they were, bit for bit."
    rng, e = random.Random(seed), lora.engine(load=["all"])
    score = lambda: [[t.logprob for t in e.run_requests([lora.ask(lora.prompt(1), n, 6, logprobs=3)])[0].logprobs] for n in (None, "all")]
    try:
        before = score()
        want = lora.text_of("llama", "all", lora.prompt(2), 40)
        with TemporaryDirectory() as d:
            for i in range(count):
                fault, folder = ("missing", "rank", "base", "truncated")[i % 4], Path(d) / f"bad{i}"
                with c.case(f"{i}, {fault}"):
                    shutil.copytree(lora.adapters("qwen3" if fault == "base" and i % 8 == 2 else "llama")[rng.choice(list(lora.KINDS))], folder)
                    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
                    if fault == "missing": (config, weights)[i // 4 % 2].unlink()
                    elif fault == "rank": edit_json(config, r=json.loads(config.read_text())["r"] + rng.randrange(1, 9), rank_pattern={})
                    elif fault == "base" and i % 8 != 2: make_adapter(folder, tiny("opt")[1].config, i)
                    elif fault == "truncated": weights.write_bytes(weights.read_bytes()[:rng.randrange(weights.stat().st_size)])
                    elif fault == "base": edit_json(config, layers_to_transform=[2 + i], target_modules=["q_proj"])
                    beside = paged(e).submit(lora.ask(lora.prompt(2), "all", 40))
                    try: e.load_adapter(str(folder), f"bad{i}")
                    except AdapterError as err: one_line(err, str(folder))
                    else: raise AssertionError("it was loaded")
                    assert beside.finished.wait(60) and beside.samples[0].token_ids == want, "the request beside it has other tokens"
                    assert e.list_adapters() == ["all"] and score() == before, "not as before"
        settle(e)
    finally: e.unload()
    c.notes |= {"bystander_requests": count, "blocks_held": 0}


@family("F16", "Adapter load/unload during traffic", 200, 24)
def switches(seed: int, count: int, c: Counted) -> None:
    "Three threads ask for three adapters and the base (1.5 requests a switch), another loads, replaces and unloads; each switch is a case, a wrong token spoils all."
    kinds, n_asked = ["all", "list", "regex"], max(12, count * 3 // 2)
    e = lora.engine(load=kinds, max_num_seqs=8, block=4)
    wrong, over = list[str](), threading.Event()
    jobs = [(lora.prompt((i + seed) % 12, 6), [None, *kinds][i % 4]) for i in range(n_asked)]
    for ids, name in jobs[:48]: lora.text_of("llama", name, ids, 5)
    def ask_all(mine: list[Any]) -> None:
        for ids, name in mine:
            r = e.run_requests([lora.ask(ids, name, 5, n=1 + (ids[0] % 2))])[0]
            if r.error is not None or any(o.token_ids != lora.text_of("llama", name, ids, 5) for o in r.outputs): wrong.append(f"{name}: {r.error or 'other tokens'}")
    def switch() -> None:
        rng, n = random.Random(seed), 0
        while n < count:
            name = f"temp{n % 3}"
            steps: list[Callable[[], Any]] = [lambda: paged(e).load_adapter(str(lora.adapters()[rng.choice(list(lora.KINDS))]), name, activate=False),
                lambda: paged(e).load_adapter(str(lora.adapters()[kinds[n % 3]]), kinds[n % 3], activate=False, replace=True), lambda: e.unload_adapter(name)]
            for do in steps:
                if c.tried >= count and do is not steps[2]: continue
                if c.tried < count:
                    with c.case(f"{n}, {name}"): do()
                else: do()
            n += 3
        over.set()
    threads = [threading.Thread(target=ask_all, args=(jobs[i::3],)) for i in range(3)] + [threading.Thread(target=switch)]
    for t in threads: t.start()
    for t in threads: t.join(300)
    books = paged(e).adapters
    assert books is not None
    if wrong or any(t.is_alive() for t in threads) or not over.is_set(): c.spoil(f"{len(wrong)} wrong answers: {wrong[:3]}")
    if [n for n in e.list_adapters() if n in kinds] != kinds or any(x.users for x in books.taken.values()): c.spoil("a hold on an adapter is left")
    settle(e)
    e.unload()
    c.notes |= {"bystander_requests": n_asked, "bystander_wrong": len(wrong), "blocks_held": 0}


KINDS = ("cut", "header", "missing shard", "dtype", "shape")


@family("F17", "Weight file faults (cut, flipped byte in header, missing shard, wrong dtype, wrong shape)", 60, 20)
def weight_files(seed: int, count: int, c: Counted) -> None:
    "Half safetensors, half GGUF. Each ends in a LoadError of one line that names the file, within 10 s; a flipped byte may instead leave the model as it was (free text in the header)."
    rng, same = random.Random(seed), 0
    with TemporaryDirectory() as d:
        base = make_tiny(Path(d) / "base", "llama", 0)
        to_gguf(base, Path(d) / "base.gguf", "Q8_0")
        want = {kind: load_model(p, "float64").logits(torch.tensor(IDS)) for kind, p in (("safetensors", base), ("gguf", Path(d) / "base.gguf"))}
        for i in range(count):
            fault, kind = KINDS[i % 5], ("safetensors", "gguf")[i // 5 % 2]
            with c.case(f"{i}, {fault}, {kind}"):
                at = Path(d) / f"m{i}"
                if kind == "safetensors":
                    shutil.copytree(base, at)
                    file = spoil_safetensors(at, fault, rng)
                else:
                    at.mkdir()
                    file = spoil_gguf(Path(d) / "base.gguf", at / "m.gguf", fault, rng)
                out = read_in_time(at if kind == "safetensors" else at / "m.gguf")
                if fault == "header" and not isinstance(out, BaseException):
                    assert torch.equal(out, want[kind]), "other weights, and no error"
                    same += 1
                else:
                    assert isinstance(out, LoadError), repr(out)[:200]
                    one_line(out, file)
                shutil.rmtree(at)
    c.notes["flips_that_change_nothing"] = same


def read_in_time(path: Path, seconds: float = 10) -> Any:
    "Logits of a model, or what loading raised."
    seen: list[Any] = []
    def work() -> None:
        try: seen.append(load_model(path, "float64").logits(torch.tensor(IDS)))
        except BaseException as e: seen.append(e)
    t = threading.Thread(target=work, daemon=True)
    t.start()
    t.join(seconds)
    assert seen, "still reading"
    return seen[0]


def spoil_safetensors(folder: Path, fault: str, rng: random.Random) -> str:
    "Returns what the error must name."
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    n = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8:8 + n])
    name = rng.choice([k for k in head if k != "__metadata__"])
    if fault == "missing shard":
        where = shard(folder)
        lost = rng.choice(sorted(set(where.values())))
        (folder / lost).unlink()
        return lost
    if fault == "cut": raw = raw[:rng.choice((rng.randrange(8), rng.randrange(8, n), rng.randrange(8 + n, len(raw))))]
    elif fault == "header":
        k = rng.randrange(8 + n)
        raw[k] ^= 1 << rng.randrange(8)
    else:
        if fault == "dtype": head[name]["dtype"] = rng.choice(["F64", "F16", "I4", "U7", "f32", None])
        else: head[name]["shape"] = rng.choice([[3, 5], [], [-1, 4], head[name]["shape"] + [2], "64"])
        text = json.dumps(head).encode()
        raw = bytearray(struct.pack("<Q", len(text)) + text + raw[8 + n:])
    file.write_bytes(raw)
    return file.name


def spoil_gguf(src: Path, file: Path, fault: str, rng: random.Random) -> str:
    raw = bytearray(src.read_bytes())
    at = raw.index(name := b"blk.1.attn_q.weight") + len(name)             # n_dims, dims, type, offset
    n_dims = struct.unpack("<I", raw[at:at + 4])[0]
    kind = at + 4 + 8 * n_dims
    if fault == "cut": raw = raw[:rng.choice((rng.randrange(24), rng.randrange(24, at), rng.randrange(at, len(raw) - 64)))]
    elif fault == "header":
        start = raw.index(b"blk.0.attn_q.weight")                          # the table of tensors: names, sizes, types, places
        k = rng.choice((rng.randrange(24), rng.randrange(start, kind)))
        raw[k] ^= 1 << rng.randrange(8)
    elif fault == "missing shard":
        file.with_name("m-00001-of-00002.gguf").write_bytes(raw)           # says by its name that there is another
        raw = raw[:0]
        return "m.gguf"
    elif fault == "dtype": raw[kind:kind + 4] = struct.pack("<I", rng.choice((0, 1, 2, 99, 2**31, 31)))
    else: raw[at + 4:at + 12] = struct.pack("<Q", rng.choice((0, 1, 63, 96, 2**40, 2**63)))
    file.write_bytes(raw)
    return file.name


@contextmanager
def bad_places(d: Path) -> Iterator[dict[str, Path]]:
    "Folders in which nothing, or almost nothing, can be written: a tmpfs of 1 MiB that is full, one with 4 KiB left, one that is read-only; without root a limit on file sizes and modes."
    out, mounted = {n: d / n for n in ("full", "almost full", "read-only")}, list[Path]()
    for p in out.values(): p.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for n, p in out.items():
            if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(p)], capture_output=True).returncode == 0: mounted.append(p)
        for n, p in out.items():
            (p / "old.json").write_text("old")
            (p / "old.html").write_text("old")
            if p not in mounted: continue
            if n == "read-only": subprocess.run(["mount", "-o", "remount,ro", str(p)], check=True)
            else: fill(p, leave=4096 if n == "almost full" else 0)
        if not mounted:
            out["read-only"].chmod(0o555)
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
        yield out | {"no folder": d / "file" / "in a file"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for p in mounted: subprocess.run(["umount", str(p)], check=True)


def fill(p: Path, leave: int) -> None:
    with (p / "filler").open("wb") as f:
        while True:
            try: os.write(f.fileno(), b"x" * 4096)
            except OSError as e:
                assert e.errno == errno.ENOSPC
                break
        f.truncate(max(0, f.tell() - leave))


def result() -> BenchmarkResult:
    m = RunMetrics(1, "short")
    m.latencies_ms, m.throughputs_tps, m.ttfts_ms, m.wall_ms = [1.0] * 2000, [2.0] * 2000, [0.5] * 2000, [1.0]
    return BenchmarkResult("paged", "tiny", "none", {1: m})


def events() -> Trace:
    t = Trace(enabled=True)
    for i in range(500): t.emit("note", text=f"{i} " * 20)
    return t


def command(*args: Any) -> None:
    "A command; one that fails must do so with a line and no traceback, which is raised here as it was said."
    r = CliRunner().invoke(cli.app, [str(a) for a in args], prog_name="llminfer")
    assert r.exit_code in (0, 1, 2) and "Traceback" not in r.output, (r.exit_code, r.output[-300:])
    if r.exit_code: raise ConfigError(r.stderr.strip().splitlines()[-1])


WRITERS: dict[str, Callable[[Path, str], Any]] = {   # (folder, model) -> writes old.json or old.html there
    "bench --json-out": lambda p, m: command("bench", "-m", m, "--device", "cpu", "--batch-sizes", "1", "--runs", "1", "--warmup", "0", "--max-tokens", "2", "--json-out", p / "old.json"),
    "save_json": lambda p, m: result().save_json(p / "old.json"), "trace": lambda p, m: events().save(p / "old.json"),
    "trace page": lambda p, m: events().to_html(p / "old.html"), "chrome trace": lambda p, m: events().to_chrome(p / "old.json")}


@family("F18", "Disk full or read-only output folder in bench and notebooks", 20, 10)
def full_disks(seed: int, count: int, c: Counted) -> None:
    "Five writers, four places: an error that names the path, the old file as it was, no half of a new one; then the same writer works elsewhere."
    with TemporaryDirectory() as d:
        (Path(d) / "file").write_text("")
        (good := Path(d) / "good").mkdir()
        model = str(make_tiny(Path(d) / "tiny"))
        with bad_places(Path(d)) as places:
            cases = [(w, p) for p in places for w in WRITERS]
            random.Random(seed).shuffle(cases)
            for writer, place in cases[:count]:
                p = places[place]
                with c.case(f"{writer}, {place}"):
                    before = listing(p)
                    try: WRITERS[writer](p, model)
                    except (OSError, ConfigError) as e: assert str(p) in str(e) and "\n" not in str(e), str(e)
                    else: assert place == "almost full", "nobody said anything"
                    after = listing(p)
                    assert before == after or place == "almost full", (before, after)
        for writer in WRITERS:
            if writer != "bench --json-out": WRITERS[writer](good, model)


def listing(p: Path) -> dict[str, bytes]: return {f.name: f.read_bytes() for f in p.iterdir() if f.name != "filler"} if p.is_dir() else {}


