"""The promises of SECURITY.md: files are data, clients are bounded, secrets stay in, nothing is fetched for a stranger, nothing listens but the port.

Promises with tests elsewhere: pickles and damaged bundles (test_bundles), safetensors and GGUF (test_formats), model text as HTML in the chat page (test_chat_page),
templates (notebook 05a, test_tokenization), CORS and keys (test_api), tokens in messages (test_config_request, test_loading, test_cli)."""
from __future__ import annotations
import ast, hmac, io, json, logging, pickle, shutil, socket, subprocess, threading, time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator
import psutil
import pytest
from house import ROOT
from llminfer import api
from llminfer.adapters import make_adapter
from llminfer.config import EngineConfig
from llminfer.formats import LoadError
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.protocol import ApiError
from llminfer.adapter_routes import within
from llminfer.serving import ServingLimits
from llminfer.tracing import Trace
from support.api import KEY, http_bytes, raw_request, tiny_http
from support.engines import clean as clean, tiny
from support.served import served


# Files are data

def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for n in ast.walk(tree):
        if isinstance(n, ast.Call): yield ast.unparse(n.func), n


def test_nothing_in_the_library_runs_what_it_reads():
    for p in sorted((ROOT / "llminfer").glob("*.py")):
        for name, call in calls(ast.parse(p.read_text(encoding="utf-8"))):
            words = {k.arg: ast.unparse(k.value) for k in call.keywords}
            if name == "torch.load": assert words.get("weights_only") == "True", f"{p.name}:{call.lineno}"
            if name in ("pickle.load", "pickle.loads"): assert p.name in ("engine_process.py", "ranks.py"), f"{p.name}:{call.lineno}: only what comes from our own children"
            assert name not in ("eval", "exec", "os.system", "os.popen", "marshal.loads", "yaml.load", "dill.loads", "joblib.load"), f"{p.name}:{call.lineno}: {name}"
            assert words.get("shell") != "True" and words.get("trust_remote_code") != "True" and words.get("allow_pickle") != "True", f"{p.name}:{call.lineno}: {name}"


class Evil:
    def __init__(self, mark: Path): self.mark = mark
    def __reduce__(self): return (open, (str(self.mark), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors", "adapter_model.bin"])
def test_a_pickle_is_never_opened(name, tmp_path):
    folder, mark = make_tiny(tmp_path / "m"), tmp_path / "it ran"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(LoadError): load_model(open_checkpoint(folder))
    assert not mark.exists()


def test_code_of_a_repository_is_off_unless_asked_for():
    assert EngineConfig().hf_trust_remote_code is False
    assert "--trust-remote-code" in (ROOT / "llminfer" / "cli_flags.py").read_text() and 'Annotated[bool, flag(MODEL, "--trust-remote-code/--no-trust-remote-code"' in (ROOT / "llminfer" / "cli_flags.py").read_text()


# Paths

def test_adapters_lie_below_their_folder(tmp_path):
    root, outside = tmp_path / "loras", tmp_path / "outside"
    for d in (root / "good", root / "deep" / "er", outside): d.mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "inner").symlink_to(root / "good")
    assert within("good", root) == root / "good" == within("inner", root) == within("deep/../good", root) and within("deep/er", root) == root / "deep" / "er"
    for bad in ("", ".", "..", "../outside", "good/../../outside", "/etc", str(outside), "link", "link/x", "loop", "good\0", "\0", "\ud800", "~root", "good/../..", "x" * 5000, "../loras-other", "//etc"):
        if bad == "~root": assert within(bad, root) == root / "~root"      # a name like another: nothing is expanded
        elif bad in ("x" * 5000,):
            try: assert within(bad, root).is_relative_to(root)
            except ApiError: pass
        else:
            with pytest.raises(ApiError) as e: within(bad, root)
            assert (e.value.status, e.value.param) == (400, "lora_path") and "\n" not in e.value.message


def test_paths_over_http(tmp_path):
    root = tmp_path / "loras"
    make_adapter(root / "a", open_checkpoint(tiny()[0]).config, r=2)
    shutil.copytree(root / "a", tmp_path / "secret")
    (root / "link").symlink_to(tmp_path / "secret")
    with tiny_http(app={"lora_dir": root}) as s:
        for path in ("../secret", str(tmp_path / "secret"), "link", "a/../../secret", "a\0", ""):
            r = s.post("/v1/load_lora_adapter", lora_name="x", lora_path=path)
            assert r.status_code == 400 and "secret" not in r.text.replace(json.dumps(path)[1:-1], ""), r.text
        assert s.post("/v1/load_lora_adapter", lora_name="x", lora_path="a").status_code == 200
        for name in ("", "tiny", "x" * 10_000, "a\nb", 5, None):
            assert s.post("/v1/load_lora_adapter", lora_name=name, lora_path="a").status_code == 400, name
        assert [m["id"] for m in s.http.get("/v1/models").json()["data"]] == ["tiny", "x"]
    with tiny_http() as s: assert s.post("/v1/load_lora_adapter", lora_name="x", lora_path="a").status_code == 404     # not offered unless asked for


# Sizes

SMALL: dict[str, Any] = {"prompt": "hi", "max_tokens": 1}
TOO_MUCH: list[tuple[str, int, dict[str, Any]]] = [   # (name, status, body of a completion)
    ("8 MiB of body", 413, SMALL | {"user": "x" * (8 * 2**20)}), ("1,025 prompts", 400, {"prompt": ["a"] * 1025, "max_tokens": 1}), ("9 prompts with n = 128", 400, {"prompt": ["a"] * 9, "n": 128}),
    ("n = 129", 400, SMALL | {"n": 129}), ("65,537 characters of stop", 400, SMALL | {"stop": ["ab" * 2**14, "x" * 2**15 + "y"]}), ("65,537 characters of bad words", 400, SMALL | {"bad_words": ["x" * 65537]}),
    ("65,537 characters of forced words", 400, SMALL | {"force_words": ["x" * 65537]}), ("a stop id that is none", 400, SMALL | {"stop_token_ids": [512]}), ("a bias of 101", 400, SMALL | {"logit_bias": {"5": 101}}),
    ("a schema of 262,145 characters", 400, SMALL | {"structured_outputs": {"json": {"description": "x" * 2**18}}}), ("a schema 65 deep", 400, SMALL | {"structured_outputs": {"json": json.loads('{"items":' * 65 + "{}" + "}" * 65)}}),
    ("a regex of 262,145 characters", 400, SMALL | {"structured_outputs": {"regex": "a" * (2**18 + 1)}}), ("100,000 choices", 400, SMALL | {"structured_outputs": {"choice": [f"w{i}" for i in range(100_000)]}}),
    ("a salt of 1,025", 400, SMALL | {"cache_salt": "x" * 1025}), ("an id of 129", 400, SMALL | {"request_id": "x" * 129}), ("21 log probabilities", 400, SMALL | {"logprobs": 21}),
    ("a prompt beyond the context", 400, {"prompt": "a" * 100_000, "max_tokens": 1})]


def test_every_size_has_a_limit_and_says_it():
    with tiny_http() as s:
        for name, status, body in TOO_MUCH:
            t = time.monotonic()
            r = s.post("/v1/completions", **body)
            assert r.status_code == status and r.json()["error"]["message"], (name, r.status_code, r.text[:200])
            assert time.monotonic() - t < 5, name
        for headers in ({"x-long": "y" * api.MAX_HEADERS}, {f"x-{i}": "y" * 1000 for i in range(40)}):
            assert b" 431 " in raw_request(s.port, http_bytes("/v1/completions", b"{}", headers=headers))[:40]
        many = http_bytes("/v1/completions", b"{}").replace(b"\r\n\r\n", b"\r\n" + b"x-same: yyyyyyyyyyyyyyyyyyyy\r\n" * 1500 + b"\r\n", 1)      # one name, many times
        assert b" 431 " in raw_request(s.port, many)[:40]
        s.settle()


def test_what_a_stranger_may_ask_of_a_grammar_takes_no_time():
    nasty = [{"regex": "(a{1,1000}){1,1000}"}, {"regex": "((((a{0,200}){0,200}){0,200}){0,200}){0,200}"}, {"regex": "(" * 5000 + ")" * 5000}, {"regex": "(a|aa)+$" * 1000}, {"grammar": "root ::= root"},
        {"grammar": "root ::= a{1,100000}\na ::= b{1,100000}\nb ::= \"x\""}, {"json": {"$ref": "#"}}, {"json": {"not": {}}}, {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}}, {"regex": "[^\\s\\S]"},
        {"json": {"type": "array", "minItems": 10**9, "items": {}}}, {"json": {"enum": [f"v{i}" for i in range(10_000)]}}]
    with tiny_http() as s:
        for rule in nasty:
            t = time.monotonic()
            r = s.post("/v1/completions", **SMALL, structured_outputs=rule)
            assert r.status_code in (200, 400) and time.monotonic() - t < 5, (rule, r.status_code, r.text[:200])
        s.settle()


def test_a_long_text_holds_up_nobody():
    "Tokenizing megabytes gives the interpreter to other threads."
    tok, gaps, done = tiny()[2], [0.0], threading.Event()
    def tick() -> None:
        t = time.monotonic()
        while not done.wait(0.005): gaps[0], t = max(gaps[0], time.monotonic() - t), time.monotonic()
    thread = threading.Thread(target=tick)
    thread.start()
    t = time.monotonic()
    ids = tok.encode("a b" * 700_000)
    took = time.monotonic() - t
    done.set()
    thread.join()
    assert tok.decode(ids[:2000]) == ("a b" * 2000)[:len(tok.decode(ids[:2000]))] and gaps[0] < max(took / 2, 0.5), (gaps, took)


# Keys and secrets

def test_every_key_is_compared_in_constant_time(monkeypatch):
    seen: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(api.hmac, "compare_digest", lambda a, b: (seen.append((a, b)), real(a, b))[1])
    keys = api.read_keys(["one", "two", "three"])
    for header, fits in (("Bearer one", True), ("Bearer three", True), ("Bearer no", False), ("", False), ("Basic one", False), ("Bearer " + "x" * 10_000, False), ("bearer two", True)):
        seen.clear()
        assert api.key_fits(header, keys) is fits and len(seen) == 3 and all(len(a) == len(b) == 32 for a, b in seen)     # never fewer, and only digests


def test_secrets_are_nowhere_to_be_read(tmp_path):
    "Not in the log, not in answers, not in pages, not in `repr`."
    log = io.StringIO()
    api.setup_logging("json", "debug")
    logger = logging.getLogger("llminfer")
    logger.handlers[0].setStream(log)   # type: ignore[attr-defined]
    try:
        with tiny_http(app={"api_key": KEY}, hf_token="hf_verysecret") as s:
            texts = [repr(s.app.state.gate), repr(s.app.state.service), repr(s.engine), str(s.engine.info), str(s.engine.stats()), repr(s.app.state.engine.handle.engine.cfg)]
            for headers in ({}, {"authorization": f"Bearer {KEY}"}, {"authorization": f"Bearer {KEY}x"}):
                for path in ("/", "/health", "/metrics", "/openapi.json", "/v1/models", "/version", "/tokenizer_info", f"/nowhere?key={KEY}"):
                    r = s.http.get(path, headers=headers)
                    texts += [r.text, str(dict(r.headers))]
                texts.append(s.http.post("/v1/completions", json={"prompt": "my private words", "max_tokens": 1}, headers=headers).text)
                texts.append(s.http.post("/v1/completions", json={"prompt": "my private words", "temperature": "x"}, headers=headers).text)
    finally: logger.handlers.clear()
    for t in [log.getvalue(), *texts]: assert KEY not in t and "hf_verysecret" not in t and api.digest(KEY).hex() not in t, t[:500]
    assert "my private words" not in log.getvalue() and log.getvalue().count("\n") > 10


def test_ps_shows_no_secret(tmp_path):
    "Arguments of the server, and of its engine's process."
    env = {"HF_TOKEN": "hf_fromenvironment"}
    with served("-m", tiny()[0], "--engine", "process", "--api-key", "sk-onargv1", "--api-key=sk-onargv2", "--upstream-api-key", "up-onargv", "--max-model-len", 64, env=env) as s:
        family = [psutil.Process(s.p.pid), *psutil.Process(s.p.pid).children(recursive=True)]
        assert len(family) >= 2
        shown = subprocess.run(["ps", "-ww", "-o", "args", "-p", ",".join(str(p.pid) for p in family)], capture_output=True, text=True).stdout if shutil.which("ps") else ""
        shown += " ".join(w for p in family for w in p.cmdline())
        assert not any(x in shown for x in ("sk-onargv", "up-onargv", "hf_fromenvironment")) and "**********" in shown and str(tiny()[0]) in shown, shown
        assert s.ask("/v1/models")[0] == 401 and s.ask("/v1/models", authorization="Bearer sk-onargv2")[0] == 200


def test_only_the_port_listens():
    "The engine's process is reached by a pair of sockets without a name, which it inherits."
    with served("-m", tiny()[0], "--engine", "process", "--max-model-len", 64) as s:
        child = psutil.Process(s.p.pid).children()[0]
        assert not [c for c in child.net_connections("inet")], child.net_connections("inet")
        assert all(not c.laddr and not c.raddr for c in child.net_connections("unix")), child.net_connections("unix")
        listening = [c for c in psutil.Process(s.p.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", int(s.url.rpartition(":")[2]))]


# Nothing is fetched for a stranger; nothing that he says is run or shown as something else

@contextmanager
def trap() -> Iterator[tuple[str, list[int]]]:
    "An address, and how often somebody came."
    visits: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(0.1)
        alive = True
        def wait() -> None:
            while alive:
                try: sock.accept()[0].close()
                except TimeoutError: continue
                except OSError: return
                visits.append(1)
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        try: yield f"http://127.0.0.1:{sock.getsockname()[1]}/x", visits
        finally:
            time.sleep(0.15)
            alive = False
            thread.join(2)


def test_no_address_in_a_request_is_visited():
    with trap() as (url, visits), tiny_http() as s:
        user = lambda content: {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        bodies: list[tuple[str, dict[str, Any]]] = [("/v1/chat/completions", user([{"type": t, t: v}])) for t, v in (("image_url", {"url": url}), ("input_audio", {"data": url}), ("file", {"file_data": url}), ("video_url", {"url": url}))]
        bodies += [("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}), ("/v1/responses", {"input": "x", "tools": [{"type": "web_search", "url": url}]}),
            ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_url": url}]}), ("/v1/completions", SMALL | {"structured_outputs": {"json": {"$ref": url}}}), ("/v1/completions", SMALL | {"upstream_url": url, "model": "tiny"}),
            ("/v1/completions", SMALL | {"model": url}), ("/v1/chat/completions", user("x") | {"chat_template": url}), ("/v1/chat/completions", user("x") | {"documents": [{"url": url}]})]
        for path, body in bodies: assert s.post(path, **body).status_code in (200, 400, 404), (path, body)
        assert not visits


def test_a_path_cannot_forge_a_line_of_the_log():
    log = io.StringIO()
    api.setup_logging("text", "info")
    logging.getLogger("llminfer").handlers[0].setStream(log)   # type: ignore[attr-defined]
    try:
        with tiny_http() as s:
            for path in ("/v1/x%0a12:00:00%20INFO%20all%20is%20well", "/%1b[2J%0d", "/%c2%85x", "/%e2%80%a8y"): raw_request(s.port, http_bytes(path, b"{}"))
            raw_request(s.port, http_bytes("/v1/completions", b"{}", headers={"x-request-id": "a\tb\x1b[2J"}))
    finally: logging.getLogger("llminfer").handlers.clear()
    lines = log.getvalue().splitlines()
    assert all(x.isprintable() for x in lines) and not any(x.startswith("12:00:00 INFO all") for x in lines) and sum("POST" in x for x in lines) == 5, lines


def test_a_template_reaches_nothing_and_ends():
    folder = Path(make_tiny(Path(tiny()[0]).parent / "evil"))
    for source in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}",
            "{{ messages.append(1) }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 10**10 }}"):
        with tiny_http_of(folder, source) as s:
            t = time.monotonic()
            r = s.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1)
            assert r.status_code == 400 and time.monotonic() - t < 5 and "root:" not in r.text, (source, r.text[:200])
            assert s.complete(prompt="x", max_tokens=1)["choices"]


def tiny_http_of(folder: Path, template: str) -> Any:
    from llminfer.api import create_openai_app as make
    from llminfer.engine import InferenceEngine
    from support.api import Server
    @contextmanager
    def run() -> Iterator[Server]:
        s = Server(make(InferenceEngine(EngineConfig(str(folder), device="cpu", dtype="float32", max_model_len=64, chat_template=template)), served_model_name="tiny"))
        try: yield s
        finally: s.close()
    return run()


def test_words_in_a_log_do_not_become_a_page():
    "Every place of an event that a stranger's words reach, in the page that replays it."
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    trace = Trace()
    for kind in ("engine", "submit", "finish", "marker"): trace.emit(kind, seq=0, request=evil, text=evil, model=evil, reason=evil)
    page = trace.to_html()
    assert evil not in page and "<img src=x" not in page and "alert(1)</script>" not in page


def test_the_page_may_run_its_own_scripts_only():
    with tiny_http() as s: headers = s.http.get("/").headers
    policy = dict(p.strip().partition(" ")[::2] for p in headers["content-security-policy"].split(";"))
    assert "unsafe" not in policy["script-src"] and policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'" and headers["x-content-type-options"] == "nosniff"
    assert not any(h.startswith("access-control") for h in headers)


def test_the_limits_in_the_document_are_the_ones_in_the_code():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    from llminfer import grammars, handles, sampling, templates
    from llminfer.completions import Service
    limits = ServingLimits()
    for n in (2**23, api.MAX_HEADERS, handles.MAX_STOP_CHARS, sampling.MOST["logit_bias"], sampling.MOST["stop_token_ids"], grammars.MOST_CHARS, grammars.MOST_DEPTH, templates.MOST_TURNS, templates.MOST_CHARS,
              Service.max_choices, 128, limits.max_queued_requests, limits.max_queued_tokens): assert f"{n:,}" in text, f"{n:,} is not in SECURITY.md"


