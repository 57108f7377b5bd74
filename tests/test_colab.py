"""The notebooks for Colab: run here on a tiny model, with every optional package and with none, readable without widgets; badges and install cells from one setting."""
from __future__ import annotations
import json, os, re, subprocess, sys
from pathlib import Path
from typing import Any
import pytest
import house, readme
from house import ROOT, cells, colab_badge, colabs, source
from llminfer.loading import make_tiny

NOTEBOOKS = colabs()
OPTIONAL = ("ipywidgets", "plotly", "anywidget", "matplotlib")
RUN = """
import sys
for name in filter(None, sys.argv[3].split(",")): sys.modules[name] = None       # as if it were not installed
from execnb.shell import CaptureShell
CaptureShell(path=sys.argv[2]).execute(sys.argv[1], dest=sys.argv[2] + "/out.ipynb", exc_stop=True)
"""

@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str: return str(make_tiny(tmp_path_factory.mktemp("colab") / "tiny", seed=3))

def executed(nb: Path, folder: Path, without: tuple[str, ...] = (), **env: str) -> list[dict[str, Any]]:
    "Its cells after a run in a fresh process."
    e = {k: v for k, v in os.environ.items() if k != "LLMINFER_API_KEY"} | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}
    r = subprocess.run([sys.executable, "-c", RUN, str(nb), str(folder), ",".join(without)], cwd=folder, env=e, capture_output=True, text=True, timeout=300)
    assert r.returncode == 0, r.stdout[-1500:] + r.stderr[-2500:]
    return cells(folder / "out.ipynb")

def outputs(cell: dict[str, Any]) -> list[dict[str, Any]]: return cell.get("outputs", [])

def printed(done: list[dict[str, Any]]) -> str: return "".join("".join(o.get("text", "")) for c in done for o in outputs(c))

def readable(cell: dict[str, Any]) -> bool:
    "Whether a cell that shows more than text shows something that needs no widgets."
    shown = [o["data"] for o in outputs(cell) if "data" in o]
    return not shown or any("text/html" in d or "image/png" in d for d in shown)

SAYS = {
    "llminfer_colab": [r"static batches of four: 96 steps; this engine: (\d+)", "sequence 1: 32 of 35 tokens were there already", "cache hit: True"],
    "llminfer_readme_colab": ["a word that must: .*dragon", r"only digits: '\d{4}' \(stop\)", "top_p must be", "eager Tok/s"],
    "llminfer_advanced_colab": ["the same text: True", r"'city'", "user 2: 0 of", "RUN_VLLM is off", "RUN_COMPILED is off"],
    "llminfer_serving_colab": ["12 done, 0 failed", r"\| #", '"ready":true', "llminfer_generation_tokens_total", "ended with 0"],
    "llminfer_all_examples_colab": ["cache hit: True", "with an adapter", "6 answers", "8 of 8 done", "stopped: True"],
}

@pytest.mark.parametrize("nb", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_on_a_cpu_and_says_what_it_promises(nb: Path, tiny: str, tmp_path: Path) -> None:
    done = executed(nb, tmp_path, LLMINFER_MODEL=tiny)
    text = printed(done)
    for want in SAYS[nb.stem]: assert re.search(want, text), (want, text[-3000:])
    assert "'device': 'cpu', 'dtype': 'float32'" in text
    assert all(map(readable, done)), [source(c)[:80] for c in done if not readable(c)]
    if nb.stem == "llminfer_colab": assert int(re.search(SAYS[nb.stem][0], text)[1]) < 60      # type: ignore[index]

def test_the_view_is_readable_without_the_optional_packages(tiny: str, tmp_path: Path) -> None:
    "Case B38: one line for what is missing, no exception, and the same page of the log."
    done = executed(next(p for p in NOTEBOOKS if "all_examples" in p.stem), tmp_path, OPTIONAL, LLMINFER_MODEL=tiny)
    assert "matplotlib" in printed(done) and "6 answers" in printed(done)
    assert sum("text/html" in o.get("data", {}) for c in done for o in outputs(c)) >= 2 and "widget-view" not in str(done)

def test_they_are_clean_and_start_alike() -> None:
    assert {p.stem for p in NOTEBOOKS} == SAYS.keys()
    heads = set()
    for nb in NOTEBOOKS:
        code = [c for c in cells(nb) if c["cell_type"] == "code"]
        assert nb.stat().st_size < 60_000 and not any(c["outputs"] or c["execution_count"] for c in code), nb.name
        heads.add((re.sub(r'EXTRAS = "[^"]*"', "", source(code[0])), source(code[2])))
        assert "> " in source(cells(nb)[0]) and cells(nb)[1] == code[0]
    assert len(heads) == 1                                                  # one install cell, one choice of settings

def install_cell() -> str: return re.sub(r'EXTRAS = "[^"]*"', 'EXTRAS = "serve,viz"', source(cells(NOTEBOOKS[0])[1]))

@pytest.mark.parametrize("where, want", [("/content/llminfer", "/content/llminfer[serve,viz]"), ("x-0.1.whl", "x-0.1.whl[serve,viz]"),
    ("git+https://example.org/x", "llminfer[serve,viz] @ git+https://example.org/x")])
def test_a_bare_colab_installs(where: str, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util
    asked: list[list[str]] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda argv, check: asked.append(argv))
    monkeypatch.setenv("LLMINFER_SOURCE", where)
    exec(install_cell(), {})
    assert [a[1:] for a in asked] == [["-m", "pip", "install", "-q", want]]
    monkeypatch.delenv("LLMINFER_SOURCE")
    if not house.public_repo():
        with pytest.raises(RuntimeError, match="no public address yet"): exec(install_cell(), {})

@pytest.mark.parametrize("capability, want", [((7, 5), {"device": "cuda", "dtype": "float16", "kernels": "torch"}), ((9, 0), {"device": "cuda", "dtype": "auto", "kernels": "auto"})])
def test_settings_of_a_t4_and_of_a_new_gpu(capability: tuple[int, int], want: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from llminfer import EngineConfig
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    scope: dict[str, Any] = {"torch": torch, "os": os}
    code = [source(c) for c in cells(NOTEBOOKS[0]) if c["cell_type"] == "code"]
    exec(code[2], scope)
    assert scope["SAFE"] == want and EngineConfig("demo", **scope["SAFE"]).kernels == want["kernels"]

def test_vllm_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util
    import torch
    nb = next(p for p in NOTEBOOKS if "advanced" in p.stem)
    cell = next(source(c) for c in cells(nb) if "def vllm_problem" in source(c))
    scope: dict[str, Any] = {"torch": torch, "subprocess": subprocess, "sys": sys, "importlib": importlib, "RUN_VLLM": False}
    exec(cell, scope)
    problem = scope["vllm_problem"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert problem() == "vLLM needs a GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "restart the runtime" in problem()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    (tmp_path / "vllm/_C.py").write_text("raise ImportError('undefined symbol: _ZN3c10x')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert "(ABI): ImportError: undefined symbol" in problem() and "\n" not in problem()

def test_badges_come_from_one_setting() -> None:
    link = colab_badge("examples/x.ipynb", "me/it")
    assert link.endswith("](https://colab.research.google.com/github/me/it/blob/main/examples/x.ipynb)") and colab_badge("x", "") == ""
    for nb in NOTEBOOKS:
        with_one = json.loads(readme.with_repo(nb, "me/it"))["cells"]
        assert source(with_one[0]).splitlines()[4] == colab_badge(f"examples/{nb.name}", "me/it")
        assert '"LLMINFER_SOURCE", "git+https://github.com/me/it")' in source(with_one[1])
    assert readme.colab_list("me/it").count("colab-badge") == len(NOTEBOOKS)
    pages = [*house.notebooks(), *NOTEBOOKS, ROOT / "README.md"]
    found = {m for p in pages for m in re.findall(r"colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)/blob", p.read_text(encoding="utf-8"))}
    assert found == ({house.public_repo()} if house.public_repo() else set())
