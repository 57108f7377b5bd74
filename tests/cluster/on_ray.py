"""Replicas on a real Ray cluster: two nodes on this machine, one replica on each. `make ray` runs it in .venv-ray (Ray has 240 MB, too much for `make test`).

| what must hold | test |
| --- | --- |
| both nodes serve; streams pass; a client that leaves ends the generation; one /metrics of all | test_both_nodes_serve |
| a replica killed under load: nothing is lost, later requests are answered, the replica comes back | test_a_killed_replica_is_survived |
| `llminfer serve --replicas` joins the cluster, drains, leaves it | test_serve_joins_a_cluster |
| a model that cannot be read is one line | test_a_model_that_cannot_be_read_is_one_line |
| examples/kuberay_rayservice.yaml is a configuration that Ray takes | test_kuberay_config_is_one_of_rays |
"""
from __future__ import annotations
import asyncio, json, os, signal, sys, time
from collections import Counter
from pathlib import Path
from typing import Any
import httpx, pytest, yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools"), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = str(ROOT)          # of the replicas' processes
import replicas as bench
from llminfer.loading import make_tiny
from support.served import popen, served

URL = f"http://127.0.0.1:{bench.PORT}"

@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str: return str(make_tiny(tmp_path_factory.mktemp("ray") / "tiny", seed=0, max_position_embeddings=4096))

@pytest.fixture(scope="module")
def cluster() -> Any:
    with bench.cluster() as c: yield c

def test_both_nodes_serve(cluster: Any, model: str) -> None:
    facts = bench.deploy(model, 2, "prefix")
    assert len({f["node"] for f in facts}) == 2 and {f["model_name"] if "model_name" in f else model for f in facts} == {model}
    async def go() -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=120) as client:
            bodies = [bench.chat([{"role": "user", "content": f"{i} " * 60}], 4, stream=i % 2 == 0) for i in range(16)]
            assert Counter(await asyncio.gather(*(bench.ending(client, b) for b in bodies))) == {"answered": 16}
            done = await bench.samples(client, "llminfer_request_success_total")
            assert done.keys() == {f["replica"] for f in facts} and min(done.values()) > 0 and sum(done.values()) == 16
            async with client.stream("POST", "/v1/chat/completions", json=bench.chat([{"role": "user", "content": "go on"}], 3000, stream=True)) as r:
                async for _ in r.aiter_text(): break                                # and leaves
            end = time.monotonic() + 30
            while (await client.get("/health")).json()["running"]:
                assert time.monotonic() < end, "the generation goes on without its client"
                await asyncio.sleep(0.1)
            assert sum((await bench.samples(client, "llminfer_disconnects_total")).values()) == 1
            assert (await client.post("/v1/chat/completions", json={"messages": []})).json()["error"]["type"] == "invalid_request_error"
    asyncio.run(go())

def test_a_killed_replica_is_survived(cluster: Any, model: str) -> None:
    class A: requests = 30
    k = asyncio.run(bench.kill(A, model))
    assert k["lost"] == 0 and k["answered"] + k["broken"] == 30 and k["later_answered"] == k["later"] and k["replicas_after"] == 2, k
    assert k["again"] + k["broken"] > 0, "the kill came when nothing ran"

def test_serve_joins_a_cluster(cluster: Any, model: str) -> None:
    from ray import serve
    serve.delete("llminfer")
    with served("-m", model, "--device", "cpu", "--replicas", 2, "--served-model-name", "a", env={"RAY_ADDRESS": cluster.address, "LLMINFER_API_KEY": "k"}) as s:
        assert "replicas" in "\n".join(s.lines) and s.ask("/v1/models")[0] == 401 and s.ask("/ready")[0] == 200
        key: dict[str, Any] = {"Authorization": "Bearer k"}
        assert [m["id"] for m in s.ask("/v1/models", **key)[1]["data"]] == ["a"]
        assert s.ask("/v1/chat/completions", bench.chat([{"role": "user", "content": "hi"}], 3), **key)[1]["usage"]["completion_tokens"] == 3
        assert s.end(signal.SIGTERM, 60) == 0
    assert "llminfer" not in serve.status().applications

def test_a_model_that_cannot_be_read_is_one_line(cluster: Any) -> None:
    p = popen("--port", 0, "-m", "/nowhere/model", "--device", "cpu", "--replicas", 2, env={"RAY_ADDRESS": cluster.address})
    out, err = p.communicate(timeout=120)
    assert p.returncode == 2 and out.count("\n") == 1 and err.count("\n") == 1 and err.startswith("error: ") and "/nowhere/model" in err, err
    p = popen("--port", 0, "-m", "/nowhere/model", "--device", "cpu", "--replicas", 50, env={"RAY_ADDRESS": cluster.address})
    _, err = p.communicate(timeout=120)
    assert p.returncode == 2 and err.startswith("error: --replicas: 50 with 1 CPUs each need 50 CPUs, and the cluster has 4"), err

def test_kuberay_config_is_one_of_rays() -> None:
    from ray.serve.schema import ServeDeploySchema
    doc = yaml.safe_load((ROOT / "examples/kuberay_rayservice.yaml").read_text())
    d = ServeDeploySchema(**yaml.safe_load(doc["spec"]["serveConfigV2"]))
    assert d.applications[0].args["replicas"] == 2 and json.dumps(d.http_options.model_dump())
