"""What README says works: its commands and its Python, run on the demo model as a reader would."""
import json, os, re, shlex, subprocess, sys
from pathlib import Path
import pytest
from house import ROOT
from llminfer.adapters import make_adapter
from llminfer.loading import open_checkpoint
from support.served import served

README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
ENV = {k: v for k, v in os.environ.items() if k != "LLMINFER_API_KEY"} | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
SERVE = "llminfer serve --port 8000"

def blocks(language: str) -> list[str]: return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)

COMMANDS = [line for b in blocks("sh") for line in b.replace("\\\n", "").splitlines() if line.startswith("llminfer ")]
CURLS = [b for b in blocks("sh") if b.startswith("curl ")]

def shell(command: str, cwd: Path, stdin: str = "") -> str:
    r = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=cwd, env=ENV, input=stdin, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, f"{command}\n{r.stdout}\n{r.stderr}"
    return r.stdout

def test_every_block_is_one_that_is_tried():
    lines = {line for b in blocks("sh") for line in b.splitlines() if line.strip()}
    makes = {line for line in lines if line.startswith("make ")}
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert targets and {line.split()[1] for line in makes} <= set(targets[1].split())
    assert lines - makes - set(COMMANDS) == {line for b in CURLS for line in b.splitlines() if line.strip()}
    assert SERVE in COMMANDS and len(CURLS) == 1 and len(COMMANDS) > 8

@pytest.mark.parametrize("command", [c for c in COMMANDS if c != SERVE], ids=lambda c: " ".join(shlex.split(c, comments=True)[:3]))
def test_command(command, tmp_path):
    (tmp_path / "question.txt").write_text("What is the capital of France?\n", encoding="utf-8")
    if "my-lora" in command: make_adapter(tmp_path / "my-lora", open_checkpoint("demo").config, r=4)
    out = shell(command, tmp_path, stdin="/set temperature 0\nWhat is the capital of France?\n")   # what `chat` reads
    assert out.strip()
    if "--temp 0" in command or " chat " in command: assert "Paris" in out
    if "--json" in command: assert isinstance(json.loads(out), dict)
    if command.startswith(("llminfer pull", "llminfer make-bundle")): assert (tmp_path / out.strip()).exists()

def test_python_blocks_one_after_another(tmp_path):
    "Every block in one process; a line between them keeps their outputs apart."
    parts = re.findall(r"^```python\n(.*?)^```\n\n((?:    [^\n]*\n)+)", README, re.M | re.S)
    assert len(parts) == len(blocks("python")) >= 3
    run = subprocess.run([sys.executable, "-c", "\nprint()\nprint('-----')\n".join(code for code, _ in parts)], cwd=tmp_path, env=ENV | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    got = [x.strip() for x in run.stdout.split("\n-----\n")]
    assert got[0] == parts[0][1].strip()                                     # greedy, and the same on every machine
    assert [len(x.splitlines()) > 0 for x in got] == [True] * len(parts)
    assert got[2].splitlines()[1].startswith("True 32 of ")                  # what the README says of the prefix cache

def test_the_server_answers_the_curl(tmp_path):
    with served() as s:
        answer = json.loads(shell(CURLS[0].replace("http://127.0.0.1:8000", s.url), tmp_path))
        assert "Paris" in answer["choices"][0]["message"]["content"] and answer["model"] == "demo"
        for path, want in (("/ready", ""), ("/metrics", "llminfer"), ("/", "<!doctype html>"), ("/v1/models", "demo")):
            status, text, _ = s.ask(path)
            assert status == 200 and want in str(text)
