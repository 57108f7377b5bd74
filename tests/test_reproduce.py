"""`make reproduce`: it passes here, and fails when a record, a page or a registration says something else."""
import json, shutil
import pytest
import reproduce
from llminfer.config import ConfigError
from llminfer.registered import Registration, check_record, judge, pick, read_registration
from house import ROOT, notebooks

@pytest.fixture
def bench(tmp_path):
    for d in ("records", "registered"): shutil.copytree(ROOT / "benchmarks" / d, tmp_path / d)
    return tmp_path

def edit(bench, name, change, seal=False):
    p = bench / "records" / name
    d = json.loads(p.read_text())
    change(d)
    p.write_text(json.dumps(d))
    if seal:
        from llminfer.registered import seal_of
        f = bench / "records/SEALS.json"
        f.write_text(json.dumps(json.loads(f.read_text()) | {name: seal_of(p)}))

def test_records_and_registrations_stand(bench):
    assert reproduce.check_records(bench) == [] and reproduce.check_registered(bench) == []
    assert len(list((bench / "registered").glob("*.toml"))) >= 10

def test_pages_say_what_the_records_say():
    problems, n = reproduce.check_notebooks(notebooks())
    assert problems == [] and n >= 15
    assert all(p.stat().st_size < 100_000 for p in (ROOT / "benchmarks/records").iterdir() if p.is_file()), "a record keeps what a page, a rule or a check reads"
    assert [x for x in reproduce.check_pages(ROOT) if "make readme" not in x] == []       # that one has a test of its own

@pytest.mark.parametrize("name, change, word", [
    ("gpu_vs_vllm.json", lambda d: d["rows"][2].update(ratio_to_vllm=9.99), "ratio_to_vllm"),
    ("gpu_vs_vllm.json", lambda d: d["rows"][0].update(ours_tok_s=1e4), "ours_tok_s"),
    ("gpu_vs_vllm.json", lambda d: d["rows"][0]["seconds"]["vllm"].update(full=[1.0] * 5), "vllm_tok_s"),
    ("gpu_vs_vllm.json", lambda d: d["rows"][0]["token_check"]["ours"].update(status="great"), "status"),
    ("cpu_vs_hf.json", lambda d: d["rows"][0]["ratio"].update(transformers=3.0), "ratio"),
    ("ladder.json", lambda d: d["rows"][-1].update(times_below=2.5), "times_below"),
    ("host_cost.json", lambda d: d["us_per_token"].update(median=0.5), "us_per_token"),
    ("server_cost.json", lambda d: d["median"].update(loop_us=1.0), "loop_us"),
    ("chat_turns.json", lambda d: d.update(prefill_saved=0.99), "prefill_saved"),
    ("adapters_cpu.json", lambda d: d["share_of_base"].update({"8 adapters": 0.99}), "share_of_base"),
    ("trace_cost.json", lambda d: d["rows"][0].update(cost_percent=0.0), "cost_percent"),
    ("cpu_backends.json", lambda d: d["results"][0]["metrics"]["1"].update(mean_throughput_tps=999.0), "mean_throughput_tps"),
    ("cpu_backends.json", lambda d: next(m for r in d["results"] for m in r["metrics"].values() if m["shown_tps"] is None).update(shown_tps=99.0), "without believed tokens"),
    ("hf_batched_cpu.json", lambda d: d["rows"][0]["ratio"].update(batched=9.0), "ratio to batched"),
    ("cross_check.json", lambda d: d["server"][0]["off"].update(ttft_ms=0.0), "off ttft_ms"),
    ("cross_check.json", lambda d: d["worst"].update(mock=0.001), "worst of mock"),
    ("kernels_h200.json", lambda d: d["rows"][0].update(tok_s=9999), "tok_s")])
def test_a_hand_in_a_record_is_found_with_and_without_a_new_seal(bench, name, change, word):
    edit(bench, name, change)
    found = reproduce.check_records(bench)
    assert f"{name}: edited after it was sealed" in found and any(word in x for x in found)
    edit(bench, name, lambda d: None, seal=True)
    assert any(word in x for x in reproduce.check_records(bench)), reproduce.check_records(bench)

def test_seals_schemas_and_verdicts(bench, capsys):
    (bench / "records/new.json").write_text('{"rows": []}')
    (bench / "records/tails_h200.json").unlink()
    found = reproduce.check_records(bench)
    assert "new.json: no seal" in found and "tails_h200.json: sealed, but it is gone" in found and any(x.startswith("new.json: the record: 'kind'") for x in found)
    f = bench / "registered/cpu_batch_8.toml"
    f.write_text(f.read_text().replace('documented = "kept"', 'documented = "refused"'))
    assert any("the verdict is kept" in x for x in reproduce.check_registered(bench))
    edit(bench, "cpu_vs_hf.json", lambda d: d["rows"][1]["token_check"].update(status="failed"))
    assert any("the verdict is void" in x for x in reproduce.check_registered(bench))
    with pytest.raises(SystemExit, match="not sealed: demo batch 1: ratio_to_vllm"):
        edit(bench, "gpu_vs_vllm.json", lambda d: d["rows"][0].update(ratio_to_vllm=8))
        reproduce.seal(["gpu_vs_vllm.json"], bench)

def test_a_page_that_says_another_number_is_found(tmp_path):
    nb = next(p for p in notebooks() if p.stem == "15_kernels")
    (tmp_path / "nbs").mkdir()
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    d = json.loads(nb.read_text())
    for c in d["cells"]:
        for o in c.get("outputs", []):
            if "text" in o and "triton" in "".join(o["text"]) and "tok/s" in "".join(o["text"]): o["text"] = [x.replace("1355", "9999") for x in o["text"]]
    (tmp_path / "nbs/15_kernels.ipynb").write_text(json.dumps(d))
    problems, _ = reproduce.check_notebooks([tmp_path / "nbs/15_kernels.ipynb"])
    assert len(problems) == 1 and "9999" in problems[0] and "1355" in problems[0]

def test_figures_are_drawn(tmp_path):
    files = reproduce.draw_figures(ROOT / "benchmarks", tmp_path)
    assert len(files) >= 2 and all((tmp_path / f).stat().st_size > 10_000 for f in files)

def test_addresses_and_rules():
    record = {"kind": "k", "environment": {"host": "a"}, "rows": [{"m": "x", "b": 1, "v": [2.0, 3.0]}, {"m": "x", "b": 2, "v": [1.0, 1.0], "s": "exact"}]}
    assert pick(record, "rows[m=x,b=1].v[1]") == 3.0
    for bad in ("rows[m=x].v", "rows[m=y].v", "rows[b=1].w", "nothing", "rows[7]"):
        with pytest.raises(ConfigError): pick(record, bad)
    base = dict(name="n", why="w", kind="k", records=[], command="c", registered="2026-11-30", documented="kept")
    r = Registration(**base, value="rows[b=1].v[0]", at_most=2.0, gate=["rows[b=2].s"])
    assert judge(r, [record]).verdict == "kept" and judge(r, []).verdict == "pending"
    assert judge(Registration(**base, value="rows[b=1].v[0]", at_most=1.0, regression=1.5), [record]).verdict == "regressed"
    assert judge(Registration(**base, pairs=["rows[b=1].v", "rows[b=2].v"], at_least=2.5, machines=2), [record, record]).verdict == "undecided"
    assert check_record({"kind": "never heard of"}) == [] and "lacks" in check_record({"kind": "cpu_vs_hf"})[0]

@pytest.mark.parametrize("text, word", [("name =", "no toml"), ('name = "x"', "missing"), ('wrong = 1\n', "unexpected")])
def test_registrations_that_are_none(tmp_path, text, word):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=word): read_registration(tmp_path / "x.toml")
