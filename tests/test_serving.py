"""The engine behind asyncio: admission, turns, deadlines, readers that leave or sleep, drain, restart."""
import asyncio, threading, time
import pytest
from llminfer.backends import GenerationError
from llminfer.config import ConfigError
from llminfer.request import GenerationRequest, RequestError, StreamChunk
from llminfer.serving import (AsyncEngine, ContinuousBatchScheduler, EngineDeadError, FairQueue, NotReadyError, Outbox, QueueFullError,
    QueueTimeoutError, ServingLimits, SlowReaderError, chat_messages_to_prompt)
from llminfer.streams import ChunkBuffer
from support.engines import clean, forced_engine, forced_prompt, tiny_engine  # noqa: F401  a fixture
from support.serving import EXIT, RAISE, blocks_held, read, request, scripted, serving, until


def test_streams_equal_the_engine_and_settings_are_each_requests_own():
    e = tiny_engine(max_num_seqs=4)
    rs = [GenerationRequest(f"Prompt {i}", max_new_tokens=3 + i % 9, temperature=1.0 if i % 3 else 0.0, seed=i, n=1 + i % 3, stream=bool(i % 2)) for i in range(24)]
    want = e.run_requests(rs)
    async def main():
        async with serving(e) as a:
            async def one(r):
                async with await a.open(r, client=str(r.n)) as s:
                    if not r.stream: return await s.result()
                    texts, reasons = [""] * r.n, [None] * r.n
                    async for c in s:
                        texts[c.index] += c.token
                        if c.is_final: reasons[c.index] = c.finish_reason
                    assert (await s.result()).prompt_token_ids == s.prompt_token_ids
                    return texts, reasons
            got = await asyncio.gather(*map(one, rs))
            for r, w, g in zip(rs, want, got):
                if r.stream: assert g == ([o.text for o in w.outputs], [o.finish_reason for o in w.outputs])
                else: assert [(o.text, o.token_ids, o.finish_reason) for o in g.outputs] == [(o.text, o.token_ids, o.finish_reason) for o in w.outputs]
            assert a.stats()["counters"]["finished"] == 24
    asyncio.run(main())


def test_bad_requests_are_refused_before_they_wait():
    async def main():
        e = tiny_engine(max_model_len=80)
        e.backend.lacks = {"seed": "this is a test"}
        a = AsyncEngine(e)
        assert a.state == "loading"
        with pytest.raises(NotReadyError, match="loading"): await a.open(request())
        with pytest.raises(NotReadyError): _ = a.max_model_len
        async with serving(a.handle) as a:
            assert (a.state, a.max_model_len, a.vocab_size) == ("ready", 80, a.tokenizer.vocab_size)
            for r, param, code in [(GenerationRequest("x", top_p=0), "top_p", None), (GenerationRequest(""), "prompt", None),
                    (GenerationRequest("x" * 5000), "prompt", "context_length_exceeded"), (request(logit_bias={99999: 1.0}), "logit_bias", None),
                    (GenerationRequest(prompt_token_ids=[99999]), "prompt_token_ids", None), (request(seed=3), "seed", "unsupported_parameter")]:
                with pytest.raises(RequestError) as err: await a.open(r)
                assert (err.value.param, err.value.code) == (param, code)
            assert "accepted" not in a.stats()["counters"]
        assert a.state == "dead"
        with pytest.raises(NotReadyError, match="stopped"): await a.open(request())
    asyncio.run(main())
    with pytest.raises(ConfigError, match="max_queued_requests must be an integer of at least 0, got -1"): ServingLimits(max_queued_requests=-1)


def test_fifty_leave_after_a_chunk_and_fifty_stay():   # B33
    async def main():
        async with serving(scripted(0.001, max_num_seqs=64)) as a:
            async def leave(i):
                async with await a.open(request(i, 500)) as s:
                    async for _ in s: break
                s.cancel()                                  # late and twice: nothing
            async def stay(i): return len(await read(a, request(i, 30)))
            await asyncio.gather(*(leave(i) for i in range(1, 51)))
            await until(lambda: not blocks_held(a), 2)
            engine = a.stats()["engine"]["counters"]
            assert engine["finished_abort"] == 50
            assert await asyncio.gather(*(stay(i) for i in range(1, 51))) == [30] * 50
            now = a.stats()
            assert now["engine"]["counters"]["finished_abort"] == 50 and now["counters"]["left"] == 50
    asyncio.run(main())


def test_leaving_at_every_stage_frees_everything():
    async def main():
        async with serving(scripted(0.001)) as a:
            async def once(i):
                t = asyncio.create_task(read(a, request(i % 150 + 1, 200)) if i % 2 else a.generate(request(i % 150 + 1, 200, stream=False)))
                await asyncio.sleep(0.0007 * (i % 37))
                t.cancel()
                with pytest.raises(asyncio.CancelledError): await t
            for k in range(0, 240, 24): await asyncio.gather(*(once(i) for i in range(k, k + 24)))
            await until(lambda: not blocks_held(a), 2)
            assert await read(a, request(7, 9)) and a.stats()["counters"]["left"] > 100
    asyncio.run(main())


def test_queue_of_four_and_one_slot():   # B34
    async def main():
        async with serving(scripted(0.005, max_num_seqs=1), max_queued_requests=4) as a:
            got = await asyncio.gather(*(a.open(request(i, 10, stream=False)) for i in range(1, 21)), return_exceptions=True)
            ok, no = [g for g in got if not isinstance(g, Exception)], [g for g in got if isinstance(g, QueueFullError)]
            assert (len(ok), len(no)) == (5, 15) and all(1 <= e.retry_after_s <= 60 for e in no) and "at most 4 may" in str(no[0])
            assert [(await s.result()).stats.generated_tokens for s in ok] == [10] * 5
            assert a.stats()["counters"]["rejected_requests"] == 15
        async with serving(scripted(0.005, max_num_seqs=1), max_queued_tokens=100) as a:
            big = [await a.open(request(i, 10, 90, stream=False)) for i in range(1, 5)]      # one runs, two are in the engine, one waits
            with pytest.raises(QueueFullError, match="prompts of 90 tokens wait"): await a.open(request(9, 10, 50))
            await a.open(request(9, 10, 5, stream=False))
            for s in big: await s.result()
    asyncio.run(main())


def test_overload_ten_times_over():
    async def main():
        async with serving(scripted(0.002, max_num_seqs=8), max_queued_requests=16) as a:
            done, full, waits = [], [], []
            async def one(i):
                t = time.perf_counter()
                try: done.append(len(await read(a, request(i % 180 + 1, 10))))
                except QueueFullError: full.append(1), waits.append(time.perf_counter() - t)
            for k in range(10): await asyncio.gather(*(one(24 * k + i) for i in range(240)))
            assert set(done) == {10} and len(done) >= 240 and len(done) + len(full) == 2400 and max(waits) < 1
    asyncio.run(main())


def test_clients_take_turns_and_priority_goes_first():
    q, order = FairQueue(), []
    for i in range(3): q.push(f"a{i}", 0, "a")
    q.push("b0", 0, "b"), q.push("c0", 0, "c"), q.push("b1", 0, "b"), q.push("z", 5, "a"), q.push("first", -1, "z")
    q.remove("c0", 0, "c")
    while q: order.append(q.pop())
    assert order == ["first", "a0", "b0", "a1", "b1", "a2", "z"] and not q.levels
    async def main():
        async with serving(scripted(0.002, max_num_seqs=1), max_running=1) as a:
            ends = []
            async def one(name, **kw):
                await read(a, request(3, 5), **kw)
                ends.append(name)
            flood = [asyncio.create_task(one("flood", client="x")) for _ in range(30)]
            await until(lambda: len(a.queue) == 29)
            await asyncio.gather(one("other", client="y"), one("urgent", client="x", priority=-1))
            assert ends.index("urgent") < ends.index("other") <= 4
            await asyncio.gather(*flood)
    asyncio.run(main())


def test_deadlines():
    async def main():
        async with serving(scripted(0.005, max_num_seqs=1), queue_timeout_s=0.15, max_running=1) as a:
            slow = await a.open(request(1, 2000, deadline_s=0.5, n=1))
            late = await a.open(request(2, 5, deadline_s=0.05, n=2, stream=False))
            never = await a.open(request(3, 5))
            assert [(c.is_final, c.finish_reason) async for c in late] == [(True, "abort")] * 2
            r = await late.result()
            assert (r.finish_reason, r.token_ids, len(r.outputs)) == ("abort", [], 2) and 40 < r.stats.queue_ms < 5000
            with pytest.raises(QueueTimeoutError, match="waited 0.15 s"): await never.result()
            chunks = [c async for c in slow]
            assert chunks[-1].finish_reason == "abort" and 10 < sum(len(c.token_ids) for c in chunks) < 2000
            assert a.stats()["counters"] | {"expired_queue": 1} == a.stats()["counters"]
        async with serving(scripted(0.005), deadline_s=0.1) as a:
            assert (await a.generate(request(1, 2000, stream=False))).finish_reason == "abort"
    asyncio.run(main())


def test_a_reader_that_sleeps_gets_more_at_once_and_loses_nothing():
    b = ChunkBuffer(3)
    for i in range(20): b.add(StreamChunk("r", f"{i},", i, index=i % 2, token_ids=[i]))
    b.add(StreamChunk("r", "", index=0, is_final=True))
    got = [b.pop() for _ in range(len(b))]
    assert len(got) == 4 and b.n_tokens == 0 and got[-1].is_final
    for k in range(2): assert [i for c in got if c.index == k for i in c.token_ids] == list(range(k, 20, 2))
    async def main():
        async with serving(scripted(0.001), max_buffered_chunks=4) as a:
            want = await read(a, request(9, 200))
            async with await a.open(request(9, 200)) as s:
                await until(lambda: s.done)
                assert len(s.buffer) <= 5
                assert [i async for c in s for i in c.token_ids] == want
    asyncio.run(main())


@pytest.mark.parametrize("limits", [dict(stall_s=0.1), dict(max_buffered_tokens=50, max_buffered_chunks=2)])
def test_a_reader_that_stops_is_cancelled_and_the_others_go_on(limits):
    async def main():
        async with serving(scripted(0.001), **limits) as a:
            async with await a.open(request(9, 2000)) as s:
                assert (await anext(s)).token_ids
                other = asyncio.create_task(read(a, request(8, 300)))
                await until(lambda: s.done, 5)
                assert a.stats()["counters"]["slow_readers"] == 1 and len(s.buffer) <= 17
                with pytest.raises(SlowReaderError):
                    async for _ in s: pass
                assert len(await other) == 300
    asyncio.run(main())


def test_drain_lets_them_end_then_aborts():   # B35
    async def main(drain_s):
        e = scripted(0.002)
        a = AsyncEngine(e)
        await a.start()
        tasks = [asyncio.create_task(read(a, request(i, 100))) for i in range(1, 9)]      # four run, four wait
        await until(lambda: a.stats()["running"] == 4)
        t, stop = time.monotonic(), asyncio.create_task(a.stop(drain_s))
        await asyncio.sleep(0)
        assert a.state == "draining"
        with pytest.raises(NotReadyError, match="shutting down"): await a.open(request())
        if drain_s == 99:
            await asyncio.sleep(0.05)
            a.abort("a second signal")
        await stop
        out = await asyncio.gather(*tasks, return_exceptions=True)
        e.unload()
        assert a.state == "dead" and time.monotonic() - t < 10
        return out
    assert [len(x) for x in asyncio.run(main(30))] == [100] * 8
    for drain_s, why in ((0.1, "shutting down"), (99, "a second signal"), (0, "shutting down")):
        out = asyncio.run(main(drain_s))
        assert all(isinstance(x, GenerationError) and why in str(x) for x in out)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_thread_is_noticed_and_started_again():   # F11
    async def main():
        async with serving(scripted(0.002), backoff_s=0.2) as a:
            for k in range(2):
                s = await a.open(request(3, 500))
                await anext(s)
                waiting = [asyncio.create_task(read(a, request(i, 50, priority=1))) for i in range(1, 12)]
                await until(lambda: len(a.running) > 1 and len(a.queue) > 0, 5)
                t = time.monotonic()
                bad = await a.open(request(EXIT, 5), priority=-5)
                with pytest.raises(EngineDeadError): await bad.result()
                with pytest.raises(EngineDeadError):
                    async for _ in s: pass
                assert time.monotonic() - t < 2
                await until(lambda: a.state == "loading", 2)
                with pytest.raises(NotReadyError): await a.open(request())
                await until(lambda: a.state == "ready", 5)
                out = await asyncio.gather(*waiting, return_exceptions=True)          # who waited in our queue still runs
                assert {type(x) for x in out} == {list, EngineDeadError} and all(len(x) == 50 for x in out if isinstance(x, list))
                assert a.stats()["counters"]["engine_restarts"] == k + 1
            with pytest.raises(GenerationError, match="this step fails"): await a.generate(request(RAISE, 5))
            assert a.state == "ready" and len(await read(a, request(4, 6))) == 6
    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_be_started_again_is_given_up():
    async def main():
        e = scripted(0.002)
        async with serving(e, backoff_s=0.01, max_restarts=2) as a:
            waiting = asyncio.create_task(read(a, request(5, 5)))
            def no(): raise RuntimeError("no")
            a.handle.start = no
            with pytest.raises(EngineDeadError): await a.generate(request(EXIT, 5))
            await until(lambda: a.state == "dead")
            with pytest.raises(EngineDeadError, match="could not be started again"): await a.open(request())
            await asyncio.gather(waiting, return_exceptions=True)
    asyncio.run(main())


def test_loops_come_and_go_and_engines_live_side_by_side():
    e, other = scripted(0.001), scripted(0.001)
    a, b = AsyncEngine(e), AsyncEngine(other)
    async def cell(i):
        await a.start(), await b.start()
        x, y = await asyncio.gather(read(a, request(i, 9)), read(b, request(i, 9)))
        s = await a.open(request(i, 1000))      # left behind when the loop ends
        await anext(s)
        return x == y and len(x) == 9
    assert all(asyncio.run(cell(i)) for i in range(1, 4))
    async def busy():
        async with await a.open(request(9, 1000)):
            with pytest.raises(RuntimeError, match="another event loop"): await asyncio.to_thread(asyncio.run, a.open(request()))
        await until(lambda: not blocks_held(a))
        await a.stop(), await b.stop()
        await a.start()
        assert a.state == "ready" and e.backend.is_loaded
        await a.stop()
    asyncio.run(busy())
    e.unload(), other.unload()


def test_start_is_shared_and_may_be_stopped_or_fail():
    async def main():
        gate, e = threading.Event(), scripted()
        a = AsyncEngine(e)
        real = a.handle.start
        def slow():
            gate.wait(5)
            real()
        a.handle.start = slow
        tasks = [asyncio.create_task(a.start()) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert a.state == "loading" and a.stats()["state"] == "loading"
        gate.set()
        await asyncio.gather(*tasks)
        assert a.state == "ready"
        await a.stop()
        def bad(): raise ConfigError("no such model")
        a.handle.start = bad
        for _ in range(2):
            with pytest.raises(ConfigError, match="no such model"): await a.start()
        a.handle.start = slow
        gate.clear()
        t = asyncio.create_task(a.start())
        await asyncio.sleep(0.02)
        threading.Timer(0.1, gate.set).start()
        await a.stop()
        await asyncio.gather(t, return_exceptions=True)
        assert a.state == "dead"
        e.unload()
    asyncio.run(main())


def test_one_wake_up_for_many_chunks_and_none_for_a_closed_loop():
    got = []
    async def main():
        box = Outbox(asyncio.get_running_loop(), lambda s, c, now: got.append((s, c)))
        for i in range(50): box.put(i, StreamChunk("r", "x"))
        assert not got
        await asyncio.sleep(0)
        assert [s for s, _ in got] == list(range(50)) and box.n_wakeups == 1
        t = threading.Thread(target=lambda: [box.put(i, StreamChunk("r", "x")) for i in range(20_000)])
        t.start()
        while t.is_alive(): await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert len(got) == 20_050 and [s for s, _ in got[50:]] == list(range(20_000)) and not box.items
        return box
    box = asyncio.run(main())
    with pytest.raises(RuntimeError): box.put(0, StreamChunk("r", "x"))


def test_the_loop_stays_quick_while_streams_run():   # L8, F12
    class SlowTokenizer:
        def __init__(self, tok): self.tok = tok
        def __getattr__(self, name): return getattr(self.tok, name)
        def encode(self, text, **kw):
            if "slow" in text:
                time.sleep(1)
                return [5, 6, 7]
            if "broken" in text: raise ValueError("the tokenizer broke")
            return self.tok.encode(text, **kw)
    async def main():
        async with serving(scripted(0.002, max_num_seqs=16)) as a:
            object.__setattr__(a.handle.facts, "tokenizer", SlowTokenizer(a.handle.facts.tokenizer))
            gaps, stop = [], asyncio.Event()
            async def pulse():
                while not stop.is_set():
                    t = time.perf_counter()
                    await asyncio.sleep(0.001)
                    gaps.append(time.perf_counter() - t)
            p = asyncio.create_task(pulse())
            streams = [asyncio.create_task(read(a, request(i, 200))) for i in range(1, 16)]
            with pytest.raises(ValueError, match="the tokenizer broke"): await a.generate(GenerationRequest("broken"))
            await asyncio.gather(a.generate(GenerationRequest("slow" * 1200, max_new_tokens=3)), *streams)
            stop.set()
            await p
            assert sorted(gaps)[int(len(gaps) * 0.99)] < 0.2
    asyncio.run(main())


def test_one_wake_up_a_step_for_all_streams():
    async def main():
        async with serving(scripted(0.005, max_num_seqs=16)) as a:
            before = a.stats()
            await asyncio.gather(*(read(a, request(i, 100)) for i in range(1, 17)))
            after = a.stats()
            def grew(name: str, *path: str) -> int: return eval_at(after, *path, name) - eval_at(before, *path, name)
            def eval_at(d, *keys):
                for k in keys: d = d[k] if k in d else 0
                return d
            wakeups, chunks, steps = grew("wakeups", "counters"), grew("chunks", "counters"), grew("steps", "engine", "counters")
            assert chunks > 16 * 90 and wakeups <= steps + 20, (wakeups, steps, chunks)
        s = scripted(0.001)                                 # two servers over one engine: each hears of its own
        async with serving(s) as a, serving(s) as b:
            got = await asyncio.gather(*(read(x, request(i, 30)) for i in range(1, 9) for x in (a, b)))
            assert [len(g) for g in got] == [30] * 16
    asyncio.run(main())


def test_observers_get_every_request_once():
    async def main():
        seen = []
        async with serving(scripted(0.002, max_num_seqs=2), max_queued_requests=50) as a:
            a.observers += [seen.append, lambda r: 1 / 0]
            await read(a, request(1, 10), client="me")
            await a.generate(request(2, 6, stream=False, n=2))
            with pytest.raises(GenerationError): await a.generate(request(RAISE, 3))
            async with await a.open(request(3, 500)) as s: await anext(s)
            await until(lambda: len(seen) == 4)
        r = seen[0]
        assert (r.client, r.error, r.finish_reasons, sum(r.sizes), len(r.gaps)) == ("me", None, ["length"], 10, len(r.sizes))
        assert r.stats.generated_tokens == 10 and abs(sum(r.gaps) * 1e3 - r.stats.total_latency_ms) < 1000 and all(g >= 0 for g in r.gaps)
        assert seen[1].finish_reasons == ["length"] * 2 and not seen[1].gaps
        assert seen[2].error == "RuntimeError: this step fails" and seen[2].finish_reasons == ["error"] and seen[3].finish_reasons == ["abort"]
    asyncio.run(main())


def test_the_contracts_scheduler():
    async def main():
        e = forced_engine(["One answer", "Another answer"], max_num_seqs=4)
        s = ContinuousBatchScheduler(e, 2, 20.0, max_queue_size=3)
        await s.start()
        rs = [GenerationRequest(prompt_token_ids=forced_prompt(i % 2), temperature=0.0) for i in range(20)]
        out = await asyncio.gather(*map(s.submit, rs), return_exceptions=True)
        done = [r for r in out if not isinstance(r, Exception)]
        assert len(done) >= 5 and {r.generated_text for r in done} == {"One answer", "Another answer"}
        assert all(isinstance(r, QueueFullError) for r in out if isinstance(r, Exception)) and len(done) < 20
        with pytest.raises(RequestError): await s.submit(GenerationRequest(""))
        assert s.queue_size == 0 and not s.open
        await s.stop()
    asyncio.run(main())
    assert chat_messages_to_prompt([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]) == "SYSTEM: Be kind.\n\nUSER: Hi\n\nASSISTANT:"
