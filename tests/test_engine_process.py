"""The engine in its own process: the same text, crashes, restarts, orphans."""
import asyncio, os, queue, signal, subprocess, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
import pytest
from llminfer.config import ConfigError, EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.engine_handle import ThreadHandle
from llminfer.engine_process import EngineProcess, ProcessHandle, make_handle
from llminfer.request import GenerationRequest, RequestError
from llminfer.serving import AsyncEngine, EngineDeadError, NotReadyError
from support.engines import tiny
from support.serving import EXIT, KILL, RAISE, blocks_held, make_nothing, make_scripted, read, request, serving, until

ROOT = Path(__file__).parent.parent


def running(pid: int) -> bool:
    "Alive, and no zombie."
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError: return False


def facts(r) -> tuple:
    def scores(lps): return lps and [lp and (lp.token_id, lp.token, lp.rank, round(lp.logprob, 6), list(lp.top)) for lp in lps]
    return r.prompt, r.prompt_token_ids, scores(r.prompt_logprobs), [(o.text, o.token_ids, o.finish_reason, o.stop_reason, scores(o.logprobs)) for o in r.outputs]


def test_the_same_text_as_in_this_process():
    cfg = EngineConfig(model_name=tiny()[0], dtype="float64", max_model_len=128, max_num_seqs=4)
    rs = [GenerationRequest(f"Prompt {i}", max_new_tokens=3 + i % 9, temperature=1.0 if i % 3 else 0.0, seed=i, n=1 + i % 3, stream=bool(i % 2),
        logprobs=2 if i % 4 == 0 else None, prompt_logprobs=1 if i % 8 == 0 else None, stop_sequences=["e"] if i % 5 == 0 else None) for i in range(16)]
    with InferenceEngine(cfg) as e: want, chat = e.run_requests(rs), e.encode_chat([{"role": "user", "content": "Hello <|im_end|> there"}])
    async def main():
        h = ProcessHandle(cfg)
        async with serving(h) as a:
            assert a.tokenizer.encode_chat([{"role": "user", "content": "Hello <|im_end|> there"}]) == chat and a.info["family"] == "llama"
            assert (a.max_model_len, a.max_num_seqs, a.vocab_size, a.generation_config["bos_token_id"]) == (128, 4, 512, 1)
            got = await asyncio.gather(*(a.generate(r) for r in rs))
            for w, g in zip(want, got): assert facts(g) == facts(w)
            s = await a.open(GenerationRequest("Prompt 1", max_new_tokens=9, temperature=0.0, stream=True))
            chunks = [c async for c in s]
            assert "".join(c.token for c in chunks) == (await s.result()).generated_text and chunks[-1].stats.generated_tokens == 9 and len(chunks) > 3
            for r in (GenerationRequest("x", top_p=0), GenerationRequest("x" * 500), GenerationRequest("x", prefix_allowed_tokens_fn=lambda b, ids: [1])):
                with pytest.raises(RequestError): await a.open(r)
            pid = h.pid
        assert not running(pid) and a.state == "dead"
    asyncio.run(main())


@pytest.mark.parametrize("first, code", [(KILL, -9), (EXIT, 1)])
def test_a_crash_is_an_error_for_those_inside_and_a_restart_for_the_rest(first, code):
    async def main():
        h = ProcessHandle(EngineConfig(model_name="0.002"), make_scripted)
        async with serving(h, backoff_s=0.05) as a:
            s, pid = await a.open(request(3, 1000, n=2)), h.pid
            await anext(s)
            waiting = [asyncio.create_task(read(a, request(i, 5, priority=1))) for i in range(1, 12)]
            await asyncio.sleep(0.05)
            t = time.monotonic()
            with pytest.raises(EngineDeadError, match=f"exit code {code}"): await a.generate(request(first, 5), priority=-5)
            with pytest.raises(EngineDeadError):
                async for _ in s: pass
            assert time.monotonic() - t < 2
            await until(lambda: a.state == "loading", 2)
            with pytest.raises(NotReadyError): await a.open(request())
            assert a.stats()["state"] == "loading"                  # at once, nobody waits
            await until(lambda: a.state == "ready", 30)
            assert h.pid != pid and not running(pid)
            out = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(x) for x in out} == {list, EngineDeadError} and all(len(x) == 5 for x in out if isinstance(x, list))
            assert len(await read(a, request(4, 6))) == 6 and a.stats()["counters"]["engine_restarts"] == 1
    asyncio.run(main())


def test_leaving_and_failing_over_the_pipe():
    async def main():
        async with serving(ProcessHandle(EngineConfig(model_name="0.002", max_num_seqs=16), make_scripted)) as a:
            async def leave(i):
                async with await a.open(request(i, 1500, stream=bool(i % 2))) as s:
                    if i % 2: await anext(s)
                    else: await asyncio.sleep(0.003 * i)
            await asyncio.gather(*(leave(i) for i in range(1, 31)))
            await until(lambda: a.stats()["engine"].get("running") == 0 and not blocks_held(a), 5)
            assert a.stats()["counters"]["left"] == 30
            with pytest.raises(Exception, match="this step fails"): await a.generate(request(RAISE, 4))
            lengths = await asyncio.gather(*(read(a, request(i, 50)) for i in range(1, 33)))
            assert {len(x) for x in lengths} == {50}
            c = a.stats()["counters"]
            assert c["wakeups"] < c["chunks"]
            t = asyncio.create_task(read(a, request(5, 1500)))
            await asyncio.sleep(0.1)
            await a.stop(0.1)
            with pytest.raises(Exception, match="shutting down"): await t
    asyncio.run(main())


def test_what_goes_wrong_while_loading():
    async def main():
        for make, cfg, error, text in ((make_nothing, EngineConfig(), EngineDeadError, "exit code 7"),
                                       (InferenceEngine, EngineConfig(model_name="/no/such/model"), Exception, "/no/such/model")):
            a = AsyncEngine(ProcessHandle(cfg, make))
            with pytest.raises(error, match=text): await a.start()
            assert a.state == "loading"
            await a.stop()
        h = ProcessHandle(EngineConfig(model_name="0.01"), make_scripted)
        a = AsyncEngine(h)
        starting = asyncio.create_task(a.start())
        await until(lambda: h.pid)
        pid = h.pid
        await a.stop()                                              # in the middle of loading
        await asyncio.gather(starting, return_exceptions=True)
        assert a.state == "dead" and not running(pid)
    asyncio.run(main())


PARENT = """
import sys
sys.path[:0] = sys.argv[1:3]
from llminfer.config import EngineConfig
from llminfer.engine_process import ProcessHandle
from llminfer.request import GenerationRequest
from support.serving import make_scripted, request
h = ProcessHandle(EngineConfig(model_name="0.05"), make_scripted)      # no `if __name__ == "__main__"` around it
h.start()
h.submit(h.prepare(request(3, 2000)), lambda c: None)
print(h.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, None])
def test_no_orphan(tmp_path, sig):
    (tmp_path / "parent.py").write_text(PARENT)
    p = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), str(ROOT), str(ROOT / "tests")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(p.stdout.readline())
    assert running(pid) and os.getpgid(pid) != os.getpgid(p.pid)    # Ctrl-C does not reach it
    if sig is not None: p.send_signal(sig)
    p.stdin.close()
    p.wait(20)
    end = time.monotonic() + 10
    while running(pid) and time.monotonic() < end: time.sleep(0.05)
    assert not running(pid)
    p.stdout.close()


def test_the_handle_that_fits():
    assert isinstance(make_handle(EngineConfig(device="cpu")), ThreadHandle)
    assert isinstance(make_handle(EngineConfig(device="cpu"), "process"), ProcessHandle)
    with pytest.raises(ConfigError): make_handle(EngineConfig(max_num_seqs=0))


def test_a_pipe_is_closed_when_its_writer_has_ended():
    "Its number may be a new child's pipe a moment later: nothing is written then, and nothing after the end."
    p, sent, writing = EngineProcess.__new__(EngineProcess), [], []
    p.alive, p.closing, p.calls, p.jobs, p.after_batch, p.notes = True, True, {}, {}, lambda: None, queue.SimpleQueue()
    p.proc = SimpleNamespace(wait=lambda: 0, pid=0)
    p.conn = SimpleNamespace(send=sent.append, close=lambda: writing.append(p.writer.is_alive()))
    p.writer = threading.Thread(target=p.write, daemon=True)
    p.writer.start()
    p.notes.put(("hello",))
    while not sent: time.sleep(0.01)
    p.died()
    assert writing == [False] and sent == [[("hello",)]]
