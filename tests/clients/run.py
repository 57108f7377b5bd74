"""Clients too heavy for the dev environment, each in .venv-clients, against a real server here: `make clients`.

python tests/clients/run.py [langchain|litellm|lm_eval|schemathesis ...]"""
from __future__ import annotations
import json, os, subprocess, sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PAIRS = [("The capital of France is", " Paris"), ("One and one", " is two, they say"), ("", "A text alone"), ("Q: what?\nA:", " the"), ("Ünïcode", " é ü"), ("x" * 40, "y" * 20)]


def client(name: str, url: str, folder: Path) -> str:
    "Run one client; returns what it printed."
    env = {**os.environ, "BASE_URL": url + "/v1", "API_KEY": "key", "MODEL": "tiny", "TOK": str(folder), "PAIRS": json.dumps(PAIRS), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    r = subprocess.run([str(PYTHON), str(HERE / f"{name}_client.py")], env=env, capture_output=True, text=True, timeout=300)
    if r.returncode: raise SystemExit(f"{name} failed:\n{r.stdout[-3000:]}\n{r.stderr[-4000:]}")
    return r.stdout


def direct(folder: Path) -> list[tuple[float, bool]]:
    "The same scores by one whole forward of the model, without a server."
    import torch
    from llminfer.loading import load_model, open_checkpoint
    from llminfer.tokenization import load_tokenizer
    ckpt = open_checkpoint(folder)
    model, tok = load_model(ckpt, torch.float32, "cpu"), load_tokenizer(ckpt.tokenizer)
    out = []
    for context, text in PAIRS:
        both = tok.encode(context + text, add_special_tokens=False)
        n = len(tok.encode(context, add_special_tokens=False)) if context else 0
        ids = both if n else [tok.bos_token_id, *both]      # lm-eval puts BOS before a text without context
        n = n or 1
        rows = model.logits(torch.tensor(ids)).log_softmax(-1)[n - 1:-1]
        new = torch.tensor(ids[n:])
        out.append((rows.gather(1, new[:, None]).sum().item(), bool((rows.argmax(-1) == new).all())))
    return out


def fuzz(url: str) -> None:
    "All phases of schemathesis but the stateful one; about two minutes."
    r = subprocess.run([sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "-H", "Authorization: Bearer key", "--max-examples", "20", "--seed", "1", "--generation-deterministic",
        "--phases", "examples,coverage,fuzzing", "--exclude-checks", "positive_data_acceptance,ignored_auth"], capture_output=True, text=True, timeout=900)
    if r.returncode: raise SystemExit(r.stdout[-6000:])


def main() -> None:
    from llminfer.loading import make_tiny
    from llminfer.config import EngineConfig
    from llminfer.engine import InferenceEngine
    from support.api import serving
    wanted = sys.argv[1:] or ["langchain", "litellm", "lm_eval", "schemathesis"]
    folder = make_tiny(Path(mkdtemp()) / "tiny")
    engine = InferenceEngine(EngineConfig(str(folder), device="cpu", dtype="float32", max_model_len=512, seed=0))
    with serving(engine, served_model_name="tiny", api_key="key") as s:
        for name in wanted:
            if name == "schemathesis": fuzz(s.url)
            else:
                out: Any = client(name, s.url, folder)
                if name == "lm_eval":
                    got = json.loads(next(x for x in out.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))
                    worst = max(abs(a - b) for (a, _), (b, _) in zip(got, direct(folder)))
                    print(f"lm-eval against direct scoring: largest difference {worst:.1e} over {len(got)} texts")
                    assert worst < 1e-4 and [g for _, g in got] == [g for _, g in direct(folder)], (got, direct(folder))
            print(f"{name}: ok", flush=True)


if __name__ == "__main__": main()
