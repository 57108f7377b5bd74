"""Bad inputs that need no server: I10 (arguments of the command line) and I11 (model folders)."""
from __future__ import annotations
import itertools, json, os, random, struct, time, warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Callable
from typer.testing import CliRunner
from reliability.table import Counted, family
from llminfer import cli
from llminfer.config import ConfigError
from llminfer.formats import LoadError
from llminfer.loading import load_model, make_tiny, open_checkpoint
from llminfer.model import ModelError
from llminfer.tokenization import TokenizerError, load_tokenizer

LIMIT_S = 5.0


@cache
def folder() -> str: return str(make_tiny(Path(mkdtemp()) / "a model 🌶", seed=7))


# I10: the command line

NUMBERS: dict[str, tuple[str, ...]] = {   # flags and values that are out of range, for commands that take them
    "run stream chat": ("--max-tokens -1", "--max-tokens 99999999999999999999", "--max-tokens 1.5", "--temp -1", "--temp 2.1", "--temp nan", "--temp inf", "--temp x", "--top-p 0", "--top-p 1.01", "--top-k -2",
        "--top-k 1.5", "--min-p -0.1", "--min-p 2", "--repetition-penalty 0", "--repetition-penalty -1", "--presence-penalty 3", "--frequency-penalty -2.5", "--no-repeat-ngram-size -1", "--seed x",
        "--seed 99999999999999999999", "--min-tokens -1"),
    "run stream": ("--logprobs 21", "--logprobs -1"),
    "run stream chat info serve": ("--page-size-tokens 0", "--page-size-tokens -4", "--num-blocks 1", "--num-blocks x", "--max-model-len 0", "--max-model-len -5", "--max-num-seqs 0", "--max-num-seqs 99999999",
        "--max-num-batched-tokens 0", "--gpu-memory-utilization 0", "--gpu-memory-utilization 1.5", "--gpu-memory-utilization nan", "--threads 0", "--threads -1", "--device tpu", "--device cuda:99", "--device ''",
        "--dtype float8", "--quant int3", "--backend nope", "--kernels mps", "--attention-backend magic", "--tp-size 0", "--decode-window-size 0", "--tokenizer /nowhere/🌶/tok", "--chat-template /nowhere/t.jinja",
        "--spec-num-assistant-tokens 65", "--spec-confidence-threshold 2", "--no-such-flag", "--no-such-flag=5", "--max-model-len"),
    "serve": ("--port 70000", "--port -1", "--port x", "--drain -1", "--drain nan", "--max-body-mb 0", "--keep-alive 0", "--log-level loud", "--log-format xml", "--engine fork", "--host 999.1.1.1",
        "--host 'no such host'", "--api-key ''", "--api-key-file '/nowhere/the keys 🌶'", "--lora-modules x", "--lora-modules =y", "--lora-modules a=/b --lora-modules a=/c", "--max-queue-size -1",
        "--request-timeout -1", "--metrics-names x", "--reasoning-field x"),
    "run stream chat info": ("-m '/nowhere/a path with spaces'", "-m /nowhere/🌶", "-m ''", "-m no/such/model/at/all", "-m nowhere.gguf", "-m /dev/null", "-m /etc/passwd", "-m ~nobody-at-all/x")}
OTHERS = ("nosuch", "run", "run a b", "run ''", "run '' -m MODEL", "stream", "pull", "pull a b", "pull /nowhere/x", "pull 'a b'", "pull --revision", "make-bundle", "make-bundle /proc/x", "make-bundle X --no-such", "trace",
    "trace /nowhere.jsonl", "trace /etc/passwd", "trace /dev/null", "info extra", "bench --num-prompts -1", "bench --num-prompts 5", "bench --num-prompts x", "bench --batch-sizes 0", "compare --batch-sizes x", "batch", "batch /nowhere.jsonl", "judge", "judge /nowhere.json",
    "run hi --trace /nowhere/dir/t.jsonl -m MODEL", "run hi --trace /proc -m MODEL", "run hi --adapter /nowhere/lora -m MODEL", "run hi --no-chat --system x -m MODEL", "run \udcff -m MODEL", "--nosuch", "run --help=5")


def command_lines() -> list[list[str]]:
    import shlex
    out = [shlex.split(line.replace("MODEL", shlex.quote(folder()))) for line in OTHERS]
    for commands, faults in NUMBERS.items():
        for command, fault in itertools.product(commands.split(), faults):
            model = [] if fault.startswith("-m") else ["-m", folder()]
            prompt = ["hi"] if command in ("run", "stream") else []
            out.append([command, *prompt, *model, *(["--port", "0"] if command == "serve" and "--port" not in fault else []), *shlex.split(fault)])
    return out


def refused_line(argv: list[str]) -> None:
    "Exit code 2 (1 where nothing is wrong with the words), one line on standard error, no traceback, at once."
    start = time.monotonic()
    r = CliRunner().invoke(cli.app, argv, prog_name="llminfer", input="")
    took = time.monotonic() - start
    assert isinstance(r.exception, SystemExit), repr(r.exception)
    assert r.exit_code == 2, (r.exit_code, r.output[-300:])
    assert "Traceback" not in r.output and r.stderr.startswith("error: ") and r.stderr.count("\n") == 1 and len(r.stderr) < 600, r.stderr[-600:]
    assert took < LIMIT_S, f"{took:.1f} s"


@family("I10", "Arguments of the command line", goal=200, sample=40)
def arguments(seed: int, count: int, c: Counted) -> None:
    env = {k: os.environ.pop(k) for k in ("LLMINFER_AUDIT", "LLMINFER_API_KEY", "HF_TOKEN") if k in os.environ}
    try:
        for argv in random.Random(seed).sample(command_lines(), count):
            with c.case(argv): refused_line(argv)
    finally: os.environ.update(env)


# I11: model folders

def config(**kw: Any) -> Callable[[Path], None]:
    "Change keys of config.json; None drops one."
    def change(p: Path) -> None:
        d = json.loads((p / "config.json").read_text()) | kw
        (p / "config.json").write_text(json.dumps({k: v for k, v in d.items() if v is not None}))
    return change


def replace(name: str, data: bytes) -> Callable[[Path], Any]: return lambda p: (p / name).write_bytes(data)


def remove(*names: str) -> Callable[[Path], None]:
    def change(p: Path) -> None:
        for n in names: (p / n).unlink()
    return change


def weights(change: Callable[[bytearray, int], bytes | bytearray]) -> Callable[[Path], None]:
    "Change the bytes of the weights; the second argument is the length of the header."
    def apply(p: Path) -> None:
        raw = bytearray((p / "model.safetensors").read_bytes())
        (p / "model.safetensors").write_bytes(change(raw, struct.unpack("<Q", raw[:8])[0]))
    return apply


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    "Change the header of the weights."
    def new(raw: bytearray, n: int) -> bytes:
        d = json.loads(raw[8:8 + n])
        h = json.dumps(change(d) or d).encode()
        return struct.pack("<Q", len(h)) + h + bytes(raw[8 + n:])
    return weights(new)


def shards(where: dict[str, Any]) -> Callable[[Path], None]:
    def change(p: Path) -> None:
        (p / "model.safetensors").rename(p / "part.safetensors")
        (p / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return change


def first(d: dict[str, Any]) -> dict[str, Any]: return d[next(k for k in d if k != "__metadata__")]


def template(text: str) -> Callable[[Path], None]:
    def change(p: Path) -> None:
        d = json.loads((p / "tokenizer_config.json").read_text())
        (p / "tokenizer_config.json").write_text(json.dumps(d | {"chat_template": text}))
    return change


def vocabulary(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(p: Path) -> None:
        d = json.loads((p / "tokenizer.json").read_text())
        change(d)
        (p / "tokenizer.json").write_text(json.dumps(d))
    return apply


def folder_for_file(p: Path) -> None:
    (p / "model.safetensors").unlink()
    (p / "model.safetensors").mkdir()


NAME = "model.layers.0.self_attn.q_proj.weight"
FOLDERS: dict[str, Callable[[Path], Any]] = {
    "no config": remove("config.json"), "empty config": replace("config.json", b""), "config of NULs": replace("config.json", bytes(500)), "config is a list": replace("config.json", b"[]"),
    "config is cut": replace("config.json", b'{"architectures": ["Llama'), "config nested 10,000 deep": replace("config.json", b"[" * 10000), "config is UTF-16": replace("config.json", "{}".encode("utf-16")),
    "unknown architecture": config(architectures=["MambaForCausalLM"], model_type="mamba"), "no architecture": config(architectures=None, model_type=None), "architectures is a text": config(architectures="Llama"),
    "an encoder": config(architectures=["BertModel"], model_type="bert"), "5 heads on 2": config(num_attention_heads=5), "heads 0": config(num_attention_heads=0), "heads -4": config(num_attention_heads=-4),
    "3 KV heads of 4": config(num_key_value_heads=3), "KV heads 0": config(num_key_value_heads=0), "more KV heads than heads": config(num_key_value_heads=8), "hidden 0": config(hidden_size=0), "hidden 63": config(hidden_size=63),
    "hidden is a text": config(hidden_size="64"), "hidden 1e400": replace("config.json", b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1e400}'), "layers 0": config(num_hidden_layers=0),
    "layers 3, weights of 2": config(num_hidden_layers=3), "layers 1, weights of 2": config(num_hidden_layers=1), "layers 10**9": config(num_hidden_layers=10**9), "vocabulary 0": config(vocab_size=0),
    "vocabulary 511": config(vocab_size=511), "vocabulary 10**12": config(vocab_size=10**12), "inner size 1": config(intermediate_size=1), "head size odd": config(head_dim=15), "head size -16": config(head_dim=-16),
    "rope spiral": config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "rope is a text": config(rope_scaling="linear"), "rope factor 0": config(rope_scaling={"rope_type": "linear", "factor": 0}),
    "rope factor NaN": config(rope_scaling={"rope_type": "linear", "factor": float("nan")}), "rope without factor": config(rope_scaling={"rope_type": "linear"}), "rope theta 0": config(rope_theta=0),
    "norm eps -1": config(rms_norm_eps=-1), "activation snake": config(hidden_act="snake"), "context 0": config(max_position_embeddings=0), "context -1": config(max_position_embeddings=-1),
    "remote code": config(auto_map={"AutoModelForCausalLM": "evil.Model"}, architectures=["EvilForCausalLM"], model_type="evil"),
    "eos is a text": config(eos_token_id="x"), "quantised by somebody": config(quantization_config={"quant_method": "nobody"}),
    "no weights": remove("model.safetensors"), "weights are empty": replace("model.safetensors", b""), "weights of 7 bytes": replace("model.safetensors", b"1234567"), "weights are text": replace("model.safetensors", b"hello " * 100),
    "header longer than the file": weights(lambda raw, n: struct.pack("<Q", 2**40) + raw[8:]), "header 2**63": weights(lambda raw, n: struct.pack("<Q", 2**63) + raw[8:]), "header 0": weights(lambda raw, n: struct.pack("<Q", 0) + raw[8:]),
    "half the weights": weights(lambda raw, n: raw[:len(raw) // 2]), "one byte less": weights(lambda raw, n: raw[:-1]), "a flipped byte in the header": weights(lambda raw, n: raw[:40] + bytes([raw[40] ^ 255]) + raw[41:]),
    "header is a list": weights(lambda raw, n: struct.pack("<Q", 2) + b"[]"), "offsets beyond the end": header(lambda d: first(d).update(data_offsets=[0, 10**12])), "offsets negative": header(lambda d: first(d).update(data_offsets=[-8, 8])),
    "offsets reversed": header(lambda d: first(d).update(data_offsets=first(d)["data_offsets"][::-1])), "shape does not fit": header(lambda d: first(d).update(shape=[1, 1])), "shape negative": header(lambda d: first(d).update(shape=[-1, -64])),
    "shape huge": header(lambda d: first(d).update(shape=[2**40, 2**40])), "dtype unknown": header(lambda d: first(d).update(dtype="F13")), "dtype missing": header(lambda d: first(d).pop("dtype") and None),
    "a tensor of integers": header(lambda d: d[NAME].update(dtype="I32")), "a tensor less": header(lambda d: d.pop(NAME) and None), "a tensor renamed": header(lambda d: d.update(strange=d.pop(NAME))),
    "index to a missing file": shards({NAME: "gone.safetensors"}), "index leaves the folder": shards({NAME: "../../../etc/passwd"}), "index is absolute": shards({NAME: "/etc/passwd"}), "index of numbers": shards({NAME: 5}),
    "index is empty": shards({}), "a pickle instead": lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
    "no tokenizer": remove("tokenizer.json"), "tokenizer is empty": replace("tokenizer.json", b""), "tokenizer is {}": replace("tokenizer.json", b"{}"), "tokenizer of an unknown kind": vocabulary(lambda d: d["model"].update(type="Magic")),
    "vocabulary larger than the model": vocabulary(lambda d: d["model"]["vocab"].update({f"new{i}": 512 + i for i in range(9)})), "merges of nothing": vocabulary(lambda d: d["model"].update(merges=[["no", "such"]])),
    "template does not parse": template("{% for %}"), "template with an unknown tag": template("{% python %}"), "template with an unknown filter": template("{{ messages | nosuch }}"),
    "a folder instead of weights": folder_for_file}


def refused_folder(path: Path) -> None:
    "Some part of loading says in one line what is wrong with which file; nothing else is raised, and it does not take long."
    start, said = time.monotonic(), None
    try:
        ckpt = open_checkpoint(path)
        tok = load_tokenizer(ckpt.tokenizer, ckpt.config.vocab_size)
        load_model(ckpt)
        tok.encode_chat([{"role": "user", "content": "x"}])
    except (LoadError, ModelError, TokenizerError, ConfigError) as e: said = str(e)
    assert said is not None, "it loaded"
    assert "\n" not in said and len(said) < 500 and path.name in said, said
    assert time.monotonic() - start < LIMIT_S


@family("I11", "Model folders", goal=80, sample=25)
def folders(seed: int, count: int, c: Counted) -> None:
    names = sorted(FOLDERS)
    with TemporaryDirectory() as d, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k, name in enumerate(random.Random(seed).sample(names * -(-count // len(names)), count)):
            path = make_tiny(Path(d) / f"model-{k}", seed=seed, num_hidden_layers=2)
            with c.case(name):
                FOLDERS[name](path)
                refused_folder(path)
