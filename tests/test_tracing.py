"""The event log tells the truth: replayed, it gives the pool's own books; and other programs can read it."""
from __future__ import annotations
import gzip, json, random, threading
from collections import deque
from pathlib import Path
from typing import Any
import numpy as np
import pytest
from llminfer.batching import Scheduler, SchedulerConfig
from llminfer.events import EVENTS, StepReplay, TraceError, check_event, read_events
from llminfer.kv_cache import BlockPool
from llminfer.request import GenerationRequest, SamplingParams
from llminfer.scripted import ScriptedRunner
from llminfer.trace_formats import chrome_events, from_schema3, to_schema3, write_chrome
from llminfer.tracing import Trace, dashboard_page
from support.engines import tiny_engine

VOCAB = 97

class Run:
    "A scripted engine under a random load, whose log is replayed beside it."
    def __init__(self, seed: int, K: int = 1, flight: int = 1, D: int = 0, n_blocks: int = 24, capacity: int = 1_000_000, eviction: str = "lru", follow: bool = True, reveal: bool = False, late: int = 0):
        self.rng, self.flight, self.late = random.Random(seed), flight, late
        cfg = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=64, block_size=4, window_steps=K, draft=D, vocab_size=VOCAB, follow=follow, prefill_chunk=self.rng.choice([None, 5]))
        self.trace = Trace(enabled=not late, capacity=capacity, ids=True)
        self.s = Scheduler(BlockPool(n_blocks, 4, eviction=eviction), cfg, self.trace)
        self.dev = ScriptedRunner(cfg, n_blocks, reveal=(lambda left: self.rng.randint(min(1, left), left)) if reveal else None)
        self.tickets, self.replay, self.seen, self.got, self.wild = deque[Any](), StepReplay(), 0, dict[int, int](), eviction == "fifo"
        self.plans, self.in_flight = list[Any](), list[int]()

    def go(self, n: int = 40) -> Run:
        rng, new, turn = self.rng, 0, 0
        prompts = [np.array([rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], np.int32) for _ in range(4)]
        while new < n or self.s.has_work:
            turn += 1
            if turn == self.late: self.trace.enabled = True
            if new < n and rng.random() < 0.5:
                p = prompts[rng.randrange(4)][:rng.randint(1, 40)]
                ids = list(range(new, new + rng.choice([1, 1, 1, 3])))
                new = ids[-1] + 1
                self.s.add_group(ids, p, [SamplingParams(temperature=0, max_tokens=rng.randint(1, 24), child=c) for c in range(len(ids))], priority=rng.choice([0, 0, 1]))
            if rng.random() < 0.05 and self.s.seqs: self.s.abort(rng.choice(list(self.s.seqs)))
            if rng.random() < 0.02: self.s.pool.reset_cache()
            while len(self.tickets) < self.flight and (plan := self.s.plan()) is not None:
                self.tickets.append(self.dev.launch(plan))
                self.plans.append((plan.window_id, plan.K, plan.variant, plan.rows.tolist(), [(c.row, c.start, len(c.ids)) for c in plan.prefill]))
                self.in_flight.append(len(self.tickets))
                self.check()
            self.s.drain_deltas()
            if self.tickets:
                h = self.tickets[0].harvest()
                if h.done: self.tickets.popleft()
                for d in self.s.commit(h): self.got[d.seq_id] = self.got.get(d.seq_id, 0) + len(d.tokens)
        return self

    def check(self) -> None:
        "Right after a plan, the log has told everything."
        events, self.seen = self.trace.since(self.seen)
        for e in events: self.replay.apply(check_event(e))
        if not self.trace.enabled: return
        pool, r = self.s.pool, self.replay
        assert {q: t.blocks for q, t in r.seqs.items() if t.blocks} == {q: list(t.blocks) for q, t in pool._seqs.items() if t.blocks}
        assert r.cached == set(pool._idle)
        assert {s.seq_id: s.row for s in self.s.running} == {q: t.row for q, t in r.seqs.items() if t.row >= 0}
        assert set(r.draining) <= {b for bs in pool._drain.values() for b in bs}

@pytest.mark.parametrize("kw", [{}, {"K": 4}, {"K": 4, "flight": 2}, {"K": 3, "flight": 2, "D": 2, "reveal": True}, {"K": 2, "follow": False}, {"eviction": "fifo", "flight": 2, "K": 2}, {"eviction": "none"}, {"late": 20, "K": 2}], ids=str)
def test_a_replay_gives_the_books_of_the_pool(kw: dict[str, Any]) -> None:
    seen = set[str]()
    for seed in range(6):
        run = Run(seed, **kw).go()
        seen |= {e["event"] for e in run.trace.events}
        if kw.get("late"): continue
        assert run.trace.counters.get("preemptions", 0) == sum(e["event"] == "preempt" for e in run.trace.events)
        out: dict[int, int] = {}
        for e in run.trace.events:
            if e["event"] == "step":
                assert e["tokens"] == sum(n for _, n in e["out"]) and [len(i) for i in e["ids"]] == [n for _, n in e["out"]] and e["ms"] >= 0
                for q, n in e["out"]: out[q] = out.get(q, 0) + n
        assert out == {q: n for q, n in run.got.items() if n}
    assert seen >= set(EVENTS) - ({"evict", "snapshot"} if kw.get("eviction") == "none" else set())

def test_a_log_that_forgets_can_be_replayed_from_its_snapshot() -> None:
    for seed in range(4):
        run = Run(seed, K=2, capacity=200).go(60)
        events = list(run.trace.events)
        at = next(i for i, e in enumerate(events) if e["event"] == "snapshot")
        r = StepReplay()
        for e in events[at:]: r.apply(e)
        assert run.trace.n_emitted > 400 and r.cached == set(run.s.pool._idle) and not r.owners()
        assert run.trace.since(run.trace.n_emitted - 3)[0] == events[-3:] and run.trace.since(0)[0] == events

def test_off_writes_nothing() -> None:
    run = Run(1, late=10**9).go()
    assert not run.trace.events and not run.s.journal.opened and run.trace.counters["windows"] > 20

def test_a_reader_beside_the_writer_misses_nothing_and_sees_nothing_twice() -> None:
    "One that reads in the middle of each `emit`, where the clock is asked; and one in another thread."
    t, got, n = Trace(enabled=True), list[int](), 0
    def read() -> float:
        nonlocal n
        events, n = t.since(n)
        got.extend(e["i"] for e in events)
        return 0.0
    t.clock = read
    for i in range(50): t.emit("x", i=i)
    read()
    assert got == list(range(50))
    t, got, n = Trace(enabled=True), list[int](), 0
    def write() -> None:
        for i in range(60_000): t.emit("x", i=i)
    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive() or n < t.n_emitted: read()
    writer.join()
    assert got == list(range(60_000))

@pytest.mark.parametrize("kw", [{"K": 4, "flight": 2}, {"K": 3, "flight": 2, "D": 2, "reveal": True}], ids=str)
def test_a_log_changes_no_plan(kw: dict[str, Any]) -> None:
    "Windows keep their length and the two in flight, rows their variants: the fast path stays on."
    for seed in range(3):
        off, on = (Run(seed, **kw, late=late).go() for late in (10**9, 1))
        assert on.trace.events and not off.trace.events
        assert off.plans == on.plans and len(off.plans) > 20 and max(k for _, k, *_ in off.plans) == kw["K"] and max(off.in_flight) == 2
        assert off.trace.counters == on.trace.counters and off.got == on.got

def test_a_log_leaves_the_engine_as_fast_as_it_says() -> None:
    "What info() tells of the path is the same with the log on, and so are text and counters."
    def run(trace: bool) -> tuple[Any, ...]:
        e = tiny_engine(trace=trace, max_model_len=128, window_steps=4)
        try:
            t: Trace = e.backend.trace  # type: ignore[attr-defined]
            r = e.run_requests([GenerationRequest(f"prompt {i}", max_new_tokens=12, temperature=0, ignore_eos=True) for i in range(4)])
            return [x.token_ids for x in r], {k: v for k, v in e.info().items() if not k.endswith("_s")}, {k: v for k, v in t.counters.items() if not k.endswith("_us")}, len(t.events)
        finally: e.unload()
    (text, info, counts, n), (text2, info2, counts2, n2) = run(False), run(True)
    assert text == text2 and info == info2 and counts == counts2 and n == 0 < n2

def test_files_come_back_and_wrong_ones_are_named(tmp_path: Path) -> None:
    t, f = Run(2, K=2).go().trace, tmp_path / "t.jsonl"
    t.save(f)
    assert list(Trace.load(f).events) == list(t.events)
    f.write_text("")
    with pytest.raises(TraceError, match="holds no events"): Trace.load(f)
    f.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="is not text"): Trace.load(f)
    for text, why in (("{}", "line 1 is no event"), ('{"t":0,"event":"step"}', "step lacks window_id"), ("\n[1", "line 2 is not JSON"), ('{"t":0,"event":"start","schema":2}', "update llminfer")):
        with pytest.raises(TraceError, match=why): list(read_events(text.split("\n")))

# --- other formats ---------------------------------------------------------------------------------------------------------------------

def check_chrome(events: list[dict[str, Any]]) -> None:
    "By the description of the format: kinds, numbers, nested bars, arrows with two ends."
    bars: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        assert e["ph"] in "XCMsf" and isinstance(e["pid"], int) and isinstance(e["tid"], int) and isinstance(e["name"], str) and e["ts"] >= 0, e
        if e["ph"] == "X": assert e["dur"] >= 0; bars.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        if e["ph"] == "C": assert all(isinstance(v, (int, float)) for v in e["args"].values())
    starts, ends = ({e["id"]: e["ts"] for e in events if e["ph"] == p} for p in "sf")
    assert starts.keys() == ends.keys() and all(starts[i] <= ends[i] for i in starts) and all(e["bp"] == "e" for e in events if e["ph"] == "f")
    for spans in bars.values():
        stack: list[float] = []
        for a, z in sorted(spans, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= a + 0.01: stack.pop()
            assert not stack or z <= stack[-1] + 0.01, "bars overlap"
            stack.append(z)

@pytest.mark.parametrize("kw", [{}, {"K": 4, "flight": 2}, {"K": 2, "late": 15}], ids=str)
def test_chrome(kw: dict[str, Any], tmp_path: Path) -> None:
    t = Run(3, **kw).go().trace
    events, base = chrome_events(t.events)
    check_chrome(events)
    assert {e["ph"] for e in events} == set("XCMsf") and base > 1e15
    assert sum(e["ph"] == "X" and e["tid"] == 0 for e in events) == sum(e["event"] == "step" for e in t.events)
    p = t.to_chrome(tmp_path / "a.json.gz")
    assert json.loads(gzip.decompress(p.read_bytes()))["baseTimeNanoseconds"] == round(base * 1e3)
    (tmp_path / "p.json").write_text(json.dumps({"traceEvents": [{"ph": "X", "ts": 5}], "baseTimeNanoseconds": 10**18, "deviceProperties": []}))
    both = json.loads(write_chrome(t.events, tmp_path / "b.json", tmp_path / "p.json").read_text())
    assert both["traceEvents"][-1] == {"ph": "X", "ts": 5} and both["baseTimeNanoseconds"] == 10**18 and "deviceProperties" in both
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(TraceError, match="no traceEvents"): write_chrome(t.events, tmp_path / "b.json", tmp_path / "p.json")

FIELDS3 = {"request_admitted": {"request_id", "prompt_tokens", "max_new_tokens", "reserved_blocks"}, "prefill_chunk_started": {"request_id", "start_pos", "end_pos", "total_prompt_tokens"},
    "prefill_chunk_progress": {"request_id", "start_pos", "end_pos", "total_prompt_tokens", "cached_tokens", "completed"}, "decode_step": {"request_ids", "token_ids", "token_source", "batch_size", "tokens_emitted"},
    "block_allocated": {"request_id", "block_count", "block_ids", "pool_used", "pool_free"}, "block_freed": {"request_id", "block_count", "block_ids", "pool_used", "pool_free"},
    "request_preempted": {"request_id", "block_count", "generated_tokens", "preempt_reason", "pool_used", "pool_free"}, "request_resumed": {"request_id", "cached_tokens", "generated_tokens", "prompt_tokens", "pool_used", "pool_free"},
    "request_finished": {"request_id", "generated_tokens", "reason"}, "batch_size_changed": {"batch_size", "previous_batch_size", "waiting"},
    "tokens_per_second_sampled": {"tokens_emitted", "total_generated_tokens", "elapsed_seconds", "tokens_per_second"}}

@pytest.mark.parametrize("kw", [{}, {"K": 3}, {"D": 2}], ids=str)
def test_schema_3_there_and_back(kw: dict[str, Any], tmp_path: Path) -> None:
    kinds = set[str]()
    for seed in range(4):
        t = Run(seed, **kw).go().trace
        three, held, total = to_schema3(t.events), dict[int, str](), None
        for i, e in enumerate(three, 1):
            kinds.add(e["event"])
            assert e["sequence"] == i and e["schema_version"] == 3 and list(e) == sorted(e) and set(e) - {"event", "sequence", "step", "schema_version"} >= FIELDS3[e["event"]] - {"cached_tokens"}, e
            if "block_ids" in e: assert len(e["block_ids"]) == e["block_count"]
            if e["event"] == "block_allocated": assert not held.keys() & set(e["block_ids"]); held |= dict.fromkeys(e["block_ids"], e["request_id"])
            if e["event"] == "block_freed":
                for b in e["block_ids"]: del held[b]                    # once, by its last holder
            if e["event"].startswith("block_"): assert e["pool_used"] == len(held) and (total := total or e["pool_used"] + e["pool_free"]) == e["pool_used"] + e["pool_free"]
            if e["event"] == "decode_step":
                assert len(e["request_ids"]) == len(e["token_ids"]) == e["tokens_emitted"] and e["batch_size"] == len(set(e["request_ids"]))
                assert e["token_source"] == "speculative" or e["batch_size"] == e["tokens_emitted"]
        a, b = StepReplay(), StepReplay()
        for e in t.events: a.apply(e)
        back = from_schema3(three, 4)
        for e in back: b.apply(check_event(e))
        assert a.n_tokens == b.n_tokens and not b.owners() and sorted(s.tokens for s in a.seqs.values() if s.tokens) == sorted(s.tokens for s in b.seqs.values() if s.tokens)
        assert sum(e["event"] == "preempt" for e in back) == sum(e["event"] == "preempt" for e in t.events)
        check_chrome(chrome_events(back)[0])
        t.to_schema3(f := tmp_path / "3.jsonl")
        assert list(Trace.load(f).events) == from_schema3(three)
    assert kinds >= FIELDS3.keys() - {"tokens_per_second_sampled"}

def test_the_page_is_one_file(tmp_path: Path) -> None:
    t = Run(5).go().trace
    page = t.to_html(tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text() == page and "<script src" not in page and "import " not in page.split("<script")[1][:200]
    assert t.to_html().startswith("<iframe srcdoc=") and Trace()._repr_html_() is None and "</script><b>" not in dashboard_page('{"event":"</script><b>"}')
