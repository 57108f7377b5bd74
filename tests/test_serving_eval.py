"""The serving evaluation on a tiny model: every workload, every row believed, and its record holds."""
import json, os, subprocess, sys
import jsonschema
from house import ROOT
from llminfer.loading import make_tiny
from llminfer.registered import check_record

def test_every_workload_is_measured_and_judged(tmp_path):
    out, env = tmp_path / "r.json", os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, str(ROOT / "benchmarks/serving_eval.py"), "--model", str(make_tiny(tmp_path / "tiny", seed=3)), "--judged", "2", "--out", str(out)]
    r = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert r.returncode == 0, r.stdout + r.stderr
    record = json.loads(out.read_text())
    jsonschema.validate(record, json.loads((ROOT / "benchmarks/records/schema/serving_eval.json").read_text()))
    assert check_record(record) == []
    rows = {(x["workload"], x["variant"]): x for x in record["rows"]}
    assert {w for w, _ in rows} == {"one", "batch", "sampled", "burst", "siblings", "pressure"} and len(rows) == 12
    assert all(x["token_check"]["status"] in ("exact", "explained") and not x["failed"] for x in rows.values())
    assert rows["siblings", "cache on"]["cached_tokens"] > 0 == rows["siblings", "cache off"]["cached_tokens"]
    assert rows["pressure", "tight pool"]["preemptions"] > 0 and rows["pressure", "tight pool"]["same_text"] and rows["sampled", "again, 3 at once"]["same_text"]
    record["rows"][0]["output_tok_s"] *= 2
    assert "output_tok_s" in check_record(record)[0]
