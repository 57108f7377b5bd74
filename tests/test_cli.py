"""The command line: every flag does something or is refused by name, every mistake is one line, text stays as the model wrote it."""
import json, os, re, signal, subprocess, sys
from dataclasses import fields, replace
import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner
from llminfer import cli, cli_flags
from llminfer.config import Backend, QuantMode
from llminfer.loading import make_tiny
from llminfer.request import CompletionOutput, GenerationResult, StreamChunk
from llminfer.tracing import inject
from house import ROOT

@pytest.fixture(scope="session")
def tiny(tmp_path_factory): return str(make_tiny(tmp_path_factory.mktemp("cli") / "tiny", seed=7))

@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    for name in ("HF_TOKEN", "LLMINFER_DEBUG"): monkeypatch.delenv(name, raising=False)

def call(*args, **kw): return CliRunner().invoke(cli.app, [str(a) for a in args], prog_name="llminfer", **kw)

def ok(*args, **kw):
    r = call(*args, **kw)
    assert r.exit_code == 0, r.output
    return r.stdout

def refused(*args, words=(), code=2, **kw):
    "One line on stderr, nothing on stdout."
    r = call(*args, **kw)
    assert r.exit_code == code and r.stdout == "", r.output
    assert r.stderr.startswith("error: ") and r.stderr.count("\n") == 1 and len(r.stderr) < 500, r.stderr
    for w in words: assert str(w) in r.stderr, (w, r.stderr)
    return r.stderr

def process(*args, **kw):
    "The same in a process of its own."
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([sys.executable, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env, **kw)

def finished(p, seconds=60):
    out, err = p.communicate(timeout=seconds)
    return p.returncode, out, err

# --- help ----------------------------------------------------------------------------------------------------------------------------

def test_help_is_complete_and_loads_no_torch():
    p = process("-c", "import sys; from llminfer.cli import app; app(['--help'], standalone_mode=False); print({'torch', 'fastapi', 'uvicorn', 'numpy'} & set(sys.modules))")
    code, out, err = finished(p)
    assert code == 0 and out.splitlines()[-1] == "set()" and err == "" and all(c in out for c in ("run", "stream", "chat", "serve", "pull", "make-bundle", "info"))
    assert call().stdout == call("-h").stdout == call("--help").stdout
    assert ok("--version") == "llminfer 0.1.0\n"
    for command, groups in (("run", (cli.EngineFlags, cli.GenerateFlags)), ("stream", (cli.EngineFlags, cli.GenerateFlags)), ("info", (cli.EngineFlags,)), ("pull", (cli.HubFlags,)),
                            ("chat", (cli.EngineFlags, cli.ChatFlags)), ("serve", (cli.ServeFlags,))):
        text = ok(command, "--help", env={"COLUMNS": "60"})
        for g in groups:
            for f in fields(g): assert re.search(re.escape("--" + f.name.replace("_", "-")) + r"\b", text), (command, f.name)   # never cut short

# --- each flag of the contract runs, or is refused by name -----------------------------------------------------------------------------

SHARED = ["--backend auto", "-b paged", "--quant none", "--quant int8", "--quant nf4", "-q fp4", "-q int4", "--quant fp8", "--revision main", "--hf-token secret", "--local-files-only", "--trust-remote-code",
    "--no-trust-remote-code", "--cache-dir /tmp", "--paged-kv", "--no-paged-kv", "--page-size-tokens 4", "--tp-size 1", "--pp-size 1", "--no-compile-fullgraph",
    "--compile-cudagraphs", "--no-compile-cudagraphs", "--device cpu", "--dtype float64", "--json", "--max-model-len 64", "--max-num-seqs 2", "--gpu-memory-utilization 0.5", "--threads 1",
    "--block-size 8", "--num-blocks 80", "--prefix-cache", "--no-prefix-cache", "--decode-window-size 2", "--max-num-batched-tokens 64", "--prefill-chunk-size 32", "--kernels torch", "--attention-backend torch", "--attention-backend auto", "--spec-num-assistant-tokens 3", "--spec-confidence-threshold 0.9"]
SHARED_REFUSED = ["-b vllm", "--backend upstream", "--quant gguf", "-q int3", "--tp-size 5", "--pp-size 2", "--compile-fullgraph",
    "--spec-num-assistant-tokens 65", "--spec-confidence-threshold 2", "--device cuda:99", "--dtype float8", "--page-size-tokens 0", "--tp-size 0", "--gpu-memory-utilization 2",
    "--max-model-len 513", "--max-num-seqs 0", "--threads 0", "--num-blocks 1", "--decode-window-size 0", "--prefill-chunk-size 0",
    "--kernels mps", "--attention-backend magic", "--tokenizer /nowhere/tok", "--chat-template /nowhere/t.jinja"]
GENERATE = ["--max-tokens 1", "--temp 0", "--top-p 0.5", "--top-k 5", "--repetition-penalty 1.1", "--no-repeat-ngram-size 2", "--stop END,STOP", "--seed 42", "--bad-words foo,bar",
    "--min-p 0.1", "--presence-penalty 1", "--frequency-penalty -1", "--ignore-eos", "--min-tokens 2", "--chat", "--no-chat", "--system hi", "--force-words foo"]
GENERATE_REFUSED = ["--adapter some/lora", "--assistant-model demo", "--temp 9", "--top-p 0", "--top-k -2", "--min-p 2", "--seed x", "--max-tokens -1", "--logprobs 21",
    "--repetition-penalty 0", "--no-repeat-ngram-size -1", "--presence-penalty 3", "--frequency-penalty x", "--min-tokens 5", "--temp nan", "--adapter-name x"]

def split(line):
    name, _, value = line.partition(" ")
    return [name, value] if value else [name]

@pytest.mark.parametrize("command", ["run", "stream", "info"])
def test_every_flag_runs_or_is_refused_by_name(command, tiny):
    generates = command != "info"
    base = [command, *(["hello", "--max-tokens", 3] if generates else []), "-m", tiny]
    for line in SHARED + GENERATE * generates:
        r = call(*base, *split(line))
        assert r.exit_code == 0 and r.stdout and r.stderr == "" and "secret" not in r.output, (line, r.output)
    for line in SHARED_REFUSED + GENERATE_REFUSED * generates:
        name, value = split(line)[0], line.partition(" ")[2]
        name = {"-b": "--backend", "-q": "--quant", "--prefill-chunk-size": "--max-num-batched-tokens", "--chat-template": "chat", "--tokenizer": "tok"}.get(name, name)
        words = {"--force-words": (name,), "-b vllm": ("vllm", "pip install"), "--backend upstream": ("--upstream-url",)}
        refused(*base, *split(line), words=words.get(name, words.get(line, (name, value))))

def test_no_flag_is_inert():
    "Every field of the flags reaches the engine's settings or the request, or has a test of its own below."
    behaviours = {"json", "trace", "chat", "system", "adapter", "adapter_name", "load"}
    other = {"backend": Backend.PAGED, "quant": QuantMode.NF4, "device": "cpu", "dtype": "float64", "max_tokens": 9, "temp": 1.0, "top_p": 0.5, "min_p": 0.5, "stop": ["a"], "bad_words": ["a"],
        "force_words": ["a"], "gpu_memory_utilization": 0.5, "spec_confidence_threshold": 0.5, "hf_token": "t", "repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0,
        "page_size_tokens": 4, "logprobs": 2, "max_model_len": 99, "model": "x", "revision": "x", "cache_dir": "x", "assistant_model": "x", "tokenizer": "x", "chat_template": "x", "attention_backend": "torch", "kernels": "torch", "upstream_url": "http://x", "upstream_api_key": "t", "kv_cache_dtype": "int8", "spec_method": "self"}
    e, g = cli.EngineFlags(), cli.GenerateFlags()
    made = lambda e, g: (cli.engine_config(replace(e, backend=Backend.COMPILED if e.compile_fullgraph else e.backend), g), cli.request_fields("p", g))
    plain, compiled = made(e, g), (cli.engine_config(replace(e, backend=Backend.COMPILED), g), cli.request_fields("p", g))
    for flags in (e, g):
        for f in fields(flags):
            if f.name in behaviours: continue
            old = getattr(flags, f.name)
            new = replace(flags, **{f.name: other[f.name] if f.name in other else not old if isinstance(old, bool) else (old or 0) + 3})
            if f.name == "spec_layers": new = replace(new, spec_method="self")
            got = made(new, g) if flags is e else made(e, new)
            assert repr(got) != repr(plain) and repr(got) != repr(compiled) or f.name in ("hf_token", "upstream_api_key") and "t" in (got[0].hf_token, got[0].upstream_api_key), f.name

# --- mistakes --------------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def broken(tmp_path):
    "A folder with one thing wrong with it."
    def make(truncate=None, **config):
        folder = make_tiny(tmp_path / "m")
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
        if truncate:
            w = folder / "model.safetensors"
            w.write_bytes(w.read_bytes()[:truncate])
        return folder
    return make

@pytest.mark.parametrize("command", [("run", "hello"), ("stream", "hello"), ("info",)], ids=lambda c: c[0])
def test_bad_models_are_one_line(command, broken, tmp_path):
    trace = tmp_path / "t.jsonl"
    more = () if command == ("info",) else ("--trace", trace)
    for fault, words in ((dict(architectures=["MambaForCausalLM"], model_type="mamba"), ("Mamba",)), (dict(rope_scaling={"rope_type": "spiral", "factor": 2.0}), ("spiral",)),
                         (dict(truncate=5000), ("model.safetensors",))):
        refused(*command, "-m", folder := broken(**fault), "-b", "paged", *more, words=words)
        assert not trace.exists() and sorted(p.name for p in folder.iterdir()) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in ("/nowhere/model", "nowhere.gguf", str(tmp_path), "no/such-model"): refused(*command, "-m", name, "--local-files-only", words=(name,))
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all")
    refused(*command, "-m", tmp_path / "bad.gguf", words=("bad.gguf",))

@pytest.mark.parametrize("command", ["run", "stream"])
def test_bad_prompts_are_one_line(command, tiny, tmp_path):
    assert {"512", "801"} <= set(re.findall(r"\d+", refused(command, "x" * 801, "-m", tiny, "--no-chat")))
    assert {"40", "81"} <= set(re.findall(r"\d+", refused(command, "-", "-m", tiny, "--no-chat", "--max-model-len", 40, input="x" * 81 + "\n")))
    refused(command, "", "-m", tiny, words=("PROMPT is empty",))
    refused(command, "-", "-m", tiny, input="\n", words=("PROMPT is empty",))
    refused(command, "-", "-m", tiny, input=b"\xff\xfe", words=("UTF-8", "byte 0"))
    refused(command, "half \udcff", "-m", tiny, words=("surrogate",))
    refused(command, "-m", tiny, words=("PROMPT",))
    refused(command, "hi", "-m", tiny, "--no-chat", "--system", "you are", words=("--system", "--no-chat"))
    refused(command, "hi", "-m", tiny, "--trace", tmp_path, words=("--trace", tmp_path, "folder"))
    refused(command, "hi", "-m", tiny, "--trace", tmp_path / "no" / "t", words=("--trace", tmp_path / "no"))
    refused(command, "hi", "--stpo", "x", words=("--stpo", "--stop"))
    refused(command, "hi", "more", words=("more",))
    refused(command, "hi", "--backend", "torch", words=("--backend", "torch", "paged"))
    refused(command, "hi", "--max-tokens=many", words=("--max-tokens", "many"))
    refused("rnu", words=("rnu", "run"))

def test_a_wrong_value_is_told_in_our_words(tiny):
    for line, said in (("--backend vlm", "--backend must be auto, paged, eager, compiled, vllm or upstream, got 'vlm'"), ("-bvlm", "--backend must be auto, paged, eager, compiled, vllm or upstream, got 'vlm'"),
                       ("--quant int9", "--quant must be none, int8, nf4, fp4, int4, fp8 or gguf, got 'int9'"), ("--seed abc", "--seed must be a whole number, got 'abc'"), ("--seed=1.5", "--seed must be a whole number, got '1.5'"),
                       ("--temp hot", "--temp must be a number, got 'hot'"), ("--n x", "--n must be a whole number, got 'x'")):
        assert refused("run", "hi", "-m", tiny, *line.split()) == f"error: {said}\n"
    text = " ".join(ok("run", "--help").split())
    for words in ("upstream: a server", "gguf keeps a GGUF file's own blocks"): assert words in text

def test_other_backends_say_the_same(tiny):
    args = ("run", "hello", "-m", tiny, "--temp", 0, "--max-tokens", 8, "--ignore-eos", "--json")
    assert json.loads(ok(*args, "-b", "eager"))["token_ids"] == json.loads(ok(*args))["token_ids"]

def test_mistakes_in_a_real_process(broken, tiny):
    for args, word in ((("run", "x" * 801, "-m", tiny, "--no-chat"), "512"), (("info", "-m", broken(truncate=100)), "model.safetensors"), (("stream", "hi", "--quant", "int3"), "int3")):
        code, out, err = finished(process("-m", "llminfer.cli", *args))
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and word in err, (out, err)

def test_failures_of_the_engine_are_one_line_and_exit_code_1(tiny, monkeypatch):
    for command in ("run", "stream"):
        with inject("model.forward", RuntimeError("the device\nfell off")): r = call(command, "hi", "-m", tiny)
        assert r.exit_code == 1 and "the device fell off" in r.stderr and "Traceback" not in r.stderr, r.output
        assert [line for line in r.stderr.splitlines() if line.startswith("error: ")] == r.stderr.splitlines()[-1:]
    monkeypatch.setattr(cli, "engine_config", lambda *_: 1 / 0)
    refused("run", "hi", code=1, words=("ZeroDivisionError",))
    monkeypatch.setenv("LLMINFER_DEBUG", "1")
    assert "Traceback" in call("run", "hi").stderr

# --- output ----------------------------------------------------------------------------------------------------------------------------

def test_run_prints_text_and_numbers(tiny):
    from llminfer import EngineConfig, InferenceEngine
    with InferenceEngine(EngineConfig(tiny)) as engine: want = engine.chat([{"role": "user", "content": "hello"}], temperature=0, max_new_tokens=9, ignore_eos=True)
    out = ok("run", "hello", "-m", tiny, "--temp", 0, "--max-tokens", 9, "--ignore-eos")
    assert re.fullmatch(re.escape(f"Generated:\n{want.generated_text}\n") + r"latency=\d+ms  tokens=9  tok/s=\d+\.\d  ttft=\d+ms  finish=length\n", out), out
    streamed = ok("stream", "hello", "-m", tiny, "--temp", 0, "--max-tokens", 9, "--ignore-eos")
    assert re.fullmatch(re.escape(f"Streaming:\n{want.generated_text}\n") + r"latency=\d+ms  tok/s=\d+\.\d  ttft=\d+ms  tokens=9  finish=length\n", streamed), streamed

def test_json_of_run_and_stream(tiny):
    args = ("hello", "-m", tiny, "--seed", 3, "--temp", 1.5, "--max-tokens", 6, "--ignore-eos", "--logprobs", 2, "--json")
    d = json.loads(ok("run", *args))
    assert d["prompt"] == "hello" and d["model"] == tiny and d["finish_reason"] == "length" and d["error"] is None and len(d["token_ids"]) == 6 and "outputs" not in d
    assert d["stats"]["generated_tokens"] == 6 and d["stats"]["prompt_tokens"] == len(d["prompt_token_ids"])
    assert [lp["token_id"] for lp in d["logprobs"]] == d["token_ids"] and all(len(lp["top"]) == 2 for lp in d["logprobs"])
    chunks = [json.loads(line) for line in ok("stream", *args).splitlines()]
    assert "".join(c["token"] for c in chunks) == d["generated_text"] and sum((c["token_ids"] for c in chunks), []) == d["token_ids"]
    assert [c["is_final"] for c in chunks] == [False] * (len(chunks) - 1) + [True] and chunks[-1]["finish_reason"] == "length" and chunks[-1]["stats"]["generated_tokens"] == 6
    assert [lp["token_id"] for c in chunks for lp in c.get("logprobs", [])] == d["token_ids"]
    refused("stream", *args[:-1], words=("--logprobs", "--json"))

def test_samples_and_logprobs_as_text(tiny):
    out = ok("run", "hello", "-m", tiny, "--n", 2, "--seed", 1, "--temp", 1.5, "--max-tokens", 4, "--ignore-eos", "--logprobs", 1)
    assert out.startswith("Generated 1 of 2:\n") and "\nGenerated 2 of 2:\n" in out and len(re.findall(r"^ +-\d+\.\d{4}  rank \d+", out, re.M)) == 8 and "tokens=8" in out and out.endswith("  finish=length,length\n")
    d = json.loads(ok("run", "hello", "-m", tiny, "--n", 2, "--seed", 1, "--temp", 1.5, "--max-tokens", 4, "--ignore-eos", "--json"))
    assert len(d["outputs"]) == 2 and all(f"\n{o['text']}\n" in out for o in d["outputs"])

def test_json_has_no_nan():
    assert cli_flags.plain({"a": float("nan"), "b": [float("-inf"), 1.5, (2, None)], 3: "x"}) == {"a": None, "b": [None, 1.5, [2, None]], 3: "x"}

HOSTILE = "[bold]not bold[/bold] - [x] done [/INST] :smile: C:\\[a] \x1b[31m {curly}\n  two  spaces"

def test_model_text_is_not_markup(tiny, monkeypatch):
    monkeypatch.setattr(cli, "generate", lambda *_: (GenerationResult("id", "p", HOSTILE, outputs=[CompletionOutput(0, HOSTILE)]), False))
    monkeypatch.setattr("llminfer.engine_loop.BaseBackend.stream", lambda *_, **__: (StreamChunk("id", piece) for piece in (HOSTILE[:9], HOSTILE[9:])))
    assert ok("run", "hi", "-m", tiny).startswith(f"Generated:\n{HOSTILE}\nlatency=")
    assert ok("stream", "hi", "-m", tiny).startswith(f"Streaming:\n{HOSTILE}\nlatency=")
    assert json.loads(ok("run", "hi", "-m", tiny, "--json"))["generated_text"] == HOSTILE

def test_panels_show_values_as_they_are(tiny, capsys):
    cli.put_panel("[t]", {"[/a]": "[bold]x[/INST]"})
    assert "[/a]" in (out := capsys.readouterr().out) and "[bold]x[/INST]" in out and "[t]" in out

# --- prompt, stop strings --------------------------------------------------------------------------------------------------------------

def ids(*args, **kw): return json.loads(ok("run", *args, "--json", "--max-tokens", 1, **kw))["prompt_token_ids"]

def test_chat_raw_text_and_standard_input(tiny, tmp_path):
    from llminfer.tokenization import load_tokenizer
    tok = load_tokenizer(tiny)
    user = {"role": "user", "content": "hello <|im_end|>"}
    assert ids(user["content"], "-m", tiny) == ids(user["content"], "-m", tiny, "--chat") == tok.encode_chat([user])
    assert ids(user["content"], "-m", tiny, "--system", "be brief") == tok.encode_chat([{"role": "system", "content": "be brief"}, user])
    assert ids("hello", "-m", tiny, "--no-chat") == ids("-", "-m", tiny, "--no-chat", input="hello\n") == tok.encode("hello")
    assert ids("-", "-m", tiny, "--no-chat", input="two\n\nlines\r\n") == tok.encode("two\n\nlines")
    bare = make_tiny(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text("{}")
    assert ids("hello", "-m", bare) == tok.encode("hello")
    refused("run", "hello", "-m", bare, "--chat", words=("chat template",))
    refused("run", "hello", "-m", bare, "--system", "x", words=("--system", "chat template"))

def test_another_template_and_another_tokenizer(tiny, tmp_path):
    (t := tmp_path / "t.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    from llminfer.tokenization import load_tokenizer
    want = load_tokenizer(tiny).encode("[user] hello", add_special_tokens=False)
    assert ids("hello", "-m", tiny, "--chat-template", t) == ids("hello", "-m", tiny, "--chat-template", t.read_text()) == want
    other = make_tiny(tmp_path / "other", seed=1)
    tok = json.loads((other / "tokenizer_config.json").read_text())
    tok["chat_template"] = "{{ messages[0].content }}"
    (other / "tokenizer_config.json").write_text(json.dumps(tok))
    assert ids("hello", "-m", tiny, "--tokenizer", other) == load_tokenizer(tiny).encode("hello", add_special_tokens=False)

def quote(words): return ",".join(re.sub(r"[\\,]", r"\\\g<0>", w).replace("\n", r"\n").replace("\t", r"\t").replace("\r", r"\r") for w in words)

@given(st.lists(st.lists(st.text(st.sampled_from("ab\\,nrt\n\t\r "), max_size=5), max_size=4), max_size=3))
def test_any_list_of_texts_can_be_written(lists):
    assert cli_flags.split_words([quote(words) for words in lists]) == ([w for words in lists for w in words if w] or None)

def test_stop_strings(tiny):
    base = ("run", "hello", "-m", tiny, "--no-chat", "--temp", 0, "--max-tokens", 12, "--ignore-eos", "--json")
    whole = json.loads(ok(*base))
    text = whole["generated_text"]
    for empty in (",", "", ",,"):                       # an empty stop stops nothing, and says so
        r = call(*base, "--stop", empty)
        assert json.loads(r.stdout)["token_ids"] == whole["token_ids"] and r.stderr.startswith(f"hint: --stop {empty!r} holds no text") and r.stderr.count("\n") == 1
    cut = text[len(text) // 2:][:2]
    for stops in (["--stop", quote([cut]) + ","], ["--stop", "never", "--stop", quote([cut])]):
        d = json.loads(ok(*base, *stops))
        assert d["generated_text"] == text[:text.index(cut)] and d["finish_reason"] == "stop" and d["stop_reason"] == cut and len(d["token_ids"]) < 12

# --- trace, token, signals, pipes ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("command", ["run", "stream"])
def test_trace_is_json_lines(command, tiny, tmp_path):
    file = tmp_path / "trace.jsonl"
    ok(command, "hello", "-m", tiny, "--max-tokens", 4, "--ignore-eos", "--trace", file)
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert events and all({"t", "event"} <= e.keys() for e in events) and "plan" in {e["event"] for e in events}

@pytest.mark.parametrize("command", ["run", "stream"])
def test_a_request_that_never_ran_leaves_no_trace_file(command, tiny, tmp_path, monkeypatch):
    file = tmp_path / "trace.jsonl"
    refused(command, "x" * 801, "-m", tiny, "--no-chat", "--trace", file, words=("512",))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("llminfer.tracing._plain", lambda v: 1 / 0)       # the disk is full, say: nothing half-written
    monkeypatch.setattr("json.dumps", lambda *_, **__: 1 / 0)
    assert call(command, "hi", "-m", tiny, "--max-tokens", 2, "--trace", file).exit_code == 1 and list(tmp_path.iterdir()) == []

def test_token_is_never_printed(tiny, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_topsecret")
    for args in (("run", "hi", "-m", tiny, "--max-tokens", 1, "--json"), ("info", "-m", tiny, "--json"), ("info", "-m", tiny), ("run", "--help"), ("run", "hi", "-m", "no/model"),
                 ("run", "hi", "-m", "no/model", "--hf-token", "hf_topsecret"), ("run", "hi", "--hf-token", "hf_topsecret", "--max-tokens", "x"), ("pull", "no/model")):
        assert "topsecret" not in call(*args).output
    assert cli.engine_config(cli.EngineFlags(hf_token="")).hf_token is None

@pytest.fixture(scope="session")
def endless(tmp_path_factory): return str(make_tiny(tmp_path_factory.mktemp("cli") / "endless", seed=7, max_position_embeddings=100_000))

LONG = ("hello", "--max-tokens", "90000", "--ignore-eos", "--temp", "0")

def test_ctrl_c_ends_a_stream_and_keeps_its_text(endless):
    p = process("-m", "llminfer.cli", "stream", *LONG, "-m", endless, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert p.stdout.readline() == "Streaming:\n" and len(p.stdout.read(60)) == 60
    p.send_signal(signal.SIGINT)
    code, out, err = finished(p)
    assert code == 130 and re.search(r"\nlatency=\d+ms  tok/s=\d", out) and err == "", (code, out[-200:], err)

def test_ctrl_c_ends_a_run_and_keeps_its_text(endless, tmp_path):
    driver = ("import os, signal, sys, threading; from contextlib import nullcontext; from llminfer import cli; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
              "def status(text):\n  if text == 'Generating...': threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n  return nullcontext()\n"
              "cli.status = status; cli.app(sys.argv[1:])")
    code, out, err = finished(process("-c", driver, "run", *LONG, "-m", endless, "--json", "--trace", tmp_path / "t"))
    d = json.loads(out)
    assert code == 130 and err == "" and d["finish_reason"] == "abort" and d["generated_text"] and 0 < d["stats"]["generated_tokens"] < 90000, (code, out[-200:], err)
    assert (tmp_path / "t").read_text().endswith("\n")

@pytest.mark.parametrize("where", ["unload", "atexit"])
def test_further_ctrl_c_strike_nothing_while_the_engine_stops(where, endless):
    "Five signals: one while text is made, two in the join of the engine thread, two in what runs at exit."
    driver = ("import atexit, os, signal, sys; from llminfer import backends, cli; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
              "def twice():\n  for _ in range(2): os.kill(os.getpid(), signal.SIGINT)\n"
              "atexit.register(twice); unload = backends.PagedBackend.unload\n"
              "def slow(self):\n  twice(); unload(self); twice(); print('unloaded')\n"
              "if sys.argv.pop(1) == 'unload': backends.PagedBackend.unload = slow\n"
              "cli.app()")
    p = process("-c", driver, where, "stream", *LONG, "-m", endless)
    assert p.stdout.readline() == "Streaming:\n" and len(p.stdout.read(60)) == 60
    p.send_signal(signal.SIGINT)
    code, out, err = finished(p)
    assert code == 130 and err == "" and re.search(r"\nlatency=.*finish=abort\n", out) and out.endswith("unloaded\n") == (where == "unload"), (code, out[-200:], err)

def test_a_command_run_inside_a_program_leaves_its_signals_alone(tiny):
    before = signal.getsignal(signal.SIGINT)
    ok("run", "hi", "-m", tiny, "--max-tokens", 1)
    refused("run", "hi", "--temp", 9)
    assert signal.getsignal(signal.SIGINT) is before

def test_a_closed_pipe_is_quiet(endless):
    p = process("-m", "llminfer.cli", "stream", *LONG, "-m", endless)
    assert p.stdout.readline() == "Streaming:\n" and p.stdout.read(20)
    p.stdout.close()
    assert p.wait(60) == 1 and p.stderr.read() == ""
    p.stderr.close()

def test_closed_and_full_streams_are_one_line(tiny):
    for shell, words in ((">&-", "standard output is closed"), (">/dev/full", "output cannot be written: No space left")):
        p = process("-c", f"import os; os.execvp('sh', ['sh', '-c', '{sys.executable} -m llminfer.cli --version {shell}'])")
        code, out, err = finished(p)
        assert code == 1 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err, err
    p = process("-c", f"import os; os.execvp('sh', ['sh', '-c', '{sys.executable} -m llminfer.cli run - -m {tiny} --max-tokens 1 <&-'])")
    code, out, err = finished(p)
    assert code == 2 and "PROMPT is empty" in err and err.count("\n") == 1

def test_a_trace_that_cannot_be_written_leaves_the_old_one(tmp_path):
    class Trace:
        events = [1]
        def save(self, path):
            with open(path, "w") as f: f.write("half")
            raise OSError(28, "No space left on device")
    (tmp_path / "t").write_text("old")
    with pytest.raises(OSError) as e: cli_flags.save_trace(Trace(), tmp_path / "t")
    assert cli.failure(e.value) == (2, f"{tmp_path}/t: No space left on device") and [f.read_text() for f in tmp_path.iterdir()] == ["old"]

def test_a_server_upstream_answers_prompts_and_chats():
    from support.fake_openai import fake_openai
    with fake_openai() as (url, fake):
        args = ("-b", "upstream", "--upstream-url", url, "--max-tokens", 5)
        for command in ("run", "stream"):
            assert "You said: hi" in ok(command, "hi", *args)
            call(command, "hi", *args, "--no-chat")
            assert fake.requests[-1]["prompt"] == "hi" and "messages" not in fake.requests[-1]
        ok("run", "hi", *args, "--system", "be brief")
        assert [m["role"] for m in fake.requests[-1]["messages"]] == ["system", "user"]
        assert ok("chat", *args, input="hi\nmore\n").startswith("You said: hi\nYou said: more\n")
        assert [m["content"] for m in fake.requests[-1]["messages"]] == ["hi", "You said: hi", "more"]
        r = call("chat", *args, input="hi\n/more\n")
        assert r.exit_code == 2 and "stay with the server" in r.stderr

# --- make-bundle -----------------------------------------------------------------------------------------------------------------------

def test_make_bundle_makes_a_model_that_runs(tmp_path):
    folder = tmp_path / "b"
    assert ok("make-bundle", folder, "--seed", 3) == f"{folder}\n" and sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "manifest.json", "tokenizer.json", "weights.pt"]
    refused("make-bundle", folder, words=(folder,))
    refused("make-bundle", tmp_path / "c", "--preset", "huge", words=("huge", "tiny"))
    refused("make-bundle", tmp_path / "c", "--seed", "x", words=("--seed", "whole number"))
    assert not (tmp_path / "c").exists() and json.loads(ok("make-bundle", tmp_path / "d", "--json")) == {"preset": "tiny", "seed": 0, "path": str(tmp_path / "d")}
    d = json.loads(ok("run", "hello", "-m", folder, "--temp", 0, "--max-tokens", 3, "--json"))
    assert d["error"] is None and len(d["token_ids"]) >= 1

# --- pull and info ---------------------------------------------------------------------------------------------------------------------

def test_pull_prints_the_path(tiny):
    path = ok("pull", "demo").rstrip("\n")
    assert path.endswith(".gguf") and os.path.isabs(path) and os.path.getsize(path) > 90e6
    assert json.loads(ok("pull", "demo", "--json")) == {"name": "demo", "path": path} and ok("pull", tiny) == tiny + "\n"
    refused("pull", "no/such-model", "--local-files-only", words=("no/such-model",))
    refused("pull", "nowhere.gguf", words=("nowhere.gguf",))
    refused("pull", words=("NAME",))

def test_info_shows_engine_and_cache(tiny):
    out = ok("info", "-m", tiny, "--page-size-tokens", 8)
    assert re.search(r"Engine Info.*block_size +8 .*Cache Stats.*page_size_tokens +8 ", out, re.S) and "Self-check" not in out and "\x1b" not in out
    d = json.loads(ok("info", "-m", tiny, "--json", "--page-size-tokens", 8))
    assert re.search(rf"kv_bytes +{d['engine']['kv_bytes'] / 2**20:.1f} MiB ", out) and type(d["engine"]["kv_bytes"]) is int
    assert d["engine"]["block_size"] == d["cache"]["page_size_tokens"] == 8 and d["machine"]["llminfer"] == "0.1.0" and d["self_check"] == []

@pytest.mark.parametrize("flags, off", [("--dtype float32", {"decode steps"}), ("--dtype float64 --page-size-tokens 3", {"packed linear", "decode steps"}), ("--dtype bfloat16", {"packed linear", "decode steps"}),
    ("--quant int8", {"decode steps"}), ("--no-paged-kv", {"prefix cache", "decode steps"}), ("--max-model-len 8", {"prefix cache", "decode steps"}), ("--max-model-len 2", {"prefix cache", "decode steps"})])
def test_self_check(flags, off, tiny):
    checks = {c["name"]: c for c in json.loads(ok("info", "-m", tiny, "--self-check", "--json", *flags.split()))["self_check"]}
    ours = {"packed linear", "paged attention", "prefix cache", "decode steps"}
    assert {n for n in ours if checks[n]["state"] == "off"} == off and {n for n in ours if checks[n]["state"] == "ok"} == ours - off
    assert all(c["detail"] and c["state"] in ("ok", "off") for c in checks.values()) and checks["captured steps"]["detail"] == "eager (nothing to capture on a CPU)"

def test_self_check_sees_wrong_numbers(tiny, monkeypatch):
    from llminfer.model import Transformer
    right = Transformer.logits
    monkeypatch.setattr(Transformer, "logits", lambda self, ids: right(self, ids).roll(1, -1))
    r = call("info", "-m", tiny, "--self-check")
    assert r.exit_code == 1 and re.search(r"paged attention +failed +0 of 8", r.stdout) and re.search(r"packed linear +ok", r.stdout)
    with inject("model.forward", RuntimeError("boom"), times=10**9): r = call("info", "-m", tiny, "--self-check", "--json")
    assert r.exit_code == 1 and [c["name"] for c in json.loads(r.stdout)["self_check"] if c["state"] == "failed"] == ["paged attention", "prefix cache"]

# --- the demo model --------------------------------------------------------------------------------------------------------------------

def test_the_demo_model_answers():
    assert "Paris" in ok("run", "What is the capital of France?", "--temp", 0, "--max-tokens", 12)

def test_the_demo_draws_the_pool():
    code, out, err = finished(process("examples/demo.py"), 120)
    assert code == 0 and err == "" and max(map(len, out.splitlines())) <= 96
    for part in ("A's prompt is in", "all four run", "B has ended", "nothing is held", "=", "What does a bee", "ttft="): assert part in out
    assert re.search(r"\ntokens=\d+  latency=\d+ms  ttft=\d+ms  tok/s=\d", out) and "0 held" in out

def test_a_trace_tells_guesses(tiny, tmp_path):
    "As many as the run itself counted."
    d = json.loads(ok("run", "the cat the cat the cat the cat", "-m", tiny, "--no-chat", "--temp", 0, "--max-tokens", 60, "--ignore-eos", "--json", "--trace", tmp_path / "t"))
    s, words = json.loads(ok("trace", tmp_path / "t", "--json")), ok("trace", tmp_path / "t")
    assert (s["draft_tokens"], s["accepted_tokens"]) == (d["stats"]["draft_tokens"], d["stats"]["accepted_tokens"]) and s["draft_tokens"] > 0
    assert f"guesses: {s['draft_tokens']:,} tokens ahead, {s['accepted_tokens']:,} of them right" in words
