"""Routing by prefix, the door in front of replicas, the words of `serve --replicas`, and the files for clouds. Ray itself: `make ray` (tests/cluster/on_ray.py).

| what must hold | test |
| --- | --- |
| same leading blocks, same replica; a load bound that nothing breaks | test_router_keeps_its_promises, test_a_replica_that_goes_moves_only_its_own |
| nothing sent: another replica; a stream begun: OpenAI's error event; a client that leaves is told to the replica | test_door_* |
| /metrics with a replica label, /health and /ready of the whole, keys | test_facts_of_the_whole |
| the larger backends get their sizes from the command line | test_flags_reach_what_is_larger |
"""
from __future__ import annotations
import ast, asyncio, json, random
from collections import Counter
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
import pytest
from hypothesis import given, settings, strategies as st
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner
from house import ROOT
from llminfer import cli
from llminfer.api import create_openai_app, digest
from llminfer.cli_serve import ServeFlags, make_server, serve_config
from llminfer.config import ConfigError, EngineConfig
from llminfer.engine import InferenceEngine
from llminfer.routing import (Answer, FrontDoor, LocalFleet, PrefixRouter, RandomRouter, ReplicaGone, Route, leading_blocks, merge_metrics, merge_states, rendezvous, router_svg)
from llminfer.scaling import Scale, check_room, first_cause, gpus_of, read_scale
from support.fake_vllm import fake_vllm
from support.serving import scripted
from support.engines import tiny

# --- the router ------------------------------------------------------------------------------------------------------------------------

chains = st.lists(st.integers(0, 3), min_size=0, max_size=6)

def blocks_of(ids: Any) -> tuple[bytes, ...]: return tuple(bytes(ids[:i + 1]) for i in range(len(ids)))

@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(chains, st.booleans()), max_size=40), st.sampled_from((1.0, 1.25, 2.0)))
def test_router_keeps_its_promises(n: int, steps: list[tuple[list[int], bool]], bound: float) -> None:
    "Every replica is ranked once; the first is within the bound; on idle replicas an exact repeat goes where it went last."
    r, loads, last = PrefixRouter(bound=bound), dict.fromkeys("ABCDE"[:n], 0), dict[tuple[bytes, ...], str]()
    for ids, ends in steps:
        chain = blocks_of(ids)
        order = r.rank(Route(chain), loads)
        assert sorted(order) == sorted(loads)
        assert loads[order[0]] + 1 <= -(-bound * (sum(loads.values()) + 1) // n)
        if chain in last: assert r.rank(Route(chain), dict.fromkeys(loads, 0))[0] == last[chain]
        r.note(chain, order[0])
        for i in range(1, len(chain) + 1): last[chain[:i]] = order[0]
        loads[order[0]] += 1
        if ends: loads[max(loads, key=lambda k: loads[k])] -= 1

@given(st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=2, max_size=6), st.binary(min_size=1, max_size=8))
def test_a_replica_that_goes_moves_only_its_own(ids: set[str], key: bytes) -> None:
    first, *rest = rendezvous(key, sorted(ids))
    assert rendezvous(key, rest)[0] == rest[0]
    for r in rest: assert rendezvous(key, sorted(ids - {r}))[0] == first

def test_conversations_stay_and_beginnings_spread() -> None:
    def body(*texts: str, **more: Any) -> bytes: return json.dumps({"messages": [{"role": "user", "content": t} for t in texts], **more}).encode()
    r, idle, system, home = PrefixRouter(), dict.fromkeys("ABCD", 0), "be kind. " * 40, dict[int, str]()
    for i in range(200):
        chain = tuple(leading_blocks(body(system, f"{i} " * 50)))
        home[i] = r.rank(Route(chain), idle)[0]
        r.note(chain, home[i])
    assert min(Counter(home.values()).values()) > 25, Counter(home.values())       # one system prompt, all replicas
    order = list(range(200))
    random.Random(0).shuffle(order)
    for i in order:
        chain = tuple(leading_blocks(body(system, f"{i} " * 50, "an answer " * 9, f"more {i}")))
        assert r.rank(Route(chain), idle)[0] == home[i]
        assert r.rank(Route(chain, avoid=(home[i],)), idle)[-1] == home[i]
        gone = {k: v for k, v in idle.items() if k != home[i]}
        assert r.rank(Route(chain), gone)[0] in gone                               # a holder that died is not believed in
    assert leading_blocks(body(system)) != leading_blocks(body(system, model="lora")) and leading_blocks(body("short")) == []
    ids = list(range(400))
    assert leading_blocks(json.dumps({"prompt": ids}).encode())[:5] == leading_blocks(json.dumps({"prompt": ids + [1]}).encode())[:5] != []
    assert leading_blocks(json.dumps({"input": "x" * 99}).encode())[0] == leading_blocks(json.dumps({"input": "x" * 200}).encode())[0]
    for bad in (b"", b"[1]", b'{"messages": 3}', b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}'): leading_blocks(bad)
    small = PrefixRouter(size=10)
    small.note(blocks_of(range(30)), "A")
    assert len(small.table) == 10
    assert "goes to" in router_svg(r, {"one": chain}, idle) and set(RandomRouter(0).rank(Route(), idle)) == set("ABCD")

# --- the door --------------------------------------------------------------------------------------------------------------------------

def scope(path: str, method: str = "POST", **headers: str) -> dict[str, Any]:
    h = [(b"content-type", b"application/json"), (b"host", b"x"), *((k.encode(), v.encode()) for k, v in headers.items())]
    return {"type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": h, "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80), "root_path": "", "extensions": {}}

async def ask(door: Any, path: str, body: Any = None, leave_after: int | None = None, **headers: str) -> tuple[int, dict[str, str], str]:
    "Call an ASGI app as a server would; `leave_after`: the client goes after so many messages."
    sent, todo, gone = list[Any](), [b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()], asyncio.Event()
    async def receive() -> Any:
        if todo: return {"type": "http.request", "body": todo.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}
    async def send(m: Any) -> None:
        sent.append(m)
        if leave_after is not None and len(sent) >= leave_after: gone.set()
    await door(scope(path, "GET" if body is None else "POST", **headers), receive, send)
    text = b"".join(m.get("body", b"") for m in sent[1:]).decode()
    return (sent[0]["status"] if sent else 0), {k.decode(): v.decode() for k, v in (sent[0]["headers"] if sent else [])}, text

class Shaky(LocalFleet):
    "Replicas die as told: name -> messages after which it is gone."
    def __init__(self, apps: Any, router: Any, die: dict[str, int]): super().__init__(apps, router); self.die = die
    async def ask(self, route: Route, scope: Any, body: bytes) -> Any:
        who, n = "", 0
        async with aclosing(super().ask(route, scope, body)) as stream:
            async for ms in stream:
                for m in ms:
                    who = m.get("replica", who)
                    yield [m]
                    n += 1
                    if n == self.die.get(who): raise ReplicaGone("killed")

@asynccontextmanager
async def fleet(die: dict[str, int] | None = None, step_s: float = 0.002, **app: Any):
    "Two replicas without a model."
    engines = {k: scripted(step_s) for k in "AB"}
    apps = {k: create_openai_app(e, **app) for k, e in engines.items()}
    async with apps["A"].router.lifespan_context(apps["A"]), apps["B"].router.lifespan_context(apps["B"]):
        yield Shaky(apps, PrefixRouter(), die if die is not None else {})
    for e in engines.values(): e.unload()

IDS: dict[str, Any] = {"prompt": list(range(5, 45)), "max_tokens": 30, "temperature": 0, "ignore_eos": True}

async def home(f: LocalFleet) -> str: return f.router.rank(Route(tuple(leading_blocks(json.dumps(IDS).encode()))), f.loads)[0]

def test_door_gives_to_another_what_was_not_begun() -> None:
    async def go() -> None:
        async with fleet() as f:
            door = FrontDoor(f)
            status, _, plain = await ask(door, "/v1/completions", IDS)
            assert status == 200
            first = await home(f)
            for n in (1, 2):                                 # named; and its head sent, but no byte of the body
                f.die = {first: n}
                for stream in (False, True):
                    status, head, text = await ask(door, "/v1/completions", {**IDS, "stream": stream})
                    assert status == 200 and "error" not in text and f.loads == {"A": 0, "B": 0}
                    if not stream: assert json.loads(text)["choices"] == json.loads(plain)["choices"] and "x-request-id" in head
                    first = await home(f)                    # it has moved
                    f.die = {first: n}
            f.die = {"A": 1, "B": 1}
            status, head, text = await ask(door, "/v1/completions", IDS)
            assert status == 503 and json.loads(text)["error"]["code"] == "engine_dead" and head["retry-after"] and head["x-request-id"]
            assert door.counts["broken"] == 0 and door.counts["again"] >= 4
    asyncio.run(go())

@pytest.mark.parametrize("path, body", [("/v1/completions", IDS), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "ignore_eos": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 30})])
def test_door_ends_a_begun_stream_with_an_error_event(path: str, body: dict[str, Any]) -> None:
    async def go() -> None:
        async with fleet({"A": 5, "B": 5}) as f:
            door = FrontDoor(f)
            status, _, text = await ask(door, path, {**body, "stream": True})
            events = text.strip().split("\n\n")
            assert status == 200 and "engine_dead" in text and door.counts == {"broken": 1}
            if path == "/v1/responses":
                assert events[-1].startswith("event: error\ndata: ")
                e = json.loads(events[-1].split("data: ")[1])
                assert e["type"] == "error" and e["sequence_number"] == len(events) - 1
            else: assert events[-1] == "data: [DONE]" and json.loads(events[-2][6:])["error"]["type"] == "server_error"
            assert f.loads == {"A": 0, "B": 0}
    asyncio.run(go())

def test_door_tells_the_replica_that_the_client_left() -> None:
    async def go() -> None:
        async with fleet(step_s=0.01) as f:
            engines = {k: a.state.engine for k, a in f.apps.items()}
            await ask(FrontDoor(f), "/v1/completions", {**IDS, "max_tokens": 1500, "stream": True}, leave_after=3)
            for _ in range(200):
                if not any(e.stats()["open"] for e in engines.values()): break
                await asyncio.sleep(0.01)
            left = sum(e.stats()["counters"].get("left", 0) for e in engines.values())
            assert left == 1 and f.loads == {"A": 0, "B": 0} and not any(e.stats()["open"] for e in engines.values())
    asyncio.run(go())

def test_door_asks_another_when_one_is_full_or_ends() -> None:
    async def go() -> None:
        async with fleet() as f:
            door = FrontDoor(f)
            first = await home(f)
            f.apps[first].state.engine.phase = "draining"
            status, _, text = await ask(door, "/v1/completions", IDS)
            assert status == 200 and door.counts == {"again": 1}
            for a in f.apps.values(): a.state.engine.phase = "draining"
            status, _, text = await ask(door, "/v1/completions", {**IDS, "prompt": [9] * 40})
            assert status == 503 and json.loads(text)["error"]["code"] == "not_ready"
            for a in f.apps.values(): a.state.engine.phase = "up"
            shut = FrontDoor(f, state=lambda: "draining")
            assert (await ask(shut, "/v1/completions", IDS))[0] == 503 and (await ask(shut, "/ready"))[0] == 503 and (await ask(shut, "/health"))[0] == 200
            tight = FrontDoor(f, max_body_bytes=2**23)
            status, _, text = await ask(tight, "/v1/completions", b"x" * (2**23 + 10))
            assert status == 413, text
            assert (await ask(door, "/v1/completions", b"{"))[0] == 400 and (await ask(door, "/nothing"))[0] == 404
    asyncio.run(go())

def test_no_replica_is_told_in_time() -> None:
    class Nobody:
        async def ask(self, route: Any, scope: Any, body: bytes) -> Any:
            await asyncio.sleep(60)
            yield []
        async def ask_all(self, scope: Any) -> dict[str, Answer]: return {}
    async def go() -> None:
        door = FrontDoor(Nobody(), wait_s=0.05)
        status, head, text = await ask(door, "/v1/completions", IDS)
        assert status == 503 and json.loads(text)["error"]["code"] == "not_ready" and head["retry-after"] == "1"
        assert json.loads((await ask(door, "/health"))[2])["state"] == "loading" and (await ask(door, "/ready"))[0] == 503 and (await ask(door, "/metrics"))[0] == 404
        sent = list[Any]()
        async def receive() -> Any: return {"type": "lifespan.startup"}
        async def send(m: Any) -> None: sent.append(m["type"])
        await door({"type": "lifespan"}, receive, send)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    asyncio.run(go())

def test_facts_of_the_whole() -> None:
    async def go() -> None:
        async with fleet(metrics_names="both", guard_all=True, api_key="k") as f:
            door, key = FrontDoor(f), dict[str, Any](authorization="Bearer k")
            assert [(await ask(door, p))[0] for p in ("/metrics", "/health", "/ready", "/v1/models")] == [401] * 4
            for i in range(6): assert (await ask(door, "/v1/completions", {**IDS, "prompt": [i + 5] * 64}, **key))[0] == 200
            status, head, text = await ask(door, "/metrics", **key)
            rows = [s for family in text_string_to_metric_families(text) for s in family.samples]        # Prometheus can read it: families in one block, no sample twice
            assert status == 200 and head["content-type"].startswith("text/plain") and len({(s.name, *sorted(s.labels.items())) for s in rows}) == len(rows)
            done = {s.labels["replica"]: s.value for s in rows if s.name == "llminfer_request_success_total" and s.labels["finished_reason"] == "length"}
            assert done.keys() == {"A", "B"} and sum(done.values()) == 6 and {s.value for s in rows if s.name == "llminfer_replicas"} == {2.0}
            assert any(s.name == "vllm:kv_cache_usage_perc" and s.labels["replica"] == "B" for s in rows)
            status, _, text = await ask(door, "/health", **key)
            assert status == 200 and json.loads(text)["replicas"] == {"A": "ready", "B": "ready"} and json.loads(text)["status"] == "ok"
            f.apps["A"].state.engine.phase = "dead"
            body = json.loads((await ask(door, "/ready", **key))[2])
            assert body == {"ready": True, "state": "ready", "replicas": {"A": "dead", "B": "ready"}}
            f.apps["B"].state.engine.phase = "dead"
            assert (await ask(door, "/ready", **key))[0] == (await ask(door, "/health", **key))[0] == 503
            for a in f.apps.values(): a.state.engine.phase = "up"
            text = (await ask(door, "/metrics", accept="application/openmetrics-text", **key))[2]
            assert text.endswith("# EOF\n") and text.count("# EOF") == 1
            for x in (a.state.engine for a in f.apps.values()): x.watcher.cancel(); x.hung = "a step takes long"       # nobody comes to take it back
            status, _, text = await ask(door, "/health", **key)
            assert (status, json.loads(text)["status"], json.loads(text)["why"]) == (503, "down", "a step takes long")
            f.apps["B"].state.engine.hung = ""
            assert (await ask(door, "/health", **key))[0] == 200
    asyncio.run(go())

def test_states_of_several_are_one() -> None:
    a = lambda state, **more: Answer(200, {}, json.dumps({"state": state, **more}).encode())
    assert merge_states({"A": a("loading"), "B": a("dead")})["state"] == "loading" and merge_states({})["state"] == "loading" and merge_states({"A": a("dead")})["status"] == "dead"
    assert merge_states({"A": a("ready", running=2), "B": a("draining", running=1)})["running"] == 3
    assert merge_metrics({}) == ""

# --- what to run -----------------------------------------------------------------------------------------------------------------------

def test_scale_is_read_and_checked() -> None:
    s = read_scale({"model": "demo", "replicas": 3, "tensor_parallel_size": 2, "device": "cuda", "cache": {"num_blocks": 9}, "limits": {"drain_s": 5}, "quant": "int8"})
    assert (s.engine.model_name, s.replicas, s.engine.cache.num_blocks, s.limits.drain_s, s.engine.quant.mode.value) == ("demo", 3, 9, 5, "int8") and gpus_of(s) == 2
    assert gpus_of(Scale(EngineConfig(device="cpu"))) == 0 and gpus_of(Scale(EngineConfig(), num_gpus=0.5)) == 0.5
    for bad, word in (({"replicas": 0}, "replicas"), ({"replicas": 1.5}, "replicas"), ({"replica": 1}, "'replica'"), ({"routing": "x"}, "routing"), ({"load_bound": 0.5}, "load_bound"),
                      ({"cache": {"x": 1}}, "cache"), ({"max_model_len": -1}, "max_model_len"), ({"place": "moon"}, "place"), ({"per_node": 0}, "per_node")):
        with pytest.raises(ConfigError, match=word): read_scale({"model": "demo", **bad})

def test_keys_travel_as_digests(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("LLMINFER_API_KEY", raising=False)
    (tmp_path / "keys").write_text("sesame\n")
    seen = dict[str, Scale]()
    monkeypatch.setattr("llminfer.scaling.RayServer", lambda scale: SimpleNamespace(app=None, scale=seen.setdefault("scale", scale)))
    s = ServeFlags(replicas=3, api_key_file=tmp_path / "keys", max_body_mb=1, max_queue_size=7, cors_origin=["*"], engine="thread", served_model_name=["a"], lora_modules=["n=p"])
    make_server(s, serve_config(s)[0])
    got = seen["scale"]
    assert got.keys == [digest("sesame")] and "sesame" not in repr(got) and (got.replicas, got.max_body_bytes, got.limits.max_queued_requests, got.place) == (3, 2**20, 7, "thread")
    assert got.app["served_model_name"] == ["a"] and got.app["lora_modules"] == {"n": "p"} and got.cors_origins == ["*"]
    create_openai_app(InferenceEngine(EngineConfig("demo", device="cpu")), max_body_bytes=got.max_body_bytes, **got.app)      # the app takes them

def test_what_serve_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    run = lambda *args: CliRunner().invoke(cli.app, ["serve", "--port", "0", "--device", "cpu", *args], prog_name="llminfer")
    for args, words in ((["--replicas", "0"], "--replicas must be from 1"), (["--replicas", "2", "--lora-dir", "."], "--lora-modules"), (["--replicas", "2", "--dashboard"], "one engine")):
        r = run(*args)
        assert r.exit_code == 2 and words in r.stderr and r.stderr.count("\n") == 1 and r.stdout == "", r.output
    real = find_spec
    monkeypatch.setattr("llminfer.scaling.find_spec", lambda name: None if name.startswith("ray") else real(name))
    r = run("--replicas", "2")
    assert (r.exit_code, r.stdout) == (2, "") and r.stderr == "error: --replicas needs Ray Serve, which is not installed: pip install 'llminfer[ray]'\n", r.output

def test_a_small_cluster_and_a_failed_start_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": 2.0}, is_initialized=lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    check_room(Scale(EngineConfig(), replicas=2))
    with pytest.raises(ConfigError, match="3 with 1 GPUs each need 3 GPUs, and the cluster has 2"): check_room(Scale(EngineConfig(), replicas=3))
    with pytest.raises(ConfigError, match="4 GPUs"): check_room(Scale(EngineConfig(tensor_parallel_size=2), replicas=2))
    text = "Traceback (most recent call last):\n  File x\nllminfer.formats.LoadError: model /x: there is no such folder\n\nRuntimeError: the above\n"
    assert first_cause(text) == "model /x: there is no such folder" and first_cause("") == "it did not say why"

# --- what is larger --------------------------------------------------------------------------------------------------------------------

def test_flags_reach_what_is_larger(tmp_path: Any) -> None:
    folder, _, _ = tiny()
    with fake_vllm() as vllm:
        r = CliRunner().invoke(cli.app, ["run", "hi", "-m", str(folder), "--backend", "vllm", "--tp-size", "4", "--pp-size", "2", "--max-tokens", "2", "--temp", "0"], prog_name="llminfer")
        assert r.exit_code == 0, r.output
        args = vllm.made[-1].args
        assert (args.tensor_parallel_size, args.pipeline_parallel_size) == (4, 2)
    cfg = serve_config(ServeFlags(model=str(folder), backend="vllm", tp_size=8, pp_size=2))[0]
    assert (cfg.tensor_parallel_size, cfg.pipeline_parallel_size) == (8, 2)
    cfg = serve_config(ServeFlags(backend="upstream", upstream_url="http://h:1/v1"))[0]
    assert cfg.backend.value == "upstream" and cfg.upstream_url == "http://h:1/v1"
    r = CliRunner().invoke(cli.app, ["run", "hi", "-m", str(folder), "--device", "cpu", "--pp-size", "2"], prog_name="llminfer")
    assert r.exit_code == 2 and "vllm" in r.output and r.output.count("\n") == 1, r.output

# --- files for clouds ------------------------------------------------------------------------------------------------------------------

def test_kuberay_example_says_what_build_app_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import yaml
    doc = yaml.safe_load((ROOT / "examples/kuberay_rayservice.yaml").read_text())
    assert (doc["apiVersion"], doc["kind"]) == ("ray.io/v1", "RayService") and doc["spec"].keys() >= {"serveConfigV2", "rayClusterConfig"}
    (app,) = yaml.safe_load(doc["spec"]["serveConfigV2"])["applications"]
    assert app["import_path"] == "llminfer.scaling:build_app"
    (tmp_path / "keys").write_text("k\n")
    s = read_scale({**app["args"], "api_key_file": str(tmp_path / "keys")})
    (group,) = doc["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    limits = worker["resources"]["limits"]
    assert s.replicas * (s.num_gpus or 0) <= group["minReplicas"] * limits["nvidia.com/gpu"] and s.num_cpus <= int(limits["cpu"])
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > s.limits.drain_s and any(m["mountPath"] in app["args"]["api_key_file"] for m in worker["volumeMounts"])

def test_dockerfile_installs_extras_that_exist_and_is_no_root() -> None:
    import tomllib
    lines = [x for x in (ROOT / "examples/Dockerfile").read_text().replace("\\\n", " ").splitlines() if x and not x.startswith("#")]
    words = {x.split()[0] for x in lines}
    assert words == {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "VOLUME", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = next(x for x in lines if x.startswith("ARG EXTRAS=")).split("=", 1)[1].split(",")
    assert "serve" in asked and set(asked) <= extras.keys()
    for source in next(x for x in lines if x.startswith("COPY pyproject")).split()[1:-1]: assert (ROOT / source).exists()
    entry = json.loads(next(x for x in lines if x.startswith("ENTRYPOINT")).split(" ", 1)[1])
    assert entry[:2] == ["llminfer", "serve"] and lines.index("USER llminfer") < [x.split()[0] for x in lines].index("ENTRYPOINT")
    check = json.loads(next(x for x in lines if x.startswith("HEALTHCHECK")).split("CMD ")[1])
    ast.parse(check[2])
    r = CliRunner().invoke(cli.app, [*entry[1:], "--help"], prog_name="llminfer")
    assert r.exit_code == 0

def test_modal_example_makes_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    "The function that Modal calls, with a stand-in for Modal: its app takes a request, from another origin."
    class Any_:
        def __getattr__(self, name: str) -> Any: return Any_()
        def __call__(self, *a: Any, **kw: Any) -> Any: return a[0] if a and callable(a[0]) and not kw else Any_()
    folder, _, _ = tiny()
    monkeypatch.setitem(__import__("sys").modules, "modal", Any_())
    monkeypatch.setenv("MODEL", str(folder))
    monkeypatch.setenv("ORIGINS", "https://page.example")
    space: dict[str, Any] = {"__file__": str(ROOT / "examples/modal_serve.py"), "__name__": "modal_serve"}
    exec(compile((ROOT / "examples/modal_serve.py").read_text(), "modal_serve.py", "exec"), space)
    async def go() -> None:
        app = space["serve"]()
        async with app.router.lifespan_context(app):
            status, head, text = await ask(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, origin="https://page.example")
            assert status == 200 and head["access-control-allow-origin"] == "https://page.example", text
    asyncio.run(go())
