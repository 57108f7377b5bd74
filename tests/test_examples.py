"""The examples run as a reader would start them, on a tiny model; their heavy parts are behind flags."""
import json, os, re, signal, subprocess, sys
import pytest
from house import ROOT
from llminfer.loading import make_tiny

ENV = {k: v for k, v in os.environ.items() if k != "LLMINFER_API_KEY"} | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

@pytest.fixture(scope="session")
def tiny(tmp_path_factory): return str(make_tiny(tmp_path_factory.mktemp("examples") / "tiny", seed=3))

def run(name, *args, code=0):
    r = subprocess.run([sys.executable, str(ROOT / "examples" / name), *map(str, args)], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=180)
    assert r.returncode == code, r.stdout + r.stderr
    return r.stdout if code == 0 else r.stdout + r.stderr

def test_full_demo(tiny, tmp_path):
    out = run("full_demo.py", "--model", tiny, "--device", "cpu", "--max-new-tokens", 6, "--benchmark", "--batch-sizes", "1,2", "--runs", 1, "--outdir", tmp_path)
    hits = re.findall(r"cache_hit=(\w+): (\d+) of (\d+)", out)
    assert [h[0] for h in hits] == ["False", "True"] and int(hits[1][1]) > 0.8 * int(hits[1][2])
    assert out.count("exact") == 2 and {"benchmark_dashboard.png", "benchmark_throughput.png", "benchmark_ttft.png"} <= {p.name for p in tmp_path.iterdir()}

def test_advanced_features(tiny, tmp_path):
    out = run("advanced_features.py", "--model", tiny, "--device", "cpu", "--max-new-tokens", 6, "--outdir", tmp_path)
    assert "to the full length" in out and "(length, 6 tokens)" in out and len(re.findall(r"^  \d+ tokens: \[", out, re.M)) == 3
    d = json.loads((tmp_path / "benchmark.json").read_text())
    assert d["schema_version"] == "2.0" and {m["token_check"]["status"] for m in d["result"]["metrics"].values()} == {"exact"}

def test_benchmark_vs_vllm_says_why_there_is_no_vllm(tiny, tmp_path):
    small = ("--model", tiny, "--device", "cpu", "--max-model-len", 128, "--prompt-type", "short", "--batch-sizes", "1,2", "--runs", 2, "--max-new-tokens", 4)
    out = run("benchmark_vs_vllm.py", *small, "--backends", "vllm,paged", "--outdir", tmp_path / "out")
    assert "paged Tok/s" in out and "vllm: ConfigError: the vllm backend needs vLLM" in out
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert files >= {"comparison.json", "comparison.csv", "comparison.environment.json", "comparison.png", "comparison_dashboard.png", "comparison_latency.png"}
    assert "temperature" in json.loads((tmp_path / "out/comparison.json").read_text())["results"][0]["settings"]
    assert "pipeline_parallel_size" in run("benchmark_vs_vllm.py", "--pp-size", 0, code=2)

def test_server_and_client(tiny):
    p = subprocess.Popen([sys.executable, str(ROOT / "examples/run_server.py"), "--model", tiny, "--device", "cpu", "--port", "0", "--max-model-len", "256"], cwd=ROOT, env=ENV,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert p.stdout
        line = p.stdout.readline()
        url = re.search(r"at (http\S+)", line)
        assert url, line
        out = run("openai_api_client.py", "hello", "--base-url", url[1], "--max-tokens", 8)
        usages = re.findall(r"usage: (\{.*\})", out)
        assert len(usages) == 2 and usages[0].split("total")[0] == usages[1].split("total")[0] and "stream: " in out
        p.send_signal(signal.SIGINT)
        p.wait(60)
    finally:
        p.kill()
        p.wait()
    assert "error: http://127.0.0.1:9/v1" in run("openai_api_client.py", "--base-url", "http://127.0.0.1:9/v1", code=1)

def test_a_draft_head_is_trained_and_drafts(tiny, tmp_path):
    from llminfer import EngineConfig, InferenceEngine
    out = run("train_draft_head.py", "--model", tiny, "--out", tmp_path / "head", "--texts", 40, "--tokens", 12, "--words", 300, "--minutes", 0.15)
    facts = json.loads((tmp_path / "head/config.json").read_text())
    assert "before: [0.0" in out and facts["texts"] == 40 and facts["texts_seen"] >= 4 and len(facts["acceptance"]) == 3
    texts = {}
    for head in (None, str(tmp_path / "head")):
        e = InferenceEngine(EngineConfig(model_name=tiny, device="cpu", max_model_len=128, speculative_num_assistant_tokens=3 if head else 0, assistant_model_name=head,
            speculative_confidence_threshold=0.0)).load()
        texts[head] = e.run("Explain the moon to a child.", temperature=0.0, max_new_tokens=20, ignore_eos=True)
        e.unload()
    r = texts.pop(str(tmp_path / "head"))
    assert r.token_ids == texts[None].token_ids and r.stats.draft_tokens >= 20
