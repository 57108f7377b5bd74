"""`llminfer serve`: no flag is silently nothing, one line for a mistake, and an end that lets answers finish."""
from __future__ import annotations
import json, re, signal, socket, time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from typer.testing import CliRunner
from llminfer import cli
from llminfer.cli_serve import NOT_NEEDED, ServeFlags, bind, choices, hints, make_server, serve_config, url_of
from llminfer.config import Backend, ConfigError
from llminfer.loading import make_tiny
from support.served import popen, served

@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str: return str(make_tiny(tmp_path_factory.mktemp("serve") / "tiny", seed=7))

@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str: return str(make_tiny(tmp_path_factory.mktemp("serve") / "endless", seed=7, max_position_embeddings=100_000))

@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLMINFER_API_KEY", "ESME_BUNDLE_PATH", "LLM_INFER_BUNDLE", "HF_TOKEN"): monkeypatch.delenv(name, raising=False)

def refused(*args: Any, words: tuple[Any, ...] = ()) -> str:
    r = CliRunner().invoke(cli.app, ["serve", *map(str, args)], prog_name="llminfer")
    assert r.exit_code == 2 and r.stdout == "" and r.stderr.startswith("error: ") and r.stderr.count("\n") == 1, r.output
    for w in words: assert str(w) in r.stderr, (w, r.stderr)
    return r.stderr

# --- flags -----------------------------------------------------------------------------------------------------------------------------

def test_no_flag_is_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    "Every field changes the engine's settings, the app, the limits or the notes; or it is refused by name."
    seen: dict[str, Any] = {}
    monkeypatch.setattr("llminfer.api.create_openai_app", lambda engine, **kw: seen.update(app=kw))
    monkeypatch.setattr("llminfer.api.setup_logging", lambda *a: seen.update(log=a))
    monkeypatch.setattr("llminfer.serving.AsyncEngine", lambda handle, limits: seen.update(limits=limits))
    monkeypatch.setattr("llminfer.engine_process.make_handle", lambda cfg, kind: seen.update(kind=kind))
    monkeypatch.setattr("uvicorn.Server", lambda config: type("S", (), {})())
    monkeypatch.setattr("llminfer.scaling.RayServer", lambda scale: (seen.update(scale=scale), SimpleNamespace(app=None))[1])
    def effect(s: ServeFlags) -> str:
        cfg, notes = serve_config(s)
        seen.clear()
        ending = make_server(s, cfg)
        return repr((cfg, cfg.hf_token, cfg.upstream_api_key, notes, seen, ending.drain_s, hints(s, notes)))
    other = {"backend": "eager", "kv_cache_dtype": "int8", "bundle": "b", "model": "m", "device": "cpu", "dtype": "float64", "quant": "int8", "attention_backend": "torch", "kernels": "torch", "preemption_policy": "off", "engine": "process",
        "log_level": "error", "log_format": "json", "metrics_names": "both", "reasoning_field": "reasoning", "host": "0.0.0.0", "gpu_memory_utilization": 0.5, "spec_confidence_threshold": 0.5, "api_key_file": Path("k"),
        "decode_graph_buckets": ["1,2"], "served_model_name": ["x"], "cors_origin": ["*"], "lora_modules": ["n=p"], "lora_dir": Path(), "api_key": ["k"], "max_queue_tokens": 5, "spec_method": "self"}
    plain, elsewhere = ServeFlags(), {"port", "json", "open"}       # these are tested with a server below
    before, refusals = effect(plain), set()
    for f in fields(ServeFlags):
        if f.name in elsewhere: continue
        old: Any = getattr(plain, f.name)
        text = f.name in ("revision", "hf_token", "cache_dir", "tokenizer", "chat_template", "upstream_url", "upstream_api_key", "assistant_model")
        change: dict[str, Any] = {f.name: other[f.name] if f.name in other else "x" if text else not old if isinstance(old, bool) else (old or 0) + 3}
        s = replace(plain, **change)
        if f.name == "compile_fullgraph": s = replace(s, backend="compiled")
        if f.name == "spec_layers": s = replace(s, spec_method="self")
        try: assert effect(s) != before, f.name
        except ConfigError as e:
            refusals.add(f.name)
            assert f.name in str(e)
    assert refusals == {"preemption_policy"} and NOT_NEEDED.keys() <= {f.name for f in fields(ServeFlags)}

def test_words_of_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lambda **kw: serve_config(ServeFlags(**kw))[0]
    assert made(backend="esme", bundle="b").model_name == made(backend="dense", bundle="b").model_name == made(bundle="b").model_name == "b" and made(backend="esme", bundle="b").backend == Backend.PAGED
    assert made(backend="qwen", model="q").model_name == "q" and made(attention_backend="torch_naive").attention_backend == made(attention_backend="torch_sdpa").attention_backend == "torch"
    assert made(max_batch_size=5).max_num_seqs == 5 and made(max_batch_size=5, max_num_seqs=7).max_num_seqs == 7 and not made(decode_graphs=False).compile_cudagraphs and made(fused_elementwise=False).kernels == "torch"
    monkeypatch.setenv("LLM_INFER_BUNDLE", "second")
    assert made(backend="esme").model_name == "second"
    monkeypatch.setenv("ESME_BUNDLE_PATH", "first")
    assert made(backend="esme").model_name == "first" and made().model_name == "demo"

def test_mistakes_are_one_line(tiny: str, tmp_path: Path) -> None:
    for line, words in (("--backend vlm", "--backend must be auto or paged or eager"), ("--backend esme", "--bundle"), ("--backend esme --bundle b -m x", "neither --model nor --revision"), ("--backend qwen", "--model"), ("--bundle b -m x", "leave one out"),
            ("--port 70000", "--port must be from 0 to 65535; got 70000"), ("--port x", "--port must be a whole number, got 'x'"), ("--drain -1", "--drain must be from 0"), ("--log-format xml", "--log-format must be text or json"), ("--metrics-names x", "--metrics-names"),
            ("--engine fork", "--engine must be auto or thread or process"), ("--no-prompt-lookup-speculative --prompt-lookup-max-draft-tokens 3", "needs prompt lookup"), ("--preemption-policy off", "--preemption-policy"), 
            ("--host 256.1.1.1", "not an address"), ("--api-key-file /nowhere/key --port 0", "/nowhere/key"), ("--block-size 0", "--page-size-tokens"), ("--served-model-nam x", "--served-model-name")):
        refused(*line.split(), words=(words,))
    (tmp_path / "keys").write_text("# none\n")
    refused("--port", 0, "--api-key-file", tmp_path / "keys", words=("holds no key",))

def test_a_port_in_use_is_told_before_anything_is_read() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert refused("-m", "/nowhere", "--port", port) == f"error: --port {port} of 127.0.0.1 is in use: give another to --port, or 0 for a free one\n"
        assert url_of(taken) == f"http://127.0.0.1:{port}"
    with bind("::1", 0) as six: assert url_of(six).startswith("http://[::1]:") and six.family == socket.AF_INET6
    with bind("0.0.0.0", 0) as every: assert url_of(every).startswith("http://127.0.0.1:")

def test_hints_and_choices() -> None:
    assert hints(ServeFlags(), []) == [] and "--api-key-file" in hints(ServeFlags(host="0.0.0.0"), [])[0] and hints(ServeFlags(host="0.0.0.0", api_key=["k"]), ["n"]) == ["n"]
    info = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "num_blocks": 9, "block_size": 16, "kv_bytes": 2**20, "max_num_batched_tokens": 512, "window_steps": 1, "prefix_cache": True, "steps": "eager"}
    rows = {r.name: r for r in choices(info, ServeFlags(device="cpu", max_batch_size=4))}
    assert not rows["device"].auto and not rows["at once"].auto and rows["dtype"].auto and rows["KV pool"].value == "9 blocks of 16 tokens, 1 MiB"
    names = {"--" + f.name.replace("_", "-") for f in fields(ServeFlags)} | {"--block-size", "--no-prefix-cache", "--prefill-chunk-size", "--no-decode-graphs"}
    assert all(set(r.flag.split(", ")) <= names for r in rows.values())

# --- a process -------------------------------------------------------------------------------------------------------------------------

def test_a_server_says_what_it_chose_and_what_it_is_called(tiny: str, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {tmp_path}/opened\n")
    browser.chmod(0o755)
    args = ("-m", tiny, "--served-model-name", "a,b", "--max-model-len", 128, "--block-size", 8, "--cors-origin", "https://page.example", "--metrics-names", "both", "--open", "--decode-graph-buckets", "1,2", "--api-key-file", tmp_path / "keys")
    (tmp_path / "keys").write_text("# mine\nsesame\n")
    with served(*args, env={"BROWSER": str(browser)}) as s:
        assert s.lines[0] == f"Serving model={tiny} backend=auto at {s.url}" and "context       128 tokens" in "\n".join(s.lines) and re.search(r"KV pool .* of 8 tokens, .* given: --num-blocks, --block-size", "\n".join(s.lines))
        assert s.ask("/v1/models")[0] == 401 and s.ask("/ready")[0] == s.ask("/health")[0] == s.ask("/")[0] == 200
        key: dict[str, Any] = {"Authorization": "Bearer sesame"}
        assert [m["id"] for m in s.ask("/v1/models", **key)[1]["data"]] == ["a", "b"]
        status, _, head = s.ask("/v1/chat/completions", {"model": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, Origin="https://page.example", **key)
        assert status == 200 and {k.lower(): v for k, v in head.items()}["access-control-allow-origin"] == "https://page.example"
        text = s.ask("/metrics")[1]
        assert "llminfer_" in text and "vllm:" in text
        for _ in range(100):
            if (tmp_path / "opened").exists(): break
            time.sleep(0.05)
        assert (tmp_path / "opened").read_text().strip() == s.url and s.end() == 0
    assert "".join(s.err).splitlines() == ["note: --decode-graph-buckets is not needed: a size is captured when it is first used", "draining: running answers have 30 s, a second signal ends them"]

def test_every_line_is_json_if_asked(tiny: str) -> None:
    with served("-m", tiny, "--log-format", "json", "--log-level", "info") as s:
        assert s.ask("/v1/models")[0] == 200 and s.end() == 0
    events = [json.loads(line) for line in s.lines]
    assert [e["event"] for e in events] == ["serving", "ready"] and {"device", "KV pool"} <= {c["name"] for c in events[1]["choices"]}
    logs = [json.loads(line) for line in s.err]
    assert any("/v1/models" in json.dumps(e) for e in logs) and any("draining" in json.dumps(e) for e in logs)

def test_a_key_from_the_environment(tiny: str) -> None:
    with served("-m", tiny, env={"LLMINFER_API_KEY": "k1,k2"}) as s:
        assert s.ask("/v1/models")[0] == 401 and s.ask("/v1/models", Authorization="Bearer k2")[0] == 200 and "k1" not in "".join(s.lines)
        assert s.end(signal.SIGINT) == 0

@pytest.mark.parametrize("args, words", [(("-m", "/nowhere/model"), "/nowhere/model"), (("-m", "no/such-model", "--local-files-only"), "no/such-model"), (("--max-model-len", "99999"), "--max-model-len 99999"), (("--quant", "fp8", "-b", "eager"), "quant mode 'fp8'"), (("--assistant-model", "/nowhere/draft"), "--assistant-model")])
def test_a_model_that_cannot_be_read_is_one_line(args: tuple[str, ...], words: str) -> None:
    p = popen("--port", 0, *args)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 2 and out.count("\n") == 1 and out.startswith("Serving model=")
    assert err.count("\n") == 1 and err.startswith("error: ") and words in err, err      # said once

def test_the_first_signal_drains(endless: str) -> None:
    with served("-m", endless) as s:
        events, last, seen = s.stream(max_tokens=800), "", list[int]()
        for n, data in enumerate(events):
            if n == 3: s.p.send_signal(signal.SIGTERM)
            if n > 3 and not seen:
                for _ in range(200):
                    seen.append(s.ask("/ready")[0])
                    if seen[-1] == 503: break
                status, body, head = s.ask("/v1/completions", {"model": s.model, "prompt": "hi"})
                assert status == 503 and "error" in body and "retry-after" in {k.lower() for k in head} and s.ask("/health")[0] == 200
            last = data
        assert seen[-1] == 503 and last == "[DONE]" and s.p.wait(20) == 0

def test_the_drain_has_a_deadline(endless: str) -> None:
    with served("-m", endless, "--drain", "0.5") as s:
        events = s.stream(max_tokens=90000)
        next(events), next(events)
        s.p.send_signal(signal.SIGTERM)
        began, rest = time.monotonic(), list(events)
        assert time.monotonic() - began < 15 and "error" in json.loads(rest[-2] if rest[-1] == "[DONE]" else rest[-1]) and s.p.wait(20) == 0

def test_a_second_signal_aborts(endless: str) -> None:
    with served("-m", endless) as s:
        events = s.stream(max_tokens=90000)
        next(events), next(events)
        s.p.send_signal(signal.SIGINT)
        while s.ask("/ready")[0] != 503: time.sleep(0.02)
        s.p.send_signal(signal.SIGINT)
        began = time.monotonic()
        try: list(events)
        except Exception: pass                 # the connection may be cut
        assert s.p.wait(20) == 130 and time.monotonic() - began < 15

def test_a_signal_while_the_model_loads(tiny: str) -> None:
    p = popen("-m", tiny, "--port", 0)
    assert p.stdout and p.stdout.readline().startswith("Serving")
    p.send_signal(signal.SIGTERM)
    out, err = p.communicate(timeout=60)
    assert p.returncode in (0, -signal.SIGTERM) and "Traceback" not in err, (p.returncode, err)
