"Test files that need a process of their own: Triton decides when it is imported whether it interprets."
import os
import subprocess
import sys
from pathlib import Path


def run_alone(file: str, interpret: bool = True, **env: str) -> None:
    "Run the tests of a file in a process of its own, under Triton's interpreter or (False) with its compiler; `env` is added."
    own = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | ({"TRITON_INTERPRET": "1"} if interpret else {}) | env
    r = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", file], capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2], env=own)
    print(r.stdout[-4000:], r.stderr[-2000:])
    assert r.returncode == 0 and " passed" in r.stdout, r.stdout[-4000:] + r.stderr[-2000:]
