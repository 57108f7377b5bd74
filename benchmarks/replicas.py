"""Replicas on a Ray cluster of two nodes on one machine: hit rate by prefix and at random, a replica killed under load, the cost of the way.

    make ray                 # the environment, the tests, and this; or, with ray installed:
    OMP_NUM_THREADS=1 python benchmarks/replicas.py [--chats 24] [--turns 6] [--at-once 6] [--out benchmarks/records/replicas_cpu.json]

A tiny random model, so its answers are noise; what is counted is prompt tokens, those that a cache held, and how requests ended.
`one`: a single replica, the most that routing can reach. Greedy, each chat with its own questions and one system prompt for all.
Prediction, written before the first run: two replicas by prefix reach `one` within 3 points, at random they lose 10 and more.
"""
import argparse, asyncio, json, os, random, signal, statistics, subprocess, sys, tempfile, time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
import httpx
from llminfer.artifacts import environment
from llminfer.config import CacheConfig, EngineConfig
from llminfer.loading import make_tiny
from llminfer.routing import Route
from llminfer.scaling import Scale, build_app

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = "You are a patient teacher. Answer in plain words, say what you are sure of and what you are not, and stop when the point is made. "
PORT = 18_443


@contextmanager
def cluster():
    "Two nodes, two logical CPUs each."
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "GRPC_VERBOSITY": "ERROR", "RAY_raylet_start_wait_time_s": "60"}
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    for left in (2, 1, 0):       # on a busy machine Ray's own processes may be too late for each other
        try:
            c = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, object_store_memory=80_000_000, include_dashboard=False))
            c.add_node(num_cpus=2, object_store_memory=80_000_000)
            break
        except Exception:
            if not left: raise
    ray.init(address=c.address, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    try: yield c
    finally:
        serve.shutdown()
        ray.shutdown()
        c.shutdown()


def deploy(model, replicas, routing):
    "The application anew, caches cold; the facts of its replicas."
    from ray import serve
    serve.delete("llminfer")
    cfg = EngineConfig(model, device="cpu", seed=0, max_num_seqs=16, cache=CacheConfig(num_blocks=4000))
    serve.run(build_app(Scale(cfg, replicas, routing=routing, per_node=1)), name="llminfer")
    return facts()


def facts():
    from ray import serve
    return serve.get_deployment_handle("replica", app_name="llminfer").broadcast("info", Route()).results()


def chat(messages, n_tokens=8, **more): return {"messages": messages, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, **more}


async def conversations(client, chats, turns, at_once):
    "(prompt tokens, cached tokens, requests) of chats whose turns come in a mixed order."
    talks, total, gate = [[{"role": "system", "content": SYSTEM}] for _ in range(chats)], Counter(), asyncio.Semaphore(at_once)
    async def turn(i, n):
        talks[i].append({"role": "user", "content": f"Question {n} of reader {i}: what comes after {i * 17 + n}, and why that one and no other?"})
        async with gate: r = await client.post("/v1/chat/completions", json=chat(talks[i]))
        a = r.raise_for_status().json()
        talks[i].append({"role": "assistant", "content": a["choices"][0]["message"]["content"]})
        total.update(prompt=a["usage"]["prompt_tokens"], cached=a["usage"]["prompt_tokens_details"]["cached_tokens"], n=1)
    for n in range(turns): await asyncio.gather(*(turn(i, n) for i in random.Random(n).sample(range(chats), chats)))
    return total


async def samples(client, name):
    "A counter's samples by replica."
    out = Counter()
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith(name + "{"): out[line.split('replica="')[1].split('"')[0]] += float(line.rsplit(" ", 1)[1])
        elif line.startswith(name + " "): out[""] += float(line.rsplit(" ", 1)[1])
    return out


async def hit_rate(a, model, name, replicas, routing):
    "One row: the multi-turn load on a fresh application."
    where = {f["replica"]: f["node"] for f in await asyncio.to_thread(deploy, model, replicas, routing)}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as client:
        t = await conversations(client, a.chats, a.turns, a.at_once)
        done = await samples(client, "llminfer_request_success_total")
    nodes = Counter()
    for replica, n in done.items(): nodes[where[replica]] += int(n)
    names = {n: f"node {i}" for i, n in enumerate(sorted(set(where.values())))}
    return {"routing": name, "replicas": replicas, "requests": t["n"], "prompt_tokens": t["prompt"], "cached_tokens": t["cached"],
            "hit_rate": round(t["cached"] / t["prompt"], 4), "requests_of_nodes": {names[k]: v for k, v in sorted(nodes.items())}}


async def ending(client, body):
    "How a request ends: answered, broken (an error in OpenAI's shape), or lost."
    try:
        if not body.get("stream"):
            r = await client.post("/v1/chat/completions", json=body)
            return "answered" if r.status_code == 200 else "broken" if "error" in r.json() else "lost"
        async with client.stream("POST", "/v1/chat/completions", json=body) as r: text = "".join([t async for t in r.aiter_text()])
        if '"error"' in text: return "broken"
        return "answered" if text.rstrip().endswith("[DONE]") and '"finish_reason":"length"' in text else "lost"
    except (httpx.HTTPError, ValueError): return "lost"


async def kill(a, model):
    "A replica's process gets SIGKILL while requests and streams run through it."
    pids = {f["replica"]: f["pid"] for f in await asyncio.to_thread(deploy, model, 2, "prefix")}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=180, limits=httpx.Limits(max_connections=64)) as client:
        bodies = [chat([{"role": "user", "content": f"{i}: " + "tell me a long story about this and that. " * 4}], 300, stream=i % 2 == 0) for i in range(a.requests)]
        gate, done = asyncio.Semaphore(12), Counter()
        async def one(b):
            async with gate: done[await ending(client, b)] += 1
        async def strike():
            "When a third has ended: the replica that runs the most, at least three."
            while done.total() < a.requests // 3: await asyncio.sleep(0.02)
            while True:
                who, n = (await samples(client, "llminfer_num_requests_running")).most_common(1)[0]
                if n >= 3 or done.total() == a.requests: break
            os.kill(pids[who], signal.SIGKILL)
            return who
        victim, *_ = await asyncio.gather(strike(), *map(one, bodies))
        again, end = (await samples(client, "llminfer_door_retries_total"))[""], time.monotonic() + 120
        while True:
            r = (await client.get("/ready")).json()
            n = sum(s == "ready" for s in r["replicas"].values())
            if n == 2 and victim not in r["replicas"] or time.monotonic() > end: break
            await asyncio.sleep(1)
        later = Counter([await ending(client, b) for b in bodies[:20]])
    return {"requests": a.requests, "streams": (a.requests + 1) // 2, "answered": done["answered"], "broken": done["broken"], "lost": done["lost"], "again": int(again),
            "later": 20, "later_answered": later["answered"], "replicas_after": n}


async def cost(direct, through, n=60):
    "Milliseconds of a request for one token at the app itself and through replicas, taken in turn: medians of n."
    took = {direct: [], through: []}
    async with httpx.AsyncClient(timeout=120) as client:
        for i in range(n + 5):
            for url in took:
                t = time.perf_counter()
                (await client.post(url + "/v1/chat/completions", json=chat([{"role": "user", "content": "hi"}], 1))).raise_for_status()
                if i >= 5: took[url].append(time.perf_counter() - t)
    return {"direct_ms": round(statistics.median(took[direct]) * 1e3, 2), "through_ms": round(statistics.median(took[through]) * 1e3, 2)}


@contextmanager
def served(*args, env=None):
    p = subprocess.Popen([sys.executable, "-m", "llminfer.cli", "serve", "--device", "cpu", "--port", "0", "--log-level", "warning", *args], stdout=subprocess.PIPE, text=True,
                         env=os.environ | (env or {}))
    try:
        url = ""
        for line in p.stdout:
            if line.startswith("Serving"): url = line.split()[-1]
            if line.startswith("Ready"): break
        yield url
    finally:
        p.terminate()
        p.wait(60)


def costs(c, model):
    "Both ways, each in turn with a server without replicas."
    from ray import serve
    with served("-m", model) as direct:
        deploy(model, 2, "prefix")
        ingress = asyncio.run(cost(direct, f"http://127.0.0.1:{PORT}"))
        serve.delete("llminfer")
        with served("-m", model, "--replicas", "2", env={"RAY_ADDRESS": c.address}) as url: return {"door": asyncio.run(cost(direct, url)), "ingress": ingress}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--chats", type=int, default=24)
    ap.add_argument("--turns", type=int, default=6)
    ap.add_argument("--at-once", type=int, default=6)
    ap.add_argument("--parts", default="routing,kill,cost", help="others are kept as the record has them")
    ap.add_argument("--requests", type=int, default=48, help="of the load in which a replica is killed")
    ap.add_argument("--out", default=str(ROOT / "benchmarks/records/replicas_cpu.json"))
    a = ap.parse_args()
    out = Path(a.out)
    record = json.loads(out.read_text()) if out.exists() and a.parts != "routing,kill,cost" else {}
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny(Path(folder) / "tiny", seed=0, max_position_embeddings=4096))
        with cluster() as c:
            if "routing" in a.parts: record["routing"] = [asyncio.run(hit_rate(a, model, *x)) for x in (("one", 1, "prefix"), ("random", 2, "random"), ("prefix", 2, "prefix"))]
            if "kill" in a.parts: record["kill"] = asyncio.run(kill(a, model))
            if "cost" in a.parts: record["cost"] = costs(c, model)
    import ray
    record |= {"kind": "replicas", "model": "tiny random llama, fp32", "nodes": 2, "replicas": 2, "ray": ray.__version__,
               "workload": {"chats": a.chats, "turns": a.turns, "at_once": a.at_once, "new_tokens": 8}, "environment": environment()}
    rows, killed = record["routing"], record["kill"]
    for r in (*rows, killed): print(r)
    print(record["cost"])
    out.write_text(json.dumps(record, indent=1) + "\n")
    rate = {r["routing"]: r["hit_rate"] for r in rows}
    ok = rate["prefix"] > rate["random"] and len(rows[2]["requests_of_nodes"]) == 2 and not killed["lost"] and killed["again"] + killed["broken"] > 0 and killed["later_answered"] == killed["later"] and killed["replicas_after"] == 2
    if not ok: raise SystemExit("what must hold does not: see the record")


if __name__ == "__main__": main()
