"""An OpenAI-compatible server from Python; `llminfer serve` does the same with more flags.

    python examples/run_server.py --model Qwen/Qwen2.5-1.5B-Instruct --port 8000
    python examples/openai_api_client.py --base-url http://127.0.0.1:8000/v1

It listens on this machine only; with --host 0.0.0.0 give it a key in LLMINFER_API_KEY.
"""
from __future__ import annotations
import argparse, socket, sys
import uvicorn
from llminfer import EngineConfig, InferenceEngine
from llminfer.api import create_openai_app


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="demo")
    ap.add_argument("--device", default="auto")
    ap.add_argument("--host", default="127.0.0.1")
    ap.add_argument("--port", type=int, default=8000, help="0: a free one")
    ap.add_argument("--max-model-len", type=int)
    a = ap.parse_args()
    engine = InferenceEngine(EngineConfig(a.model, device=a.device, max_model_len=a.max_model_len))
    app = create_openai_app(engine, wait_until_ready=True)
    with socket.create_server((a.host, a.port), backlog=2048) as sock:
        print(f"Serving model={a.model} at http://{a.host}:{sock.getsockname()[1]}/v1", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])
    return 0


if __name__ == "__main__":
    try: sys.exit(main())
    except KeyboardInterrupt: sys.exit(130)
