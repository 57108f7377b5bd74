"""The GPU comparison's machinery on a CPU: two arms in child processes, the gate, the record, an arm that fails; and the floors."""
import json, os, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_shapes
from llminfer.model import ModelConfig

KEYS = {"model", "batch", "ours_tok_s", "vllm_tok_s", "ratio_to_vllm", "decode_ratio", "share_of_floor", "token_check", "ours_step_us", "vllm_step_us", "floor_us",
        "reasons", "seconds"}


def run(script, *args):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    r = subprocess.run([sys.executable, str(ROOT / "benchmarks" / script), "--device", "cpu", *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stdout + r.stderr


def test_a_run_on_a_cpu_and_a_missing_arm(tmp_path):
    run("gpu_vs_vllm.py", "--models", "tiny", "--arms", "ours,vllm,hf", "--batches", "1,3", "--prompt", "12", "--new", "6", "--pairs", "2", "--hf-pairs", "1", "--judged", "6", "--no-restart",
        "--extra", '{"ours": {"window_steps": 4}}', "--folder", str(tmp_path / "m"), "--out", str(tmp_path / "r.json"))
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["kind"] == "gpu_vs_vllm" and record["environment"]["torch"] and record["settings"]["extra"] == {"ours": {"window_steps": 4}}
    assert [(r["model"], r["batch"]) for r in record["rows"]] == [("tiny", 1), ("tiny", 3)]
    for r in record["rows"]:
        assert r.keys() >= KEYS and r["ours_tok_s"] > 0 and r["hf_tok_s"] > 0 and r["ours_step_us"] > 0 and r["vllm_tok_s"] is None and r["ratio_to_vllm"] is None
        assert "vllm" in r["reasons"]["vllm"] and set(r["reasons"]) == {"vllm"}
        assert {k: len(v["full"]) for k, v in r["seconds"].items() if k != "vllm"} == {"ours": 2, "hf": 1}
        check = r["token_check"]["ours"]
        assert check["status"] == "exact" and check["n_requests"] == 2 * r["batch"] and check["n_tokens"] == 6 * check["n_requests"] and check["tolerance"] < 1e-2
    arms = record["models"]["tiny"]["arms"]
    assert arms["ours"]["first_token_s"] >= arms["ours"]["loaded_s"] > 0 and arms["ours"]["path"]["runner"] == "TorchRunner"


def test_ladder_skips_a_rung_by_name(tmp_path):
    out = tmp_path / "l.json"
    run("ladder.py", "--model", "tiny", "--rungs", "stepped,windows,kernels", "--batches", "2", "--prompt", "12", "--new", "5", "--runs", "1", "--folder", str(tmp_path / "m"), "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert [r["rung"] for r in rows] == ["stepped", "windows", "kernels"] and rows[1]["times_below"] > 0 and "step_us" not in rows[2]
    assert "cannot run" in rows[2]["skipped"]


@pytest.mark.parametrize("name, batch, us", [("esme-214m", 1, 102), ("esme-214m", 256, 687), ("qwen3-0.6b", 64, 825), ("qwen3-8b", 1, 3531), ("qwen3-8b", 256, 6338)])
def test_floors_are_those_worked_out_by_hand(name, batch, us):
    assert round(gpu_shapes.floor_us(ModelConfig.from_hf(gpu_shapes.SHAPES[name]), batch, 320)) == us
