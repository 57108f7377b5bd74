"""What an `AsyncEngine` costs for each token, without a model: the tokens are hashes, the time is the processor's, thread by thread.

    OMP_NUM_THREADS=1 python benchmarks/server_cost.py [--streams 64] [--tokens 256] [--runs 5] [--out benchmarks/records/server_cost.json]

`loop`: the event loop's thread, one chunk a token and a task that reads each stream. `engine`: the engine's thread, all of it
(plan, hashes, commit, text, chunks). `alone`: the loop without an engine's thread beside it and with one wake-up a step. `bare`: the same threads when nobody streams. `process`: the engine in a process of its own, and all
that the parent pays for a token (event loop, reading thread, readers). Prediction, written before the first run: loop 12 us.
"""
import argparse, asyncio, json, platform, statistics, threading, time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from llminfer.artifacts import cpu_name
from llminfer.batching import SchedulerConfig
from llminfer.config import EngineConfig
from llminfer.engine_handle import EngineFacts, Job, Words, scripted_engine
from llminfer.engine_process import ProcessHandle
from llminfer.loading import make_tiny, open_checkpoint
from llminfer.request import GenerationRequest, StreamChunk, TokenStats
from llminfer.serving import AsyncEngine
from llminfer.tokenization import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def engine_clock() -> float:
    "Processor seconds of the engine's thread."
    ident = next(t.ident for t in threading.enumerate() if t.name == "llminfer-engine")
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


async def read(engine, i, n_tokens, stream):
    s = await engine.open(GenerationRequest(prompt_token_ids=[i % 250 + 1, 5, 6, 7], max_new_tokens=n_tokens, temperature=0.0, stream=stream))
    async with s:
        if not stream: return (await s.result()).stats.generated_tokens
        return sum([len(c.token_ids) async for c in s])


async def measure(engine, streams, n_tokens, stream=True):
    "Microseconds a token of both threads, wake-ups a step, and chunks a token."
    before, c0, s0 = engine.stats()["counters"], engine_clock(), engine.stats()["engine"]["counters"].get("steps", 0)
    t0, w0 = time.thread_time(), time.perf_counter()
    n = sum(await asyncio.gather(*(read(engine, i, n_tokens, stream) for i in range(streams))))
    loop, wall, eng, after = time.thread_time() - t0, time.perf_counter() - w0, engine_clock() - c0, engine.stats()
    assert n == streams * n_tokens
    steps = after["engine"]["counters"]["steps"] - s0
    return {"loop_us": loop / n * 1e6, "engine_us": eng / n * 1e6, "wall_us": wall / n * 1e6,
            "wakeups_a_step": (after["counters"]["wakeups"] - before["wakeups"]) / steps,
            "chunks_a_token": (after["counters"]["chunks"] - before["chunks"]) / n}


def make(cfg):
    "The engine of the child process; the step's time comes as the name of its model."
    return scripted_engine(tokenizer(), float(cfg.model_name), max_num_seqs=cfg.max_num_seqs, max_model_len=cfg.max_model_len)


def tokenizer(): return load_tokenizer(open_checkpoint(make_tiny(Path(mkdtemp()) / "tiny", "llama", 0)).tokenizer)


async def in_process(a):
    "Microseconds a token that the parent of an engine process pays, and chunks for each message."
    from server_cost import make as importable    # the child cannot import `__main__`
    cfg = EngineConfig(model_name=str(a.step_ms / 1e3), max_num_seqs=a.streams, max_model_len=a.tokens + 8)
    engine, runs = AsyncEngine(ProcessHandle(cfg, importable)), []
    await engine.start()
    for i in range(a.runs + 1):
        before, t = engine.stats()["counters"], time.process_time()
        n = sum(await asyncio.gather(*(read(engine, k, a.tokens, True) for k in range(a.streams))))
        cost, after = (time.process_time() - t) / n * 1e6, engine.stats()["counters"]
        if i: runs.append({"parent_us": cost, "chunks_a_message": (after["chunks"] - before["chunks"]) / (after["wakeups"] - before["wakeups"])})
    await engine.stop()
    return {k: statistics.median(r[k] for r in runs) for k in runs[0]}


class Puppet:
    "A handle without an engine; the benchmark pulls the strings."
    batches, alive, facts = True, True, EngineFacts("puppet", None, Words(10), SchedulerConfig(max_num_seqs=4096))
    def __init__(self): self.notify = []
    def start(self): pass
    def prepare(self, r): return Job(r, [1], [])
    def submit(self, job, notify): self.notify.append(notify)
    def stats(self): return {}
    def close(self, drain_s=0.0): pass


async def alone(a):
    "Microseconds a token on the loop: outbox, buffer, reader."
    engine = AsyncEngine(h := Puppet())
    await engine.start()
    async def drink(s): return sum([len(c.token_ids) async for c in s])
    readers = [asyncio.create_task(drink(await engine.open(GenerationRequest(prompt_token_ids=[1], stream=True)))) for _ in range(a.streams)]
    await asyncio.sleep(0)
    chunk, t = StreamChunk("r", "x", 5, token_ids=[5]), time.thread_time()
    for _ in range(a.tokens):
        for notify in h.notify: notify(chunk)
        h.after_batch()
        for _ in range(2): await asyncio.sleep(0)
    cost = (time.thread_time() - t) / a.tokens / a.streams * 1e6
    for notify in h.notify: notify(StreamChunk("r", "", is_final=True, finish_reason="stop", stats=TokenStats()))
    h.after_batch()
    assert set(await asyncio.gather(*readers)) == {a.tokens}
    await engine.stop()
    return cost


async def main_async(a, tok):
    engine = AsyncEngine(scripted_engine(tok, a.step_ms / 1e3, max_num_seqs=a.streams, max_model_len=a.tokens + 8))
    await engine.start()
    await measure(engine, a.streams, 16)
    runs = [await measure(engine, a.streams, a.tokens) for _ in range(a.runs)]
    bare = [await measure(engine, a.streams, a.tokens, stream=False) for _ in range(a.runs)]
    await engine.stop()
    engine.handle.engine.unload()
    med = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    quiet = statistics.median([await alone(a) for _ in range(a.runs)])
    return med | {"alone_us": quiet, "bare_loop_us": statistics.median(r["loop_us"] for r in bare), "bare_engine_us": statistics.median(r["engine_us"] for r in bare)}, runs


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--streams", type=int, default=64)
    ap.add_argument("--tokens", type=int, default=256)
    ap.add_argument("--runs", type=int, default=5)
    ap.add_argument("--step-ms", type=float, default=2.0, help="time that a step of the device would take")
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/server_cost.json"))
    a = ap.parse_args()
    med, runs = asyncio.run(main_async(a, tokenizer()))
    process = asyncio.run(in_process(a))
    record = {"kind": "server_cost", "streams": a.streams, "new_tokens": a.tokens, "step_ms": a.step_ms, "median": med, "process": process, "runs": runs, "predicted_loop_us": 12.0,
              "environment": {"cpu": cpu_name(), "python": platform.python_version(), "date": datetime.now(UTC).isoformat(timespec="seconds")}}
    print(", ".join(f"{k} {v:.2f}" for k, v in (med | process).items()))
    Path(a.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__": main()
