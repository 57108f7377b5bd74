"""The engine among threads: streams closed and shared, callbacks, unloading, interrupts, asyncio, forks."""
import asyncio, gc, os, queue, signal, subprocess, sys, threading, time, weakref
from pathlib import Path
import pytest
from llminfer.backends import GenerationError
from llminfer.config import CacheConfig, EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.request import GenerationRequest, RequestError
from llminfer.tracing import inject
from support.engines import clean  # noqa: F401  a fixture
from support.engines import (GREEDY, counters, drain, engine_threads, forced_engine, forced_prompt, paged, pieces,
    settle, tiny, tiny_engine)

ROOT = Path(__file__).parent.parent

def test_closing_dropping_and_not_reading():
    e = forced_engine([[50 + i] * 100 for i in range(4)], max_num_seqs=4)
    one, two, three, four = (e.stream(prompt_token_ids=forced_prompt(i), temperature=0.0, max_new_tokens=None) for i in range(4))
    next(one), next(two)
    one.close()
    one.close()
    assert list(one) == []
    del two                                     # after its first chunk
    del three                                   # before it
    gc.collect()
    time.sleep(0.3)                             # nobody reads the fourth, and it goes on
    assert e.run(prompt_token_ids=forced_prompt(0), temperature=0.0, max_new_tokens=2).error is None
    assert "".join(c.token for c in four) == tiny()[2].decode([53] * 100)
    assert counters(e)["finished_abort"] == 3
    settle(e)


@pytest.mark.parametrize("n", [1, 3])
def test_closing_a_stream_wakes_its_waiting_readers(n):
    e = forced_engine([[50 + i] * 120 for i in range(2)], max_num_seqs=n)
    with inject("core.plan", lambda: time.sleep(0.01), times=10**9):
        ahead = e.stream(prompt_token_ids=forced_prompt(0), temperature=0.0, max_new_tokens=None, n=n)
        next(ahead)                                                                      # it has all the rows
        s, got = e.stream(prompt_token_ids=forced_prompt(1), temperature=0.0, n=n), []
        readers = [threading.Thread(target=lambda: got.extend(s), daemon=True) for _ in range(3)]
        for t in readers: t.start()
        time.sleep(0.05)
        s.close()
        for t in readers: t.join(5)
        ahead.close()
    assert not any(t.is_alive() for t in readers) and got == [] == list(s) == list(s)
    settle(e)


@pytest.mark.parametrize("n", [1, 2])
def test_readers_share_a_stream_and_all_of_them_end(n):
    e = forced_engine([[50] * 30])
    for _ in range(20):
        s, got = e.stream(prompt_token_ids=forced_prompt(0), temperature=0.0, n=n), []
        readers = [threading.Thread(target=lambda s=s, got=got: got.extend(s), daemon=True) for _ in range(3)]
        for t in readers: t.start()
        for t in readers: t.join(5)
        assert not any(t.is_alive() for t in readers) and sum(len(c.token_ids) for c in got) == 31 * n and sum(c.is_final for c in got) == n
    settle(e)


@pytest.mark.parametrize("again", ["submit", "unload", "submit in a thread that it waits for"])
def test_a_callback_may_use_the_engine_while_it_is_unloaded(again):
    e, said = tiny_engine(), []
    b = paged(e)
    def retry():
        try: b.unload() if again == "unload" else b.submit(GenerationRequest("again", max_new_tokens=1)).finished.wait(5)
        except GenerationError as err: said.append(str(err))
    def told(chunk):
        if not chunk.is_final: return
        said.append(chunk.error)
        if "thread" not in again: return retry()
        t = threading.Thread(target=retry, daemon=True)
        t.start()
        t.join(0.2)
    b.submit(GenerationRequest("x", max_new_tokens=100, ignore_eos=True), told)
    t = threading.Thread(target=e.unload, daemon=True)
    with inject("core.plan", lambda: time.sleep(0.01), times=10**9):
        t.start()
        t.join(10)
    assert not t.is_alive() and said[0] == "the engine was closed" and said[1:] == (["the engine is closed; call load() again"] if again == "submit" else [])
    e.unload()


def test_phrases_without_bound_are_refused_and_long_ones_ignored():
    e = tiny_engine()
    good = e.run("x", max_new_tokens=4, **GREEDY).token_ids
    assert e.run("x", max_new_tokens=4, bad_words=["q" * 40_000], **GREEDY).token_ids == good        # it can never appear
    assert e.run("x", max_new_tokens=4, bad_words=[f"w{i} z" for i in range(1000)] + ["q" * 40_000], **GREEDY).token_ids == good
    with pytest.raises(RequestError, match="bad_words hold .* characters, and at most 65536"): e.run("x", bad_words=[f"w{i} " + "z q" * 8 for i in range(4000)])
    with pytest.raises(RequestError, match="stop_sequences hold 70000 characters"): e.run("x", stop_sequences=["y" * 70_000])


def test_deadlines_and_aborts():
    e = forced_engine([[50 + i] * 120 for i in range(8)], max_num_seqs=2)
    with inject("core.plan", lambda: time.sleep(0.02), times=10**9):
        ss = [e.stream(prompt_token_ids=forced_prompt(i), temperature=0.0, max_new_tokens=None, deadline_s=d) for i, d in enumerate((0.3, None, 0.0, 0.3))]
        ends = [list(s)[-1] for s in (ss[0], ss[2], ss[3])]           # running, at once, still waiting
        assert [c.finish_reason for c in ends] == ["abort"] * 3 and ends[0].stats.generated_tokens > 0 and ends[2].stats.generated_tokens == 0
        h = ss[1].h
        h.cancel(), h.cancel(), h.cancel()
    assert h.finished.wait(5) and h.samples[0].finish_reason == "abort"
    h.cancel()
    settle(e)
    assert counters(e)["finished_abort"] == 4


def test_unload_during_streams_from_many_threads():
    e = forced_engine([[50 + i] * 120 for i in range(8)], max_num_seqs=4)
    ends, started = queue.SimpleQueue(), threading.Barrier(9)
    def read(i):
        s = e.stream(prompt_token_ids=forced_prompt(i), temperature=0.0, max_new_tokens=None)
        started.wait(5)
        ends.put(drain(s))
    with inject("core.plan", lambda: time.sleep(0.01), times=10**9):
        threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
        for t in threads: t.start()
        started.wait(5)
        e.unload()
        for t in threads: t.join(5)
    assert not any(t.is_alive() for t in threads)
    assert [ends.get()[1] for _ in range(8)] == ["the engine was closed"] * 8


def test_unload_gives_the_memory_back_and_a_dropped_engine_ends_by_itself():
    folder, _, tok = tiny()
    e = InferenceEngine(EngineConfig(model_name=folder, max_model_len=64)).load()
    refs = [weakref.ref(paged(e).model), weakref.ref(paged(e).loop.core.runner.kv)]
    s = e.stream("x", max_new_tokens=50, **GREEDY)
    next(s)
    e.unload()
    gc.collect()
    assert [r() for r in refs] == [None, None]           # though a stream still holds its handle
    with pytest.raises(GenerationError, match="was closed"): list(s)
    e.load()
    refs = [weakref.ref(paged(e).model), weakref.ref(e)]
    text = "".join(c.token for c in e.stream("x", max_new_tokens=9, **GREEDY))
    del e, s
    gc.collect()
    end = time.monotonic() + 5
    while engine_threads() and time.monotonic() < end: time.sleep(0.01)
    gc.collect()
    assert [r() for r in refs] == [None, None]
    stream = InferenceEngine(EngineConfig(model_name=folder, max_model_len=64)).stream("x", max_new_tokens=9, **GREEDY)
    gc.collect()
    assert "".join(c.token for c in stream) == text      # a stream keeps its engine


@pytest.mark.parametrize("call", ["run", "batch", "stream"])
def test_an_interrupt_cancels_what_it_interrupts(call):
    e = forced_engine([[50 + i] * 120 for i in range(2)])
    def ring(*_): raise KeyboardInterrupt
    old = signal.signal(signal.SIGALRM, ring)
    try:
        with inject("core.plan", lambda: time.sleep(0.05), times=10**9):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            kw = dict(temperature=0.0, max_new_tokens=None)
            with pytest.raises(KeyboardInterrupt):
                if call == "run": e.run(prompt_token_ids=forced_prompt(0), **kw)
                elif call == "batch": e.run_requests([GenerationRequest(prompt_token_ids=forced_prompt(i), **kw) for i in range(2)])
                else: list(e.stream(prompt_token_ids=forced_prompt(0), **kw))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    settle(e)
    assert counters(e)["finished_abort"] == 1 + (call == "batch")
    assert e.run(prompt_token_ids=forced_prompt(0), temperature=0.0, max_new_tokens=3).token_ids == [50] * 3


# Threads and loops


def test_8_threads_with_10_requests_each_share_one_engine():
    folder, _, tok = tiny()
    e = InferenceEngine(EngineConfig(model_name=folder, dtype="float64", max_model_len=64, window_steps=4, cache=CacheConfig(page_size_tokens=4, num_blocks=60)))
    prompts = [f"Thread {i} asks {j}" for i in range(8) for j in range(10)]
    kws = [dict(GREEDY, max_new_tokens=6 + i % 7) if i % 2 else dict(temperature=1.0, seed=i, max_new_tokens=9) for i in range(80)]
    got = {}
    def ask(i):
        for j in range(10 * i, 10 * i + 10):
            if j % 3 == 0: got[j] = "".join(c.token for c in e.stream(prompts[j], **kws[j]))
            elif j % 3 == 1: got[j] = asyncio.run(e.arun(prompts[j], **kws[j])).generated_text
            else: got[j] = e.run(prompts[j], **kws[j]).generated_text
            e.info(), e.cache_stats()
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]       # the first of them loads the model, once
    for t in threads: t.start()
    for t in threads: t.join(60)
    plain = tiny_engine(prefix_cache=False)
    assert got == {j: plain.run(prompts[j], **kws[j]).generated_text for j in range(80)}
    settle(e)
    plain.unload()


def test_arun_and_astream_leave_nothing_behind_when_cancelled():
    e = forced_engine([[50 + i] * 120 for i in range(8)], max_num_seqs=8)
    kw = dict(temperature=0.0, max_new_tokens=None)
    async def leave_stream(i):
        async for _ in e.astream(prompt_token_ids=forced_prompt(i), **kw): return
    async def main():
        task = asyncio.create_task(e.arun(prompt_token_ids=forced_prompt(0), **kw))
        early = asyncio.create_task(e.arun(prompt_token_ids=forced_prompt(1), **kw))
        await asyncio.sleep(0)
        early.cancel()                              # while a worker thread is submitting it
        await leave_stream(2)
        it = e.astream(prompt_token_ids=forced_prompt(3), **kw)
        await anext(it)
        await it.aclose()
        task.cancel()
        out = await asyncio.gather(task, early, return_exceptions=True)
        assert all(isinstance(x, asyncio.CancelledError) for x in out)
        with pytest.raises(RequestError, match="top_p"): await e.arun("x", top_p=0)
        with pytest.raises(RequestError, match="top_p"): await anext(e.astream("x", top_p=0))
        rs = await e.run_requests_continuous_async([GenerationRequest(""), GenerationRequest(prompt_token_ids=forced_prompt(4), temperature=0.0, max_new_tokens=2)])
        assert "prompt is empty" in rs[0].error and rs[1].token_ids == [54, 54]
    with inject("core.plan", lambda: time.sleep(0.005), times=10**9): asyncio.run(main())
    async def abandon(): return await anext(e.astream(prompt_token_ids=forced_prompt(5), **kw))
    asyncio.run(abandon())                          # its loop is closed while the request runs
    settle(e)


def test_asyncio_errors_reach_the_iterator_after_the_text():
    e = forced_engine([pieces("A", "B", "C", "D")], forced=dict(nan_at={300: 3 + 3}), window_steps=8)
    async def read():
        text = ""
        with pytest.raises(GenerationError, match="not finite"):
            async for c in e.astream(prompt_token_ids=forced_prompt(0), temperature=0.0): text += c.token
        return text
    assert asyncio.run(read()) == "ABC"
    assert "not finite" in asyncio.run(e.arun(prompt_token_ids=forced_prompt(0), temperature=0.0)).error


FORK = """
import os, sys
from llminfer import InferenceEngine, EngineConfig
kw = dict(temperature=0.0, max_new_tokens=5, ignore_eos=True)
def work(e): return e.run("Hello there", **kw).token_ids
if __name__ == "__main__":
    import multiprocessing as mp
    e = InferenceEngine(EngineConfig(model_name=sys.argv[1], max_model_len=64)).load()
    for i in range(100): e.backend.tokenizer.encode(f"text {i}")
    want = work(e)
    pid = os.fork()
    if not pid: os._exit(0 if work(e) == want else 1)       # the child has no engine thread: the call makes one
    assert os.waitpid(pid, 0)[1] == 0
    assert work(e) == want
    print("ok")
"""


def test_a_forked_child_can_use_the_engine(tmp_path):   # B40
    (tmp_path / "fork.py").write_text(FORK)
    r = subprocess.run([sys.executable, str(tmp_path / "fork.py"), str(tiny()[0])], capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (r.returncode, r.stdout, r.stderr) == (0, "ok\n", "")


# Settings

TEAM = """
import os, sys
import llminfer, torch
from llminfer import EngineConfig, InferenceEngine
from llminfer.loading import make_tiny
folder, tasks = make_tiny(sys.argv[1] + "/tiny", "llama", 0), lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)
before, e = tasks(), InferenceEngine(EngineConfig(model_name=str(folder), backend=sys.argv[2], device="cpu", max_model_len=512))
e.load()
print(tasks() - before, torch.get_num_threads(), os.environ["GOMP_SPINCOUNT"])
"""

@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("backend", ["paged", "eager"])
def test_loading_leaves_no_team_of_openmp_threads(backend, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    p = subprocess.run([sys.executable, "-c", TEAM, str(tmp_path), backend], capture_output=True, text=True, timeout=120, env=env)
    assert p.stdout.split() == ["1", "2", "5000"], p.stdout + p.stderr[-2000:]     # the engine's thread, and no other
