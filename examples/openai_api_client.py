"""A chat with any OpenAI-compatible server, whole and as a stream, with nothing but Python's own library.

    python examples/openai_api_client.py --base-url http://127.0.0.1:8000/v1 "What is the capital of France?"
"""
from __future__ import annotations
import argparse, json, os, sys, urllib.error, urllib.request
from typing import Any, Iterator


def post(base: str, path: str, body: dict[str, Any]) -> Any:
    "The open response of a POST."
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("LLMINFER_API_KEY")
    head = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return urllib.request.urlopen(urllib.request.Request(f"{base}{path}", json.dumps(body).encode(), head), timeout=600)


def events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    "Server-sent events: data lines are joined until an empty line; comments are skipped."
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8").rstrip("\r\n")
        if line.startswith("data:"): data.append(line[5:].lstrip())
        elif not line and data:
            text, data = "\n".join(data), []
            if text == "[DONE]": return
            yield json.loads(text)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("prompt", nargs="?", default="What is the capital of France?")
    ap.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    ap.add_argument("--max-tokens", type=int, default=48)
    a = ap.parse_args()
    base = a.base_url.rstrip("/")
    try:
        with urllib.request.urlopen(f"{base}/models", timeout=30) as r: model = json.loads(r.read())["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": a.prompt}], "max_tokens": a.max_tokens, "temperature": 0}
        with post(base, "/chat/completions", body) as r: d = json.loads(r.read())
        c = d["choices"][0]
        print(f"model: {model}\nanswer: {c['message']['content']!r} ({c['finish_reason']})\nusage: {d['usage']}\nstream: ", end="")
        with post(base, "/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}}) as r:
            for e in events(r):
                if "error" in e: raise RuntimeError(e["error"]["message"])
                for c in e["choices"]: print(c["delta"].get("content") or "", end="", flush=True)
                if e.get("usage"): print(f"\nusage: {e['usage']}")
    except urllib.error.HTTPError as e:
        print(f"error: status {e.code}: {e.read().decode('utf-8', 'replace')[:300]}", file=sys.stderr)
        return 1
    except (OSError, RuntimeError) as e:
        print(f"error: {base}: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__": sys.exit(main())
