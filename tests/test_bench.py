"""Benchmarks: true counts, a gate before every speed, arms that die, artifacts that outlive faults; and the commands."""
import csv, json, os, re, signal, subprocess, sys, threading, time
import jsonschema
import numpy as np
import pytest
from llminfer import benchmark as bm, cli_bench
from llminfer.artifacts import FIRST, RunMetrics, BenchmarkResult, save_all, write_file
from llminfer.benchmark import BackendComparison, Benchmarker, BenchSettings, ChildArm, LocalArm, make_requests, paired_ratio, run_arms, timed_run
from llminfer.config import ConfigError, EngineConfig
from llminfer.loading import make_tiny
from llminfer.load_client import mock_server
from llminfer.request import GenerationRequest
from house import ROOT
from support.engines import clean, engine_around, forced_engine, forced_prompt, tiny, tiny_engine  # noqa: F401
from typer.testing import CliRunner
from llminfer.cli import app

SCHEMA = json.loads((ROOT / "benchmarks/records/schema/benchmark.json").read_text())
SMALL = dict(num_runs=2, warmup_runs=1, prompt_type="short", max_new_tokens=6)

@pytest.fixture(scope="session")
def folder(tmp_path_factory): return str(make_tiny(tmp_path_factory.mktemp("bench") / "tiny", seed=1))

def call(*args): return CliRunner().invoke(app, [str(a) for a in args], prog_name="llminfer")

def ok(*args):
    r = call(*args)
    assert r.exit_code == 0, r.output
    return r.stdout

def refused(*args, words=()):
    "One line on stderr, nothing on stdout."
    r = call(*args)
    assert r.exit_code == 2 and r.stdout == "" and r.stderr.startswith("error: ") and r.stderr.count("\n") == 1, r.output
    for w in words: assert w in r.stderr, (w, r.stderr)

def flags(folder): return ("--model", folder, "--device", "cpu", "--threads", 1, "--max-model-len", 128)

def engine_of(folder, **kw):
    from llminfer.engine import InferenceEngine
    return InferenceEngine(EngineConfig(folder, device="cpu", max_model_len=128, seed=0, num_threads=1, **kw))

# --- measuring ------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("more", [{}, {"use_continuous_batching": True}, {"temperature": 0.9}, {"request_rate": 400.0, "burstiness": 0.5}, {"prompt_type": "mixed"}])
def test_counts_times_and_verdicts(folder, more):
    with engine_of(folder) as e: r = Benchmarker(e).run([1, 3], **SMALL | more, limits={"ttft": 1e6})
    for b, m in r.metrics_by_batch.items():
        n = 2 * b * (4 if "use_continuous_batching" in more else 1)
        assert (m.n_requests, m.n_failed, m.n_good, m.cached_tokens, m.token_check["status"]) == (n, 0, n, 0, "exact"), m.token_check
        assert len(m.ttfts_ms) == len(m.latencies_ms) == n and len(m.wall_ms) == 2 and m.shown_tps == m.mean_throughput_tps > 0
        if more.get("prompt_type") != "mixed": assert m.output_tokens == 6 * n and m.prompt_tokens == 16 * n
        assert all(t <= w for t, w in zip(m.ttfts_ms, m.latencies_ms)) and m.p50_itl_ms <= m.p99_itl_ms and m.rss_mb > 10
    assert r.settings["num_runs"] == 2 and r.environment["threads"] and r.engine["dtype"] == "float32" and r.batch_sizes == [1, 3]

def test_prompts_are_new_in_each_round_and_the_same_for_each_backend():
    with tiny_engine() as e:
        e.load()
        a, b, again = (make_requests(e.backend, BenchSettings(prompt_type="short", max_new_tokens=4), 3, i) for i in (0, 1, 0))
    ids = lambda rs: [r.prompt_token_ids for r in rs]
    assert ids(a) == ids(again) != ids(b) and len({tuple(x) for x in ids(a) + ids(b)}) == 6 and {len(x) for x in ids(a)} == {16}

def test_early_ends_are_counted_as_they_are():
    e = forced_engine(["ab", "abcdefgh"])
    e.load()
    requests = [GenerationRequest(prompt_token_ids=forced_prompt(i), max_new_tokens=20, temperature=0.0) for i in range(2)]
    times, seconds, _ = timed_run(e.backend, requests, np.zeros(2), 2)
    assert [t.output_tokens for t in times] == [len(t.token_ids) for t in times] and times[0].output_tokens < times[1].output_tokens < 20
    assert [t.finish_reason for t in times] == ["stop", "stop"] and seconds > 0 and sum(times[1].counts) == times[1].output_tokens

def test_at_most_so_many_are_open():
    with tiny_engine(max_num_seqs=8) as e:
        e.load()
        most = [0]
        loop = e.backend.loop
        def watch():
            while alive: most[0] = max(most[0], len(loop.handles))
        alive = [1]
        t = threading.Thread(target=watch)
        t.start()
        try: times, _, _ = timed_run(e.backend, make_requests(e.backend, BenchSettings(prompt_type="short", max_new_tokens=8, continuous=True), 2, 0), np.zeros(8), 2)
        finally: alive.clear(); t.join()
    assert len(times) == 8 and 1 <= most[0] <= 2 and times[7].sent > times[0].end

class Wrong(LocalArm):
    def run(self, s, batch, round):
        d = super().run(s, batch, round)
        ids = d["requests"][-1].token_ids
        ids[-1] = (ids[-1] + 7) % 200
        return d

def test_one_wrong_token_and_no_speed_is_shown(folder, capsys):
    with engine_of(folder) as e: r = run_arms([Wrong(e)], BenchSettings([1, 2], 2, 0, "short", 6))[0]
    for m in r.metrics_by_batch.values():
        assert m.token_check["status"] == "failed" and m.shown_tps is None and m.mean_throughput_tps > 0 and m.token_check["explained"][0]["position"] == 5
    r.print_summary()
    assert capsys.readouterr().out.count("withheld") == 2
    assert all(row["shown_tps"] is None and row["token_check"] == "failed" for row in r.to_rows())
    from llminfer.plots import suite
    assert "throughput" not in suite(bm.series_of([r]))

def test_who_cannot_be_judged_has_no_speed(folder):
    with engine_of(folder) as e: r = Benchmarker(e).run([1], **SMALL, judged=0)
    assert r.metrics_by_batch[1].token_check["status"] == "review" and r.metrics_by_batch[1].shown_tps is None

# --- arms in processes ----------------------------------------------------------------------------------------------------------------

def test_backends_in_turns_and_one_that_is_missing(folder, tmp_path, capsys):
    c = BackendComparison(folder, ["paged", "eager", "vllm"], device="cpu", dtype="float32", num_threads=1, max_model_len=128)
    order = []
    results = c.run([1, 2], 2, 5, warmup_runs=1, prompt_type="short", tell=lambda done, total, what: order.append(what))
    assert order == ["paged", "eager"] * 2 + ["eager", "paged"] + ["paged", "eager"] * 2 + ["eager", "paged"]
    paged, eager, vllm = results
    assert "needs vLLM" in vllm.reason and not vllm.metrics_by_batch and not paged.reason and not eager.reason
    for r in (paged, eager): assert {(m.token_check["status"], m.output_tokens) for m in r.metrics_by_batch.values()} == {("exact", 10), ("exact", 20)}
    assert paged_ids(paged) == paged_ids(eager) and paired_ratio(paged, eager, 2) > 0 and paged.environment["host"] == eager.environment["host"]
    c.print_table(results)
    out = capsys.readouterr().out
    assert "paged Tok/s" in out and "vllm: ConfigError" in out
    made = c.plot_suite(results, str(tmp_path / "p"))
    assert {"dashboard", "throughput", "latency", "ttft", "html"} <= made.keys() and all(os.path.getsize(p) > 5000 for k, p in made.items() if k != "html")
    bm.save_comparison_json(results, tmp_path / "c.json")
    bm.save_comparison_csv(results, tmp_path / "c.csv")
    jsonschema.validate(json.loads((tmp_path / "c.json").read_text()), SCHEMA)
    rows = list(csv.DictReader((tmp_path / "c.csv").open()))
    assert list(rows[0])[:12] == ["backend", "model", "quant_mode", "batch_size", "prompt_type", *FIRST[:6], "gpu_memory_mb"] and len(rows) == 5 and rows[4]["reason"]
    assert json.loads((tmp_path / "c.environment.json").read_text()).keys() >= {"paged", "eager", "vllm"}

def paged_ids(r): return [m.prompt_tokens for m in r.metrics_by_batch.values()]

def test_a_child_that_dies_or_hangs_keeps_what_it_gave(folder):
    arm = ChildArm(EngineConfig(folder, device="cpu", num_threads=1, max_model_len=128), timeout_s=120)
    def kill(done, total, what):
        if done == 3: os.kill(arm.proc.pid, signal.SIGKILL)
    r = run_arms([arm], BenchSettings([1, 2], 2, 0, "short", 4), kill)[0]
    assert "its process ended, exit code -9" in r.reason and r.batch_sizes == [1, 2] and [len(m.wall_ms) for m in r.metrics_by_batch.values()] == [2, 1]
    assert {m.token_check["status"] for m in r.metrics_by_batch.values()} == {"exact"}
    slow = ChildArm(EngineConfig(folder, device="cpu"), timeout_s=0.01)
    assert "no answer in 0 s" in run_arms([slow], BenchSettings([1], 1, 0, "short", 4))[0].reason and slow.proc.poll() is not None

def test_settings_are_checked_before_anything_is_loaded():
    for kw, words in (({"batch_sizes": [0]}, "batch_sizes"), ({"num_runs": 0}, "num_runs"), ({"prompt_type": "x"}, "prompt_type"), ({"request_rate": 0.0}, "request_rate"),
            ({"temperature": 3.0}, "temperature"), ({"max_new_tokens": 0}, "max_new_tokens")):
        with pytest.raises(ConfigError, match=words): BenchSettings(**kw).validate()
    with pytest.raises(ConfigError, match="backends must be among"): BackendComparison("demo", ["fast"])

# --- artifacts ------------------------------------------------------------------------------------------------------------------------

def test_disk_full_and_folders_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    r = BenchmarkResult("paged", "m", "none", {1: RunMetrics(1, "short", [1.0], [2.0])})
    written, problems = save_all([(tmp_path / "a/b.json", r.save_json), (tmp_path / "file/c.csv", r.save_csv)])
    assert written == [str(tmp_path / "a/b.json")] and "kept in " in problems[0] and os.path.exists(problems[0].split("kept in ")[1])
    write_file(tmp_path / "old.json", "old")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"): write_file(tmp_path / "old.json", "new")
    assert (tmp_path / "old.json").read_text() == "old" and sorted(p.name for p in tmp_path.iterdir()) == ["a", "file", "old.json"]
    written, problems = save_all([(tmp_path / "x.json", r.save_json)])
    assert not written and problems == [f"{tmp_path / 'x.json'}: No space left on device"]

def test_empty_results_and_brackets(tmp_path, capsys):
    r = BenchmarkResult("eager", "org/model [INST]", "none", reason="did not load")
    bm.save_comparison_csv([r], tmp_path / "x.csv")
    bm.save_comparison_csv([BenchmarkResult("eager", "m", "none")], tmp_path / "y.csv")
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 2 and (tmp_path / "y.csv").read_text() == ""
    r.print_summary()
    assert "[INST] [eager / none]" in capsys.readouterr().out and RunMetrics(1, "short").p99_latency_ms == 0.0
    with pytest.raises(ConfigError, match="nothing to plot"): r.plot(str(tmp_path / "z.png"))

# --- commands -------------------------------------------------------------------------------------------------------------------------

def test_bench_writes_everything(folder, tmp_path):
    out = ok("bench", *flags(folder), "--batch-sizes", "1,2", "--runs", 1, "--warmup", 0, "--max-tokens", 4, "--prompt-type", "short", "--plot", tmp_path / "one.png",
        "--plot-suite-dir", tmp_path / "suite", "--artifacts-dir", tmp_path / "a", "--json-out", tmp_path / "j.json", "--csv-out", tmp_path / "c.csv")
    assert "[paged / none]" in out and out.count("exact") == 2 and out.count("saved ") == 6
    for f in ("a/benchmark.json", "j.json"): jsonschema.validate(json.loads((tmp_path / f).read_text()), SCHEMA)
    assert {f"benchmark_{k}.png" for k in ("dashboard", "throughput", "latency", "ttft")} <= {p.name for p in (tmp_path / "suite").iterdir()}
    assert (tmp_path / "a/benchmark.environment.json").exists() and "https://" not in (tmp_path / "suite/benchmark.html").read_text().split("<body>")[0]

def test_bench_ends_with_1_if_something_could_not_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("x")
    r = call("bench", *flags(folder), "--batch-sizes", "1", "--runs", 1, "--warmup", 0, "--max-tokens", 2, "--prompt-type", "short", "--json", "--json-out", tmp_path / "file/x.json")
    assert r.exit_code == 1 and json.loads(r.stdout)["result"]["metrics"]["1"]["output_tokens"] == 2 and "kept in " in r.stderr

def test_bench_refuses_in_one_line(folder):
    for args, words in ((["--batch-sizes", "1,x"], "--batch-sizes"), (["--runs", "0"], "--runs"), (["--goodput", "speed:1"], "goodput"), (["--url", "ftp://x"], "ftp"), (["--prompt-type", "huge"], "--prompt-type"),
            (["--url", "http://127.0.0.1:9/v1"], "is it running"), (["--url", "http://x", "--endpoint", "images"], "--endpoint"), (["--url", "http://x", "--extra-body", "[1]"], "JSON object")):
        refused("bench", *flags(folder), *args, words=[words])
    refused("compare", "--backends", "fast", words=["fast"])

def test_bench_url_sweeps(tmp_path):
    with mock_server(10, 2) as mock:
        out = ok("bench", "--url", mock.url, "--num-prompts", 6, "--random-output-len", 4, "--max-concurrency", "1,3", "--warmup", 0, "--artifacts-dir", tmp_path, "--plot-suite-dir", tmp_path, "--request-rate", 500, "--goodput", "ttft:60000", "tpot:60000")
    assert "Concurrency" in out and [(x["max_concurrency"], x["goodput_limits"]) for x in json.loads((tmp_path / "load.json").read_text())["runs"]] == [(1, both := {"ttft": 6e4, "tpot": 6e4}), (3, both)]
    assert len(list(csv.DictReader((tmp_path / "load.csv").open()))) == 2 and (tmp_path / "load.html").exists() and (tmp_path / "load.png").exists()
    with mock_server(1, 1, fail_after=2) as mock:
        r = call("bench", "--url", mock.url, "--num-prompts", 4, "--random-output-len", 2, "--max-concurrency", "1", "--warmup", 0, "--json", "--json-out", tmp_path / "part.json")
    assert r.exit_code == 1 and json.loads(r.stdout)["completed"] == 2 and "2 failed" in r.stderr
    assert (d := json.loads((tmp_path / "part.json").read_text()))["failed"] == 2 and d["total_output_tokens"] == 4 and sum(d["errors_by_kind"].values()) == 2

def test_a_server_process_that_dies_in_mid_run_leaves_what_it_gave(tmp_path):
    code = "import sys, threading\nfrom llminfer.load_client import mock_server\nwith mock_server(20, 5) as m:\n  print(m.url, flush=True)\n  threading.Event().wait(60)"
    p = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert p.stdout
        url = p.stdout.readline().strip()
        threading.Timer(1.0, p.kill).start()
        r = call("bench", "--url", url, "--num-prompts", 3000, "--random-output-len", 4, "--max-concurrency", "2", "--warmup", 0, "--json", "--artifacts-dir", tmp_path)
    finally: p.kill(), p.wait()
    d = json.loads((tmp_path / "load.json").read_text())
    assert r.exit_code == 1 and 0 < d["completed"] < 3000 and d["completed"] + d["failed"] == 3000 and d["total_output_tokens"] == 4 * d["completed"]
    assert "failed: " in r.stderr and any(k.startswith(("ConnectionRefusedError", "ConnectionResetError", "the stream broke off", "the server closed")) for k in d["errors_by_kind"])

def test_compare_prints_reasons_and_ends_with_1(folder, tmp_path):
    r = call("compare", *flags(folder), "--backends", "paged,vllm", "--batch-sizes", "1", "--runs", 1, "--max-tokens", 3, "--prompt-type", "short", "--artifacts-dir", tmp_path)
    assert r.exit_code == 1 and "vllm: ConfigError" in r.stdout and {p.name for p in tmp_path.iterdir()} == {"comparison.json", "comparison.csv", "comparison.environment.json"}

def test_batch_answers_every_line_once(folder, tmp_path):
    src, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"model": "gpt-x", "prompt": f"text {i}"} | body} for i in range(12)]
    lines += [{"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]} | body}, {"custom_id": "r0", "url": "/v1/completions", "body": {}},
        {"custom_id": "s", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}}, {"custom_id": "u", "url": "/v1/images", "body": {}}, {"custom_id": "bad", "url": "/v1/completions", "body": {"prompt": 5}}]
    src.write_text("\n".join(map(json.dumps, lines)) + "\n{\n", encoding="utf-8")
    r = call("batch", src, "-o", out, *flags(folder), "--json")
    assert r.exit_code == 1, r.output
    told = json.loads(r.stdout)
    got = [json.loads(x) for x in out.read_text().splitlines()]
    assert (told["total"], told["completed"], told["failed"], told["output_tokens"]) == (18, 13, 5, 39) and len(got) == 18 and len({d["id"] for d in got}) == 18
    good = {d["custom_id"]: d for d in got if d["response"] and d["response"]["status_code"] == 200}
    assert good.keys() == {*(f"r{i}" for i in range(12)), "chat"} and all(d["error"] is None and d["response"]["body"]["usage"]["completion_tokens"] == 3 for d in good.values())
    assert good["r3"]["response"]["body"]["model"] == "gpt-x" and next(d for d in got if d["custom_id"] == "bad")["response"]["status_code"] == 400
    refused("batch", src, "-o", out, *flags(folder), words=["exists"])
    out.write_text("".join(json.dumps(d) + "\n" for d in got if d["custom_id"] in good and d["custom_id"] != "r7") + '{"cut')
    src.write_text("\n".join(map(json.dumps, lines[:13])))
    again = json.loads(ok("batch", src, "-o", out, *flags(folder), "--json", "--resume"))
    assert (again["kept"], again["completed"], again["failed"]) == (12, 1, 0)

def test_batch_killed_in_the_middle_goes_on(folder, tmp_path):
    src, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    src.write_text("\n".join(json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": {"prompt": f"x {i}", "max_tokens": 60, "temperature": 0, "ignore_eos": True}}) for i in range(60)))
    argv = [sys.executable, "-m", "llminfer.cli", "batch", str(src), "-o", str(out), *map(str, flags(folder)), "--concurrency", "2"]
    p = subprocess.Popen(argv, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    end = time.monotonic() + 60
    while not (out.exists() and out.read_text().count("\n") > 3) and time.monotonic() < end: time.sleep(0.02)
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=60)
    n = out.read_text().count("\n")
    assert p.returncode == 130 and "Traceback" not in err and 3 < n < 60, err
    told = json.loads(ok("batch", src, "-o", out, *flags(folder), "--json", "--resume"))
    assert told["kept"] == n and told["completed"] == 60 - n and {json.loads(x)["custom_id"] for x in out.read_text().splitlines()} == {str(i) for i in range(60)}

def test_judge_says_its_verdict(tmp_path):
    home = ROOT / "benchmarks/registered"
    assert re.search("verdict: kept", ok("judge", home / "cpu_batch_8.toml"))
    r = call("judge", home / "cpu_llamacpp_b1.toml", "--json")
    assert r.exit_code == 1 and json.loads(r.stdout)["verdict"] == "regressed"
    record = json.loads((ROOT / "benchmarks/records/cpu_vs_hf.json").read_text())
    record["rows"][1]["tok_s"]["llminfer"] *= 2
    (tmp_path / "r.json").write_text(json.dumps(record))
    refused("judge", home / "cpu_batch_8.toml", tmp_path / "r.json", words=["contradicts itself", "tok_s"])
    two, rule = tmp_path / "two.json", tmp_path / "two.toml"
    rule.write_text((home / "cpu_batch_8.toml").read_text() + "\nmachines = 2\n")
    record = json.loads((ROOT / "benchmarks/records/cpu_vs_hf.json").read_text())
    for host, verdict in (("another", "kept"), (None, "undecided")):
        record["environment"] |= {"host": host} if host else {}
        if not host: record["environment"].pop("host")
        two.write_text(json.dumps(record))
        r = call("judge", rule, ROOT / "benchmarks/records/cpu_vs_hf.json", two, "--json")
        assert (json.loads(r.stdout)["verdict"], r.exit_code) == (verdict, int(verdict != "kept")), r.output
    (tmp_path / "bad.toml").write_text("name = 1")
    refused("judge", tmp_path / "bad.toml", words=["bad.toml", "missing"])
    assert cli_bench.numbers("batch_sizes", " 4, 2 ") == [4, 2]
