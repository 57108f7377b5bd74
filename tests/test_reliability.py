"""A sample of every fault and load of tests/reliability (all of them: `make reliability`), and the watchdog."""
import asyncio, json, os, signal, time
import numpy as np
import pytest
from llminfer import core as core_module
from llminfer.config import EngineConfig
from llminfer.engine_process import ProcessHandle
from llminfer.tracing import inject
from llminfer.serving import EngineDeadError, NotReadyError
from house import ROOT
from reliability.run import record, row_of, totals
from reliability.table import Counted, Family, load_tables
from support.api import serving as over_http
from support.engines import counters, forced_engine, forced_prompt, paged, pool_of, settle
from support.serving import make_scripted, read, request, scripted, serving, until

ROWS = {k: f for k, f in load_tables("FL").items()}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("row", [k for k, f in ROWS.items() if f.sample])
def test_a_sample_of_each_row(row, monkeypatch):
    monkeypatch.setattr(core_module, "AUDIT", True)
    monkeypatch.setenv("LLMINFER_AUDIT", "1")
    c = ROWS[row](ROWS[row].sample, 0)
    assert c.ok and c.tried >= ROWS[row].sample, (c.bad, c.notes)


def test_the_tables_are_whole_and_a_record_adds_up():
    assert set(ROWS) == {f"F{i}" for i in range(1, 23)} | {f"L{i}" for i in range(1, 10)}
    assert [k for k, f in ROWS.items() if not f.sample] == ["L6", "L7"]          # test_parity and test_quantization are their samples
    assert sum(f.goal for k, f in ROWS.items() if k[0] == "F" and f.counted) == 4790 and ROWS["F8"].goal == 1000 and ROWS["F22"].goal == 20_000
    def some(seed, count, c):
        for i in range(count):
            with c.case(i):
                if i == 3: raise ValueError("three")
        c.notes["bystander_requests"] = 5
    c = Family("F1", "x", 10, 10, some)(10, 7)
    assert (c.tried, c.good, c.ok, c.bad) == (10, 9, False, ["F1 seed 7 case 3: ValueError: three"])
    def broken(seed, count, c):
        c.add(0)
        raise RuntimeError("the driver")
    b = Family("F2", "x", 10, 10, broken)()
    assert (b.tried, b.good, b.ok, b.bad, b.error) == (1, 1, False, [], "RuntimeError: the driver") and not Counted("F3", 0).ok      # no fault was lost
    def broken_promise(seed, count, c):
        c.add(0)
        raise AssertionError("a block is held")
    assert (x := Family("F2", "x", 10, 10, broken_promise)()).good == 0 and "a block is held" in x.bad[0] and x.error is None
    assert totals({"F2": row_of(b, (0.0,))})["harness_errors"] == 1 and row_of(b, (0.0,))["error"] == b.error
    rows = {"F1": row_of(c, (0.0,)), "F8": row_of(Counted("F8", 0, 1000, 1000), (0.0,))}
    assert totals(rows) == {"faults_injected": 10, "faults_survived": 9, "inputs_tried": 0, "inputs_answered": 0, "loads_tried": 0, "loads_held": 0, "preemptions_forced": 1000,
        "preemptions_wrong": 0, "bystander_requests": 5, "bystanders_wrong": 0}
    import jsonschema
    schema = json.loads((ROOT / "benchmarks/records/schema/reliability.json").read_text())
    jsonschema.validate(json.loads(json.dumps(record(rows, 0, True, ""))), schema)
    for f in sorted((ROOT / "benchmarks/records").glob("reliability-*.json")):
        d = json.loads(f.read_text())
        jsonschema.validate(d, schema)
        assert {k: d[k] for k in totals(d["families"])} == totals(d["families"]), f.name


# the watchdog

def test_a_leaked_block_is_found_when_the_engine_goes_idle_and_wrong_books_at_once(monkeypatch, caplog):
    e = forced_engine([[50] * 40, [51] * 40])
    ask = lambda i: e.run(prompt_token_ids=forced_prompt(i), temperature=0.0, max_new_tokens=5)
    paged(e).loop.call(lambda: pool_of(e).admit(10**6, np.arange(5, dtype=np.int32)) and pool_of(e).reserve(10**6, 20))
    assert ask(0).token_ids == [50] * 5                                 # who ran is not hurt
    settle(e)
    assert counters(e)["engine_errors"] == 1 and "blocks are held and nothing runs" in caplog.text
    monkeypatch.setattr(core_module, "AUDIT", True)
    pool_of(e)._free.append(pool_of(e)._free[0])
    r = ask(1)
    assert r.error is not None and "AssertionError" in r.error and counters(e)["engine_errors"] == 2
    assert ask(1).token_ids == [51] * 5 and counters(e)["engine_errors"] == 2
    settle(e)
    e.unload()


def test_a_step_that_hangs_in_a_thread_is_told_and_the_engine_comes_back(caplog):
    async def main():
        async with serving(scripted(0.001, max_num_seqs=1), hang_s=0.3, max_running=1) as a:
            with inject("core.plan", lambda: time.sleep(1.5), after=20):
                s, waits = await a.open(request(3, 500)), await a.open(request(4, 5))
                t = time.monotonic()
                with pytest.raises(EngineDeadError, match="longer than 0.3 s"):
                    async for _ in s: pass
                with pytest.raises(EngineDeadError, match="longer than 0.3 s"): await waits.result()
                assert 0.2 < time.monotonic() - t < 1.4 and a.state == "loading" and "longer than 0.3 s" in a.down
                with pytest.raises(NotReadyError, match="longer than 0.3 s"): await a.open(request())
                await until(lambda: a.state == "ready", 10)
            assert len(await read(a, request(4, 6))) == 6 and a.down == "" and a.stats()["counters"]["engine_hangs"] == 1
    asyncio.run(main())
    assert [r.message for r in caplog.records if "step" in r.message or "goes on" in r.message] == ["a step of the engine takes longer than 0.3 s", "the engine goes on"]


def test_an_engine_process_that_is_stopped_is_killed_and_replaced_and_health_says_so(caplog):
    from llminfer.serving import ServingLimits
    with over_http(ProcessHandle(EngineConfig(model_name="0.002"), make_scripted), limits=ServingLimits(hang_s=0.5, backoff_s=0.05)) as s:
        pid = s.engine.handle.pid
        body = {"prompt": [7, 20], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        want = s.complete(**body)["choices"][0]["text"]
        os.kill(pid, signal.SIGSTOP)
        seen, end = set(), time.monotonic() + 60
        while time.monotonic() < end and not (503 in seen and s.http.get("/ready").status_code == 200):
            h = s.http.get("/health")
            seen.add(h.status_code)
            assert (h.status_code == 503) == (h.json()["status"] == "down")
            time.sleep(0.01)
        assert seen == {200, 503} and s.engine.handle.pid != pid and s.complete(**body)["choices"][0]["text"] == want
        text = s.http.get("/metrics").text
        assert all(f"llminfer_engine_{n}_total{{" in text for n in ("hangs", "deaths", "restarts")) and s.engine.stats()["counters"]["engine_hangs"] == 1
    said = [r.message for r in caplog.records if "0.5 s" in r.message]        # it was idle: no step is blamed
    assert said == ["the engine's process has said nothing for 0.5 s; the process is killed"]
