"""F5-F11, F19, F21: what the engine itself may meet."""
from __future__ import annotations
import json, logging, random, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
import numpy as np
import torch
from llminfer import assembly
from llminfer.config import EngineConfig
from llminfer.core import CoreConfig, generate, make_core
from llminfer.cuda_graphs import GraphRunner
from llminfer.engine_process import ProcessHandle
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.request import GenerationRequest, SamplingParams
from llminfer.runner import TorchProgram
from llminfer.serving import ServingLimits
from llminfer.tracing import inject
from reliability.checks import ask_known, engine_at_rest, get, ids_of, known, known_body, plain_ids, post, probe, settle_server, tiny_server, together, watched, within
from reliability.table import Counted, family
from support.api import serving
from support.engines import counters, oracle, paged, tiny
from support.serving import STICKY, make_scripted

FAILURES = [RuntimeError("CUDA error: operation not permitted when stream is capturing"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), ValueError("a shape"),
            OSError(28, "No space left on device"), NotImplementedError("op"), AssertionError(), KeyError("kernel"), TypeError("arg"), Exception("many\nlines")]
RAISED = [RuntimeError("a kernel's argument"), ValueError("a shape"), IndexError("index 7"), torch.linalg.LinAlgError("singular"), KeyError("weight"), AssertionError()]


def core_of(e: Any) -> Any:
    loop = paged(e).loop
    assert loop is not None
    return loop.core


class Step:
    "Raise in the k-th forward of the engine; notes the first prompt ids of the requests in that step."
    def __init__(self, engine: Any, k: int, what: BaseException, times: int = 1):
        self.engine, self.k, self.what, self.times, self.members, self.fired = engine, k, what, times, set[int](), 0
        self.now: set[int] = set()

    def launch(self, plan: Any) -> None:
        self.now = {int(s.ids[0]) for s, _ in core_of(self.engine).scheduler.flights[-1].members}

    def forward(self, **info: Any) -> None:
        self.k -= 1
        if self.k < 0 and self.fired < self.times:
            self.fired += 1
            self.members |= self.now
            raise self.what


@family("F5", "Forward raises at step k; a sticky error of the device ends the engine process", 200, 8)
def forward_raises(seed: int, count: int, c: Counted) -> None:
    "19 of 20 are errors of the host, over HTTP: only requests of that step may fail. The others break the device: all fail, /health is 503, a new process answers."
    rng, n_sticky = random.Random(seed), max(1, count // 20)
    with tiny_server(max_num_seqs=4) as s, ThreadPoolExecutor(6) as pool:
        engine, hit, spared = s.engine.handle.engine, 0, 0
        probe(s.url)
        for i in range(count - n_sticky):
            which, k = rng.sample(range(18), 6), rng.randrange(1, 41)
            with c.case(f"{i}, {which}, step {k}"):
                while True:                      # a step that was not reached is no fault: an earlier one, then
                    step = Step(engine, k, RAISED[i % len(RAISED)])
                    with inject("runner.launch", step.launch, times=10**9), inject("model.forward", step.forward, times=10**9):
                        answers = list(pool.map(lambda j: post(s.url, known_body(j, stream=j % 2 == 0)), which))
                    if step.fired: break
                    k //= 2
                for j, (status, body) in zip(which, answers):
                    ids = ids_of(body)
                    if 100 + j in step.members:
                        assert ids is None and (status >= 500 or j % 2 == 0), f"request {j} of that step: {status} {body[:200]!r}"
                        hit += 1
                    else:
                        assert status == 200 and ids == plain_ids(j), f"request {j} was not in that step: {status} {body[:200]!r}"
                        spared += 1
                probe(s.url, i % 8)
        settle_server(s)
        if counters(engine).get("engine_errors"): c.spoil("a core was built anew for an error of one step")
    c.notes |= {"host_errors": count - n_sticky, "requests_in_a_failed_step": hit, "requests_beside_it": spared, "sticky_errors": n_sticky}
    sticky(n_sticky, c)


def sticky(n: int, c: Counted) -> None:
    "The engine in a process of its own; a prompt makes its launch raise what CUDA raises after an illegal address."
    handle: Any = ProcessHandle(EngineConfig(model_name="0.002"), make_scripted)
    with serving(handle, limits=ServingLimits(backoff_s=0.05)) as s, ThreadPoolExecutor(3) as pool:
        want = ids_of(post(s.url, scripted_body(7, 20))[1])
        took = []
        for i in range(n):
            with c.case(f"sticky {i}"):
                pid = s.engine.handle.pid
                others = [pool.submit(post, s.url, scripted_body(5 + j, 1000)) for j in range(2)]
                within(10, lambda: s.engine.stats()["running"] == 2)
                status, body = post(s.url, scripted_body(STICKY, 5))
                assert status >= 500 and "error" in json.loads(body), (status, body)
                within(2, lambda: get(s.url, "/health")[0] == 503)
                assert "started again" in json.loads(get(s.url, "/health")[1])["why"]
                assert [f.result(10)[0] >= 500 for f in others] == [True, True]
                took.append(within(60, lambda: get(s.url, "/health")[0] == 200 and get(s.url, "/ready")[0] == 200))
                assert s.engine.handle.pid != pid and ids_of(post(s.url, scripted_body(7, 20))[1]) == want
        s.settle()
    c.notes["restart_s_max"] = round(max(took, default=0.0), 1)


def scripted_body(first: int, n: int) -> dict[str, Any]: return {"prompt": [first, 20, 21], "max_tokens": n, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@family("F6", "NaN or inf logits for one row", 100, 12)
def bad_logits(seed: int, count: int, c: Counted) -> None:
    rng = random.Random(seed)
    with engine_at_rest(c, max_num_seqs=6) as e:
        program: Any = core_of(e).runner.program
        head, state = program.head, {"k": -1, "value": float("nan"), "all": True}
        def spoilt(hidden: Any) -> Any:
            out = head(hidden)
            if (k := state["k"]) == 0:
                row = rng.randrange(len(out))
                if state["all"]: out[row] = state["value"]
                else: out[row, rng.randrange(out.shape[1])] = state["value"]
            state["k"] = k - 1
            return out
        program.head = spoilt
        for i in range(count):
            which, k = rng.sample(range(24), 6), rng.randrange(1, 24)
            state |= {"value": (float("nan"), float("inf"))[i % 2], "all": rng.random() < 0.5}
            with c.case(f"{i}, {which}, head {k}"):
                while True:                      # a head that was not reached is no fault: an earlier one, then
                    state["k"] = k
                    out = together(e, which)
                    if state["k"] < 0: break
                    k //= 2
                failed = [r for r in out if r.error is not None]
                assert len(failed) == 1 and "not finite" in failed[0].error, [r.error for r in out]
                assert all(r.token_ids == plain_ids(j) for j, r in zip(which, out) if r.error is None)
                state["k"] = -1
                assert together(e, [i % 8])[0].token_ids == plain_ids(i % 8)
        program.head = head


@family("F7", "Out-of-memory error raised in forward or allocation", 100, 8)
def out_of_memory(seed: int, count: int, c: Counted) -> None:
    "Raised once, nobody fails: the step goes again in two halves. Raised twice (each fourth case), who is in both steps fails and nobody else."
    rng, failed = random.Random(seed), 0
    with engine_at_rest(c, max_num_seqs=4) as e:
        for i in range(count):
            which, k, twice = rng.sample(range(24), 6), rng.randrange(0, 30), i % 4 == 3
            where = ("model.forward", "runner.launch")[i % 2]
            with c.case(f"{i}, {which}, {where} {k}"):
                what = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB") if rng.random() < 0.5 else MemoryError("no")
                while True:                      # a step that was not reached is no fault: an earlier one, then
                    with inject(where, what, after=k, times=1 + twice) as seen: out = together(e, which)
                    if seen[1]: break
                    k //= 2
                errors = [r.error for r in out if r.error is not None]
                assert (not errors or twice and seen[1] == 2) and all(type(what).__name__ in x for x in errors), (errors, seen)
                assert all(r.token_ids == plain_ids(j) for j, r in zip(which, out) if r.error is None)
                assert together(e, [i % 8])[0].token_ids == plain_ids(i % 8)
                failed += len(errors)
        c.notes |= {"steps_halved": counters(e).get("steps_halved", 0), "requests_failed": failed}


@family("F8", "KV pool exhausted (forced preemption)", 1000, 30, counted=False)
def pool_exhausted(seed: int, count: int, c: Counted) -> None:
    "A pool of 24 blocks of 4 under 64 requests: each preemption is a case, a request with a wrong token takes one away."
    rng, rounds = random.Random(seed), 0
    jobs = [([120 + j, *(rng.randrange(20, 500) for _ in range(rng.randrange(1, 6)))], rng.randrange(20, 60)) for j in range(16)]
    want = [oracle(ids, n) for ids, n in jobs]
    with engine_at_rest(c, block=4, blocks=25, max_num_seqs=12, max_model_len=90) as e:
        while c.tried < count:
            which = [rng.randrange(16) for _ in range(64)]
            out = e.run_requests([GenerationRequest(prompt_token_ids=jobs[j][0], max_new_tokens=jobs[j][1], temperature=0.0, ignore_eos=True) for j in which])
            for j, r in zip(which, out):
                if r.error or r.token_ids != want[j]: c.bad.append(f"F8 seed {seed} round {rounds}: request {j}: {r.error or 'other tokens'}")
            c.tried, rounds = counters(e).get("preemptions", 0), rounds + 1
            c.good = max(0, c.tried - len(c.bad))
            if rounds > 3 and not c.tried: raise AssertionError("nothing is preempted")
    c.notes |= {"rounds_of_64": rounds, "requests": 64 * rounds, "requests_wrong": len(c.bad)}


@family("F9", "Random preemption flag, as in SGLang", 500, 60)
def random_preemption(seed: int, count: int, c: Counted) -> None:
    rng = random.Random(seed)
    with engine_at_rest(c, max_num_seqs=8, block=4, blocks=200, max_num_batched_tokens=24) as e:
        s: Any = core_of(e).scheduler
        plan = s.plan
        def evicting(*args: Any, **kw: Any) -> Any:
            settled = [q for q in s.running if s._settled(q)]
            if settled and rng.random() < 0.2: s._preempt(rng.choice(settled))
            return plan(*args, **kw)
        s.plan = evicting
        for a in range(0, count, 50):
            which = [rng.randrange(24) for _ in range(min(50, count - a))]
            for j, r in zip(which, together(e, which)): c.add(f"request {j}", r.error or (None if r.token_ids == plain_ids(j) else "other tokens"))
        s.plan = plan
        c.notes["preemptions"] = counters(e).get("preemptions", 0)


STAGES = ("waiting", "mid-chunk", "first token", "decode", "finished", "unknown id", "twice")


@family("F10", "Abort at every stage", 2000, 84)
def aborts(seed: int, count: int, c: Counted) -> None:
    "Half on a core that is stepped by hand, so that each stage is met for certain; half through handles, from four threads, whenever."
    by_hand(random.Random(seed), count // 2, c)
    with engine_at_rest(c, max_num_seqs=6, block=4, blocks=160, max_num_batched_tokens=16) as e:
        def one(a: tuple[int, float, int]) -> None:
            i, pause, j = a
            with c.case(f"{i}, after {pause * 1e3:.2f} ms"):
                h = paged(e).submit(ask_known(j % 18, max_new_tokens=60), stream=bool(i % 2))
                time.sleep(pause)
                for _ in range(1 + i % 2): h.cancel()
                assert h.finished.wait(20), "it never ended"
                sample = h.samples[0]
                want = plain_ids(j % 18)
                assert sample.finish_reason in ("abort", "length") and sample.token_ids[:len(want)] == want[:len(sample.token_ids)], sample.finish_reason
                h.cancel()
        rng = random.Random(seed + 1)
        stop, wrong = threading.Event(), list[int]()
        def bystander() -> None:
            while not stop.is_set():
                j = rng.randrange(18, 24)
                if together(e, [j])[0].token_ids != plain_ids(j): wrong.append(j)
        t = threading.Thread(target=bystander, daemon=True)
        t.start()
        cases = [(i, random.Random(seed * 7 + i).choice((0.0, 0.001, 0.004, 0.01, 0.03)), i) for i in range(count - count // 2)]
        with ThreadPoolExecutor(4) as pool: list(pool.map(one, cases))
        stop.set()
        t.join(30)
        if wrong: c.spoil(f"bystanders changed: {wrong[:5]}")


def by_hand(rng: random.Random, count: int, c: Counted) -> None:
    "Every case aborts one sequence in its stage, while two others run to their ends; the pool is checked after every step."
    model, met = tiny()[1], dict.fromkeys(STAGES, 0)
    core = make_core(model, CoreConfig(block_size=4, n_blocks=120, max_num_seqs=4, max_num_batched_tokens=8, prefill_chunk=8, max_model_len=96))
    s = core.scheduler
    def add(j: int, ids: list[int], n: int) -> None: core.add([j], np.array(ids, np.int32), [SamplingParams(temperature=0.0, max_tokens=n)])
    next_id, hard = 0, [3 + rng.randrange(90) for _ in range(40)]
    for k in range(count):
        stage = STAGES[k % len(STAGES)]
        with c.case(f"{k}, {stage}"):
            got: dict[int, list[int]] = {}
            ends: dict[int, str] = {}
            mates = {next_id + m: rng.randrange(24) for m in range(4 if stage == "waiting" else 2)}
            for i, j in mates.items(): add(i, known(j)[0], known(j)[1])
            victim, next_id = next_id + len(mates), next_id + len(mates) + 1
            rng.shuffle(hard)
            add(victim, hard if stage == "mid-chunk" else hard[:5], 1 if stage == "finished" else 30)
            def step() -> None:
                for d in core.step():
                    got.setdefault(d.seq_id, []).extend(d.tokens.tolist())
                    if d.finish_reason:
                        assert d.error is None and d.seq_id not in ends
                        ends[d.seq_id] = d.finish_reason
                s.pool.check()
            q, n = s.seqs[victim], rng.randrange(2, 9)
            reached = {"waiting": lambda: q.row < 0, "mid-chunk": lambda: 0 < q.n_prefilled < q.n, "first token": lambda: len(got.get(victim, ())) == 1, "finished": lambda: victim in ends}.get(
                stage, lambda: len(got.get(victim, ())) >= n)
            if stage == "waiting": step()
            while not reached(): step()
            if stage == "unknown id": assert core.abort(10**9) is None and core.abort(next_id + 5) is None
            d = core.abort(victim)
            assert (d is None) == (stage == "finished") and (d is None or d.finish_reason == "abort")
            if stage == "twice": assert core.abort(victim) is None
            met[stage] += 1
            s.pool.check()
            while core.has_work: step()
            assert all(got[i] == plain_ids(j) and ends[i] == "length" for i, j in mates.items()), "a mate has other tokens"
            assert s.pool.n_held == s.pool.n_draining == 0 and victim not in s.seqs
    c.notes["stages"] = met


@family("F11", "Scheduler thread killed", 20, 2)
def thread_killed(seed: int, count: int, c: Counted) -> None:
    "SystemExit inside it: found in 2 s, /health is 503, waiters get errors, and the engine comes back."
    rng, found, back = random.Random(seed), list[float](), list[float]()
    hook, threading.excepthook = threading.excepthook, lambda a: None
    try:
        with tiny_server(limits=ServingLimits(backoff_s=0.3), max_num_seqs=4) as s, ThreadPoolExecutor(6) as pool:
            probe(s.url)
            for i in range(count):
                with c.case(i):
                    s.engine.died_at = 0.0        # each case is the first death in a minute
                    asked = [pool.submit(post, s.url, known_body(j, max_tokens=200, stream=j % 2 == 0)) for j in range(6)]
                    within(10, lambda: s.engine.stats()["engine"].get("running", 0) >= 3)
                    with inject("core.plan", SystemExit(3), after=rng.randrange(5)) as seen:
                        within(10, lambda: seen[1])
                        found.append(within(2, lambda: get(s.url, "/health")[0] == 503))
                    for f in asked:
                        status, body = f.result(20)
                        assert ids_of(body) is None and (status >= 500 or b"error" in body), (status, body[:200])
                    back.append(within(20, lambda: get(s.url, "/health")[0] == 200))
                    probe(s.url, i % 8)
            settle_server(s)
    finally: threading.excepthook = hook
    c.notes |= {"found_s_max": round(max(found, default=0), 2), "back_s_max": round(max(back, default=0), 2), "blocks_held": 0}


@family("F19", "Clock jump of +/- 1 h", 20, 2)
def clock_jumps(seed: int, count: int, c: Counted) -> None:
    "The wall clock is patched while requests with deadlines of 30 s wait and run: nobody's time is up, and no time in an answer is an hour long."
    rng, real, offset = random.Random(seed), time.time, [0.0]
    time.time = lambda: real() + offset[0]
    try:
        with watched(c, limits=ServingLimits(queue_timeout_s=30, deadline_s=30), max_num_seqs=4) as s, ThreadPoolExecutor(6) as pool:
            for i in range(count):
                with c.case(i):
                    which = rng.sample(range(18), 6)
                    with inject("core.plan", lambda: time.sleep(0.004), times=10**9):
                        asked = [pool.submit(post, s.url, known_body(j, stream=j % 2 == 0, timings=True) if j % 2 else known_body(j, stream=True)) for j in which]
                        time.sleep(rng.random() * 0.05)
                        offset[0] += (3600, -3600)[i % 2] * (1 if rng.random() < 0.7 else 2)
                        answers = [f.result(30) for f in asked]
                    for j, (status, body) in zip(which, answers): assert status == 200 and ids_of(body) == plain_ids(j), (j, status, body[:300])
                    metrics = get(s.url, "/metrics")[1].decode()
                    assert 'llminfer_expired_total{clock="queue"} 0' in plain(metrics) and 'llminfer_expired_total{clock="total"} 0' in plain(metrics)
                    probe(s.url, i % 8)
            stats = [float(line.rpartition(" ")[2]) for line in get(s.url, "/metrics")[1].decode().splitlines() if line.startswith("llminfer_e2e_request_latency_seconds_sum")]
            if not stats or not 0 < sum(stats) < 3600: c.spoil(f"a latency follows the wall clock: {stats}")
    finally: time.time = real


def plain(metrics: str) -> str:
    "Without the label of the model."
    import re
    return re.sub(r'(model_name="[^"]*",?|engine="[^"]*",?)', "", metrics).replace(",}", "}").replace(".0\n", "\n")


@family("F21", "Graph capture or kernel compile fails", 20, 20)
def falls_back(seed: int, count: int, c: Counted) -> None:
    "Ten failures of a capture and ten of a compiler: the same texts on eager steps, one log line."
    graphs: Any = GraphRunner
    with TemporaryDirectory() as d:
        model = load_model(open_checkpoint(str(make_tiny(Path(d) / "m", "llama", 0))), torch.float64, "cpu")
        jobs = [known(j) for j in range(5)]
        for i in range(count):
            fault, lines = FAILURES[(i + seed) % 10], list[str]()
            catch = logging.Handler(logging.WARNING)
            catch.emit = lambda record: lines.append(record.getMessage())   # type: ignore[method-assign]
            log = logging.getLogger("llminfer")
            log.addHandler(catch)
            try:
                with c.case(f"{i}, {fault!r}"), ExitStack() as stack:
                    if i % 20 < 10:
                        stack.enter_context(inject("graphs.capture", fault, times=1000))
                        core = make_core(model, CoreConfig(block_size=4, n_blocks=100, max_num_seqs=8, max_model_len=96), runner=graphs, program=TorchProgram)
                    else:
                        available, assembly.fused_available = assembly.fused_available, lambda model, device: (True, "compute capability 9.0")
                        stack.callback(setattr, assembly, "fused_available", available)
                        stack.callback(assembly.kernel_trial.cache_clear)
                        assembly.kernel_trial.cache_clear()
                        stack.enter_context(inject("kernels.compile", fault, times=1000))
                        cuda: Any = FakeCuda(model)
                        parts = assembly.choose_parts(EngineConfig(kernels="auto"), cuda)
                        assert parts.program is TorchProgram and parts.reasons["kernels"].startswith("torch (Triton cannot compile here")
                        core = make_core(model, CoreConfig(block_size=4, n_blocks=100, max_num_seqs=8, max_model_len=96), program=parts.program)
                    out = generate(core, [ids for ids, _ in jobs], [SamplingParams(temperature=0.0, max_tokens=n) for _, n in jobs])
                    assert out == [plain_ids(j) for j in range(5)] and core.scheduler.pool.n_held == 0
                    assert len(lines) == 1 and (type(fault).__name__ in lines[0] or i % 20 >= 10), lines
            finally: log.removeHandler(catch)


class FakeCuda:
    "A model that says it is on a GPU, for who chooses kernels."
    def __init__(self, model: Any): self.config, self.device, self.dtype = model.config, torch.device("cuda"), model.dtype
