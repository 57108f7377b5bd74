"""All bad inputs of families I1, I2, I8, I9 (bug log, section 3.2) against a real server: no 500, no hang over 5 s.

python benchmarks/http_bad.py [--seed N] [--times N]"""
from __future__ import annotations
import argparse, os, sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from support import bad_http
from support.api import tiny_http


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--times", type=int, default=1, help="so many times the full set")
    a, bad = p.parse_args(), 0
    for family, n in bad_http.FULL.items():
        with tiny_http(max_model_len=64) as s:
            r = bad_http.attack(s.port, family, n * a.times, a.seed)
            s.settle()
        print(f"{family}: {r.n} inputs, seed {a.seed}, statuses {dict(sorted(r.codes.items()))}, slowest {r.slowest_s:.2f} s, {len(r.faults)} faults")
        for f in r.faults[:5]: print("   ", f)
        bad += len(r.faults)
    sys.exit(bool(bad))


if __name__ == "__main__": main()
