"Esme bundles: the format to the letter, every damage named, the same logits as Qwen3 in transformers, and chats as trained."
import io, json, warnings
from hashlib import sha256
from pathlib import Path
import numpy as np
import pytest
import torch
from llminfer import bundles
from llminfer.bundles import CONFIG_KEYS, FILES, PRESETS, bundle_to_hf, make_bundle, open_bundle, synthetic_tensors, write_bundle
from llminfer.formats import LoadError
from llminfer.loading import load_model, open_checkpoint
from llminfer.model import Transformer
from llminfer.tokenization import TokenizerError, load_tokenizer
from support.checkpoints import edit_json, hf_logits, one_line, our_logits, refuse

IDS = [40, 300, 7, 511, 2, 61, 268]

@pytest.fixture(scope="module")
def made(tmp_path_factory): return make_bundle(tmp_path_factory.mktemp("b") / "esme")

@pytest.fixture
def bundle(made, tmp_path):
    "A fresh copy."
    out = tmp_path / "esme"
    out.mkdir()
    for f in made.iterdir(): (out / f.name).write_bytes(f.read_bytes())
    return out

@pytest.fixture(autouse=True)
def no_warning_unless_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield

def manifest(folder): return json.loads((folder / "manifest.json").read_text())

def resign(folder, **kw):
    "Write a manifest with the right hashes."
    m = manifest(folder) | kw
    if m.get("files"): m["files"] = {k: dict(path=f, sha256=sha256((folder / f).read_bytes()).hexdigest()) for k, f in FILES.items()}
    (folder / "manifest.json").write_text(json.dumps(m))

def payload(folder, change):
    p = torch.load(folder / "weights.pt", weights_only=True)
    change(p)
    torch.save(p, folder / "weights.pt")
    resign(folder)

# --- what is written ---------------------------------------------------------------------------------------------------------------

def test_a_bundle_is_the_format_to_the_letter(made):
    assert {f.name for f in made.iterdir()} == {"manifest.json", "config.json", "tokenizer.json", "weights.pt", "README.md"}
    m, c, p = manifest(made), json.loads((made / "config.json").read_text()), torch.load(made / "weights.pt", weights_only=True)
    assert (made / "config.json").read_text() == json.dumps(c, indent=2, sort_keys=True) + "\n"
    assert set(c) == set(CONFIG_KEYS) and c == m["model_config"] == p["model_config"] and m["llm_infer_config"] == p["llm_infer_config"]
    assert (m["schema_version"], m["format"], m["weights_format"], m["model_family"]) == (1, "llm_pretrain_dense_v1", "llm_pretrain_dense_v1", "DenseBackbone")
    assert m["model"] == dict(id="esme-tiny-chat", name="Esme-tiny-Chat", stage="dpo") and m["tokenizer"] == dict(path="tokenizer.json", format="tokenizers-json")
    assert m["eos_token_ids"] == [2] == m["decoding"]["eos_token_ids"] and m["decoding"]["default_add_special_tokens"] is False
    assert (m["chat_template"]["id"], m["chat_template"]["format"], m["chat_template"]["generation_prompt"]) == ("esme_newline_v1", "role_newline_content_newline", "assistant\n")
    assert {k: m["files"][k]["path"] for k in m["files"]} == FILES
    for f in m["files"].values(): assert f["sha256"] == sha256((made / f["path"]).read_bytes()).hexdigest()
    assert set(p) == {"format_version", "format", "key_format", "metadata", "state_dict_key", "model_config", "llm_infer_config", "state_dict", "checkpoint_step", "source_checkpoint", "source_checkpoint_sha256"}
    state = p["state_dict"]
    assert len(state) == 11 * 2 + 3 and all(t.dtype == torch.float32 for t in state.values())
    assert state["lm_head.weight"].data_ptr() == state["token_embedding.weight"].data_ptr() and state["blocks.1.feedforward.w_down.weight"].shape == (64, 128)
    t = json.loads((made / "tokenizer.json").read_text())
    assert [a["content"] for a in t["added_tokens"]] == ["<pad>", "<bos>", "<eos>", "<unk>"] and len(t["model"]["vocab"]) == 512
    assert (t["model"]["unk_token"], t["normalizer"], t["post_processor"], t["decoder"]["type"]) == ("<unk>", None, None, "ByteLevel")
    assert [s["type"] for s in t["pre_tokenizer"]["pretokenizers"]] == ["Digits", "ByteLevel"]

def test_the_same_seed_gives_the_same_bytes(made, tmp_path):
    again, other = make_bundle(tmp_path / "a", seed=0), make_bundle(tmp_path / "b", seed=1)
    assert {f.name: f.read_bytes() for f in again.iterdir()} == {f.name: f.read_bytes() for f in made.iterdir()}
    assert (other / "weights.pt").read_bytes() != (made / "weights.pt").read_bytes()

def test_nothing_is_overwritten_or_left_half_written(made, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("")
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "full", "not an empty folder"), (tmp_path / "file", "not a folder"), (tmp_path / "file/x", "cannot be written")):
        with pytest.raises(LoadError) as e: make_bundle(path)
        one_line(e.value, words, str(path))
    for kw in (dict(preset="big"), dict(seed=-1), dict(seed=1.5), dict(vocab_size=100), dict(vocab_size=99999), dict(heads=3), dict(layers=0), dict(kv_heads=3), dict(rope=1), dict(attention_kind="mla")):
        with pytest.raises(LoadError) as e: make_bundle(tmp_path / "x", **kw)
        one_line(e.value)
    class Full(io.BytesIO):
        def write(self, data): raise OSError(28, "No space left on device")
    monkeypatch.setattr(bundles, "open", lambda *a: Full(), raising=False)     # the writer of torch.save hides the reason
    with pytest.raises(LoadError, match=r"cannot be written \(No space left"): make_bundle(tmp_path / "x")
    monkeypatch.undo()
    for path, words in (("~nosuchuser/x", "nosuchuser"), (tmp_path / "loop", "loop"), ("a\0b", "null")):
        if path == tmp_path / "loop": path.symlink_to(path)
        with pytest.raises(LoadError) as e: make_bundle(path)
        one_line(e.value, words, "cannot be written")
    (tmp_path / "loop").unlink()
    monkeypatch.setattr(torch, "save", lambda *a, **kw: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(LoadError, match="No space left"): make_bundle(tmp_path / "x")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["file", "full"]
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    assert open_bundle(make_bundle(tmp_path / "empty")).model_id == "esme-tiny-chat"
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "here")
    assert open_bundle(make_bundle(tmp_path / "link")).path == tmp_path / "link" and Path("manifest.json").is_file()      # the folder that one stands in is kept
    (tmp_path / "dot").mkdir()
    monkeypatch.chdir(tmp_path / "dot")
    assert len(list(make_bundle(".").iterdir())) == 5 and len(list((tmp_path / "dot").iterdir())) == 5

# --- what is read ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("overrides", [{}, dict(kv_heads=1, layers=3), dict(qk_norm=False), dict(tie_embeddings=False)])
def test_logits_equal_transformers_reading_of_the_converted_bundle(tmp_path, overrides):
    path = make_bundle(tmp_path / "b", seed=4, **overrides)
    hf = bundle_to_hf(path, tmp_path / "hf")
    want = hf_logits(hf, IDS, torch.float64)
    assert (our_logits(path, IDS) - want).abs().max() < 1e-4 and torch.equal(our_logits(hf, IDS), our_logits(path, IDS))
    a, b = open_checkpoint(path), open_checkpoint(hf)
    assert a.config.family == "esme" and a.eos_token_ids == b.eos_token_ids == (2,) and a.config.max_position_embeddings == 256 == b.config.max_position_embeddings
    assert len(b.raw) == len(a.raw) and ("lm_head.weight" in a.raw) == (not a.config.tie_embeddings)

def test_the_engine_stops_at_the_trained_context(made):
    from llminfer.config import EngineConfig
    from llminfer.engine import InferenceEngine
    from llminfer.request import GenerationRequest, RequestError
    with InferenceEngine(EngineConfig(model_name=str(made), device="cpu", num_threads=1)) as engine:
        engine.load()
        r, = engine.run_requests([GenerationRequest("12345 6789", max_new_tokens=None, temperature=0, min_tokens=246)])
        assert (r.finish_reason, r.stats.prompt_tokens + r.stats.generated_tokens) == ("length", 256)
        with pytest.raises(RequestError, match="256"): engine.run("1" * 300, max_new_tokens=1)

BAD_CONFIG = [(dict(rope_thetha=1e4), "rope_thetha"), (dict(logit_soft_cap=7.5), "logit_soft_cap"), (dict(mtp_predict_tokens=2), "mtp_predict_tokens"), (dict(attention_kind="mla"), "attention_kind"),
    (dict(layers=3), "blocks.2."), (dict(vocab_size=511), "token_embedding.weight"), (dict(qk_norm=False), "q_norm"), (dict(heads=5), "heads"), (dict(context_length=0), "context_length"),
    (dict(rms_norm_eps="1"), "rms_norm_eps"), (dict(tie_embeddings=1), "tie_embeddings"), (dict(rope_theta=float("nan")), "rope_theta"), (dict(name=None), "name"), (dict(kv_heads=3), "3 key/value heads")]

@pytest.mark.parametrize("change, word", BAD_CONFIG, ids=str)
def test_a_config_is_strict(bundle, change, word):
    edit_json(bundle / "config.json", **change)
    payload(bundle, lambda p: p.update(model_config=json.loads((bundle / "config.json").read_text()), llm_infer_config=None))
    resign(bundle, model_config=json.loads((bundle / "config.json").read_text()), llm_infer_config=None)
    refuse(bundle, word)

def test_keys_missing_twice_or_different_elsewhere(bundle):
    c = json.loads((bundle / "config.json").read_text())
    for key in CONFIG_KEYS:
        (bundle / "config.json").write_text(json.dumps({k: v for k, v in c.items() if k != key}))
        resign(bundle)
        refuse(bundle, "config.json", repr(key), "missing")
    (bundle / "config.json").write_text(json.dumps(c).replace("{", '{"layers": 1, ', 1))
    resign(bundle)
    refuse(bundle, "config.json", "twice")
    (bundle / "config.json").write_text(json.dumps(c | dict(rope_theta=5000.0)))
    resign(bundle)
    refuse(bundle, "manifest.json", "model_config differs")
    resign(bundle, model_config=c | dict(rope_theta=5000.0))
    refuse(bundle, "weights.pt", "model_config differs")
    for legacy in (dict(logit_soft_cap=0.0), dict(mtp_predict_tokens=0), dict(kv_heads=None)):
        d = c | legacy
        if d["kv_heads"] is None: continue
        (bundle / "config.json").write_text(json.dumps(d))
        payload(bundle, lambda p: p.update(model_config=d))
        resign(bundle, model_config=d)
        assert open_bundle(bundle).config == open_bundle(bundle).config

def test_null_kv_heads_mean_all_heads(tmp_path):
    path = make_bundle(tmp_path / "b", kv_heads=4)
    want = our_logits(path, IDS)
    d = json.loads((path / "config.json").read_text()) | dict(kv_heads=None)
    (path / "config.json").write_text(json.dumps(d))
    payload(path, lambda p: p.update(model_config=d))
    resign(path, model_config=d)
    assert torch.equal(our_logits(path, IDS), want)

def test_tensors_are_checked_by_name_shape_and_kind(bundle):
    name, good = "blocks.1.attention.wk.weight", torch.load(bundle / "weights.pt", weights_only=True)["state_dict"]
    cases = [(lambda s: s.pop(name), [name, "missing"]), (lambda s: s.update({name: s[name].t()}), [name, "[64, 32]", "[32, 64]"]), (lambda s: s.update(extra=s[name]), ["extra"]),
        (lambda s: s.update({name: s[name].long()}), [name, "int64"]), (lambda s: s.update({name: 3}), [name, "int"]), (lambda s: s.update({name: s[name].to_sparse()}), [name]),
        (lambda s: s.update({name: s[name].to("meta")}), [name, "without data"]),
        (lambda s: s.update({"lm_head.weight": s["token_embedding.weight"] * 1.01}), ["lm_head.weight", "differs"])]
    for change, words in cases:
        payload(bundle, lambda p: (p.update(state_dict=dict(good)), change(p["state_dict"])))
        refuse(bundle, "weights.pt", *words)
    for half in (torch.bfloat16, torch.float16, torch.float64):
        payload(bundle, lambda p: p.update(state_dict={n: t.to(half) for n, t in good.items()}))
        assert set(open_checkpoint(bundle).bytes_by_format()) == {dict(bfloat16="BF16", float16="F16", float64="F64")[str(half)[6:]]}
    payload(bundle, lambda p: p.update(state_dict={n: t for n, t in good.items() if n != "lm_head.weight"}))   # tied: it adds nothing
    open_bundle(bundle)
    for change, words in ((lambda p: p.update(format_version=2), ["format_version"]), (lambda p: p.update(format="other"), ["format"]), (lambda p: p.update(key_format="hf"), ["key_format"]), (lambda p: p.update(format_version=True), ["format_version", "True"]),
        (lambda p: p.update(metadata=dict(key_format="hf")), ["metadata", "key_format"]), (lambda p: p.update(llm_infer_config=dict(rope_theta=5e5)), ["llm_infer_config.rope_theta"]), (lambda p: p.pop("state_dict"), ["state_dict"])):
        payload(bundle, lambda p: (p.update(state_dict=dict(good)), change(p)))
        refuse(bundle, "weights.pt", *words)
        payload(bundle, lambda p: p.update(format_version=1, format="llm_pretrain_dense_v1", key_format="llm_pretrain_dense_v1", metadata={}, llm_infer_config=None, state_dict=dict(good)))

def test_manifests_are_checked(bundle):
    good = manifest(bundle)
    def case(*words, **kw):
        (bundle / "manifest.json").write_text(json.dumps({k: v for k, v in (good | kw).items() if v != "-"}))
        refuse(bundle, *words)
    case("manifest.json", "schema_version", schema_version=2)
    case("manifest.json", "format", format="gguf")
    case("manifest.json", "format", format="-")
    case("manifest.json", "weights_format", weights_format="x")
    for one in (True, 1.0, "1"): case("manifest.json", "schema_version", schema_version=one)
    case("manifest.json", "model_family", model_family="Mamba")
    case("manifest.json", "llm_infer_config.hidden_size", "999", llm_infer_config=good["llm_infer_config"] | dict(hidden_size=999))
    case("manifest.json", "tokenizer.path", "other.json", tokenizer=dict(path="other.json"))
    case("manifest.json", "decoding", "default_add_special_tokens", decoding=dict(default_add_special_tokens=True))
    case("manifest.json", "chat_template", "add_special_tokens", chat_template=good["chat_template"] | dict(add_special_tokens=True))
    case("manifest.json", "tokenizer.format", tokenizer=dict(format="spm"))
    case("manifest.json", "eos_token_ids", eos_token_ids=[512])
    case("manifest.json", "eos_token_ids", eos_token_ids=2)
    case("manifest.json", "chat_template", chat_template="{{ x }}")
    case("manifest.json", "chat_template", "'system'", chat_template=dict(roles=dict(user="{content}", assistant="{content}")))
    case("manifest.json", "chat_template", chat_template=dict(format="other"))
    def files(**kw): return dict(files={k: v for k, v in (good["files"] | kw).items() if v is not None})
    case("manifest.json", "files", **files(readme=None))
    case("manifest.json", "files", **files(more=good["files"]["readme"]))
    case("manifest.json", "files.readme", "files.config", "one file", **files(readme=good["files"]["config"] | dict(path="./config.json")))
    case("manifest.json", "files.readme", **files(readme=dict(path="README.md", sha256=good["files"]["readme"]["sha256"].upper())))
    for path in ("../esme/README.md", "/etc/passwd", "a\\..\\README.md", "", "./.."): case("manifest.json", "files.readme", "leaves the bundle", **files(readme=good["files"]["readme"] | dict(path=path)))
    case("nothing.md", "missing", **files(readme=good["files"]["readme"] | dict(path="nothing.md")))
    (bundle / "manifest.json").unlink()
    refuse(bundle, "manifest.json", "missing")

def test_unknown_fields_and_old_bundles_are_read(bundle):
    good = manifest(bundle)
    (bundle / "manifest.json").write_text(json.dumps(good | dict(something_new=[1])))
    assert open_bundle(bundle).model_id == "esme-tiny-chat"
    old = {k: v for k, v in good.items() if k not in ("schema_version", "files", "decoding", "provenance", "llm_infer_config", "chat_template", "eos_token_ids")} | dict(model="x", model_id="mine")
    (bundle / "manifest.json").write_text(json.dumps(old))
    (bundle / "README.md").unlink()
    with pytest.warns(UserWarning, match="no checksums"): c = open_checkpoint(bundle)
    with pytest.warns(UserWarning, match="no checksums"): assert torch.isfinite(load_model(bundle).logits(torch.tensor(IDS))).all()
    assert c.model_id == "mine" and c.eos_token_ids == () and list(c.chat_templates) == ["plain"]
    assert load_tokenizer(c.tokenizer).render_chat([dict(role="user", content="Hi")]) == "user: Hi\nassistant:"
    (bundle / "manifest.json").write_text(json.dumps(good | dict(model={}, eos_token_ids=None, decoding=dict(eos_token_ids=[2, 5]))))
    (bundle / "README.md").write_bytes(b"")
    (bundle / "notes.txt").write_text("")
    refuse(bundle, "README.md", "empty")
    resign(bundle, files=None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        b = open_bundle(bundle)
    assert ["notes.txt" in str(w.message) for w in told] == [False, True] and (b.model_id, b.eos_token_ids) == ("esme", (2, 5))

def test_every_flipped_bit_and_cut_is_found(bundle):
    rng = np.random.default_rng(0)
    for f in (*FILES.values(), "manifest.json"):
        good = (bundle / f).read_bytes()
        for at in rng.integers(0, 8 * len(good), 12).tolist():
            bad = bytearray(good)
            bad[at // 8] ^= 1 << at % 8
            (bundle / f).write_bytes(bad)
            try: open_bundle(bundle)
            except LoadError as e: one_line(e, str(bundle))
            else: assert f == "manifest.json"      # in a value that nothing depends on
        for size in (0, 1, len(good) // 2, len(good) - 1):
            (bundle / f).write_bytes(good[:size])
            if f != "manifest.json" or size < len(good) - 1: refuse(bundle, f)
        (bundle / f).write_bytes(good)

def test_without_checksums_damaged_weights_are_still_one_line(bundle):
    resign(bundle, files=None)
    good, rng = (bundle / "weights.pt").read_bytes(), np.random.default_rng(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (0, 10, 1000, len(good) // 2, len(good) - 10):
            (bundle / "weights.pt").write_bytes(good[:size])
            refuse(bundle, "weights.pt")
        for _ in range(40):
            bad = bytearray(good)
            for at in rng.integers(0, 3000, 3).tolist(): bad[at] ^= 1 << int(rng.integers(8))
            (bundle / "weights.pt").write_bytes(bad)
            try: open_bundle(bundle)
            except LoadError as e: one_line(e, "weights.pt")

class Spy:
    def __reduce__(self): return (pytest.fail, ("code in weights.pt was run",))

def test_code_in_the_weights_is_never_run(bundle):
    torch.save(dict(state_dict=dict(x=Spy())), bundle / "weights.pt")
    resign(bundle)
    refuse(bundle, "weights.pt", "plain tensors")
    for thing in ([1], dict(state_dict=[1]), torch.ones(3)):
        torch.save(thing, bundle / "weights.pt")
        resign(bundle)
        refuse(bundle, "weights.pt", "state_dict")

@pytest.mark.parametrize("name", ["manifest.json", "config.json", "tokenizer.json", "weights.pt", "README.md"])
def test_pipes_and_missing_files(bundle, name):
    import os
    (bundle / name).unlink()
    refuse(bundle, name, load=open_checkpoint)
    os.mkfifo(bundle / name)
    refuse(bundle, name, load=open_checkpoint)

# --- chats -------------------------------------------------------------------------------------------------------------------------

CHAT = [dict(role="system", content=" Be brief.\n"), dict(role="user", content="Hi "), dict(role="assistant", content="Hello"), dict(role="user", content="Bye <eos>")]

def test_chats_as_trained_and_as_exported(made):
    trained, exported = (load_tokenizer(open_checkpoint(made, chat_template=form).tokenizer) for form in (None, "exported"))
    assert trained.render_chat(CHAT) == "system\nBe brief.\nuser\nHi\nassistant\nHello<eos>user\nBye <eos>\nassistant\n"
    assert exported.render_chat(CHAT) == "system\n Be brief.\n\nuser\nHi \nassistant\nHello\nuser\nBye <eos>\nassistant\n"
    assert trained.encode_chat(CHAT).count(2) == 1 and exported.encode_chat(CHAT).count(2) == 0      # what a user types is text
    for tok in (trained, exported):
        ids = tok.encode_chat(CHAT)
        assert 1 not in ids and tok.decode(ids, skip_special_tokens=False) == tok.render_chat(CHAT)
        assert tok.eos_token_ids == (2,) and tok.encode("user") == tok.encode("user", add_special_tokens=False) and tok.special_ids == {0, 1, 2, 3}
        assert tok.render_chat([dict(role="developer", content="x")], False) == "system\nx\n"
        with pytest.raises(ValueError, match="no role tool"): tok.render_chat([dict(role="tool", content="x")])
    assert len(trained.encode("2026")) == 4
    with pytest.raises(LoadError, match="trained, exported"): open_checkpoint(made, chat_template="exporte")

def test_the_converted_folder_says_the_same_in_transformers(made, tmp_path):
    from transformers import AutoTokenizer
    for form in ("trained", "exported"):
        hf = AutoTokenizer.from_pretrained(bundle_to_hf(made, tmp_path / form, form))
        tok = load_tokenizer(open_checkpoint(made, chat_template=form).tokenizer)
        assert hf.apply_chat_template(CHAT[:3] + [dict(role="user", content="x")], tokenize=True, add_generation_prompt=True, return_dict=False) == tok.encode_chat(CHAT[:3] + [dict(role="user", content="x")])
    with pytest.raises(LoadError, match="trained, exported"): bundle_to_hf(made, tmp_path / "x", "other")

@pytest.mark.parametrize("t", [dict(roles={r: f"<{r}>{{content}}|" for r in ("system", "user", "assistant")}, generation_prompt="<assistant>"), {r: f"<{r}>{{content}}|" for r in ("system", "user", "assistant")}])
def test_patterns_of_a_manifest_are_used_as_they_are(bundle, t):
    resign(bundle, chat_template=t)
    tok = load_tokenizer(open_checkpoint(bundle, chat_template="exported").tokenizer)
    assert tok.render_chat([dict(role="user", content="{{ 'x' }}'\\n")]) == "<user>{{ 'x' }}'\\n|<assistant>"

def test_a_tokenizer_without_the_declared_specials(bundle):
    t = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {f"tok_{i}": i for i in range(11)}, "unk_token": "tok_0"}, "pre_tokenizer": {"type": "Whitespace"}}
    (bundle / "tokenizer.json").write_text(json.dumps(t))
    resign(bundle)
    tok = load_tokenizer(open_checkpoint(bundle).tokenizer)
    assert "assistant\nHellotok_2user" in tok.render_chat(CHAT) and tok.special_ids == {2} and tok.encode("tok_3 tok_10") == [3, 10]
    (bundle / "tokenizer.json").write_text(json.dumps({"model": 3}))
    resign(bundle)
    with pytest.raises(TokenizerError) as e: load_tokenizer(open_checkpoint(bundle).tokenizer)
    one_line(e.value, "tokenizer.json")

# --- margins -----------------------------------------------------------------------------------------------------------------------

def test_greedy_text_of_a_made_bundle_varies_ends_and_survives_bfloat16(made):
    config, tensors = open_bundle(made).config, synthetic_tensors(open_bundle(made).config, 0)
    a, b = (Transformer.from_tensors(config, tensors, d) for d in (torch.float32, torch.bfloat16))
    starts, margins, changed, ends, words = np.random.default_rng(0).integers(4, 512, (8, 6)), [], [], 0, set()
    for s in starts:
        ids = list(s)
        for _ in range(48): ids.append(int(a.logits(torch.tensor(ids))[-1].argmax()))
        x, y = (m.logits(torch.tensor(ids))[5:] for m in (a, b))
        top = x.topk(2).values
        margins += (top[:, 0] - top[:, 1]).tolist()
        changed += (x.argmax(1) != y.argmax(1)).tolist()
        ends, words = ends + ids[6:].count(2), words | set(ids[6:])
    assert np.median(margins) > 1 and np.quantile(margins, 0.1) > 0.1 and np.mean(changed) < 0.06 and ends > 0 and len(words) > 40

def test_the_large_preset_is_esme(tmp_path):
    c = PRESETS["214m"]
    assert (c["vocab_size"], c["context_length"], c["embedding_dim"], c["layers"], c["heads"], c["kv_heads"], c["feedforward_dim"]) == (32768, 1024, 768, 30, 12, 4, 2048)
    with pytest.raises(LoadError, match="config: key"): write_bundle(tmp_path / "x", {k: v for k, v in c.items() if k != "name"}, {}, "")
