"Bytes of model files: every format's values against the gguf package, and every kind of damage."
import os, struct
from dataclasses import replace
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from llminfer.formats import BLOCKS, FLOATS, LoadError, RawTensor, check_layout, dequantize, read_gguf, read_json, read_safetensors, write_safetensors
from llminfer.loading import load_model, make_tiny, open_checkpoint
from support.checkpoints import IDS, edit_json, one_line, our_logits, random_blocks, refuse, shard, to_gguf

QUANTS = [k for k in BLOCKS if k.startswith("Q")]

# --- values ------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_what_the_gguf_package_writes_is_read_to_the_bit(name):
    from gguf import GGMLQuantizationType, quants
    values = np.random.default_rng(1).standard_normal((6, 128)).astype(np.float32) * 3
    data = quants.quantize(values, GGMLQuantizationType[name]).view(np.uint8)
    want = quants.dequantize(data if name != "F16" else data.view(np.float16), GGMLQuantizationType[name]).reshape(6, 128)
    assert np.array_equal(dequantize(torch.from_numpy(data.copy()), name).float().numpy(), want)

@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(QUANTS), seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), blocks=st.integers(1, 5))
def test_any_block_is_read_to_the_bit(name, seed, rows, blocks):
    from gguf import GGMLQuantizationType, quants
    data = random_blocks(name, rows * blocks, np.random.default_rng(seed)).reshape(rows, -1)
    got = dequantize(torch.from_numpy(data), name).numpy()
    assert np.array_equal(got, quants.dequantize(data, GGMLQuantizationType[name])) and got.shape == (rows, blocks * BLOCKS[name][0])

def test_sizes_of_blocks_are_those_of_the_gguf_package():
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    assert BLOCKS == {k: GGML_QUANT_SIZES[GGMLQuantizationType[k]] for k in BLOCKS}

@pytest.mark.parametrize("quant", [*QUANTS, "F16", "BF16", "F32"])
def test_reordered_rows_of_every_format(quant, tmp_path):
    values = BLOCKS[quant][0]
    n = 512 // values * BLOCKS[quant][1]
    raw = np.random.default_rng(0).integers(0, 60, (8, n), dtype=np.uint8)
    t = RawTensor("x", quant, (8, 512), tmp_path, 0, raw.size, raw.reshape(-1))
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    assert torch.equal(replace(t, order=order).tensor(torch.float64), t.tensor(torch.float64)[order])
    assert t.tensor().dtype == FLOATS.get(quant, torch.float32)

# --- safetensors -------------------------------------------------------------------------------------------------------------------

def test_shards_equal_one_file_and_lying_indexes_are_refused(tmp_path):
    path = make_tiny(tmp_path / "m", "qwen3")
    want = our_logits(path)
    where = shard(path)
    assert torch.equal(our_logits(path), want)
    index, (first, second) = path / "model.safetensors.index.json", (path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    good, files = index.read_text(), {f: f.read_bytes() for f in (first, second)}
    def lie(**kw): edit_json(index, weight_map=where | kw)
    lie(**{"model.layers.9.w": first.name}); refuse(path, first.name, "model.layers.9.w", "is missing")
    a, b = (next(n for n, f in where.items() if f == shard_.name) for shard_ in (first, second))
    lie(**{a: second.name}); refuse(path, second.name, a, f"is in {first.name}", "wrong index")
    lie(**{"model.norm.weight": "../../etc/passwd"}); refuse(path, index.name, "model.norm.weight", "not a file name")
    edit_json(index, weight_map={n: f for n, f in where.items() if n != b}); refuse(path, second.name, b, "not listed")
    index.write_text("{"); refuse(path, index.name, "JSON")
    index.write_text("{}"); refuse(path, index.name, "weight_map")
    index.write_text(good.replace('"weight_map": {', f'"weight_map": {{"{b}": "{first.name}", ')); refuse(path, index.name, "twice")
    index.write_text(good)
    tensors = {n: t.tensor() for n, t in read_safetensors(second).items()}
    write_safetensors(second, tensors | {a: torch.zeros(3)}); refuse(path, second.name, a, f"is in {first.name} too")
    write_safetensors(second, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)})   # old files have it, unlisted
    assert torch.equal(our_logits(path), want)
    second.write_bytes(files[second][:-1]); refuse(path, second.name, "truncated")
    second.write_bytes(files[second])
    first.unlink(); refuse(path, first.name, "shard is missing")
    index.unlink(); refuse(path, "missing")

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
    patch(name + tail, name + struct.pack("<I", 10), "blk.0.ffn_up.weight", "Q2_K")
    patch(name + tail, name + struct.pack("<I", 14), "blk.0.ffn_up.weight", "Q6_K", "cannot be cut")
    patch(name + tail, name + struct.pack("<I", 99), "blk.0.ffn_up.weight", "type 99")

# --- what is not a file ------------------------------------------------------------------------------------------------------------

FOLDER = ["model.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer_config.json"]

@pytest.mark.parametrize("kind", ["pipe", "folder", "empty", "noise", "loop"])
@pytest.mark.parametrize("name", FOLDER)
def test_a_thing_in_the_place_of_a_file_is_one_line_and_never_waited_for(tmp_path, name, kind):
    path = make_tiny(tmp_path / "m", num_hidden_layers=1)
    spoil(path / name, kind)
    refuse(path, "m", load=open_checkpoint)

@pytest.mark.parametrize("kind", ["pipe", "empty", "noise", "loop"])
def test_the_same_as_a_gguf_file(tmp_path, kind):
    spoil(tmp_path / "m.gguf", kind)
    refuse(tmp_path / "m.gguf", "m.gguf" if kind != "loop" else "m", load=open_checkpoint)

def spoil(file, kind):
    file.unlink(missing_ok=True)
    if kind == "pipe": os.mkfifo(file)
    elif kind == "folder": file.mkdir()
    elif kind == "loop": file.symlink_to(file)
    else: file.write_bytes(b"" if kind == "empty" else np.random.default_rng(0).bytes(5000))

def test_read_json_tells_twins_only_where_asked(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1, "a": 2}')
    assert read_json(tmp_path / "x.json") == {"a": 2}
    with pytest.raises(LoadError) as e: read_json(tmp_path / "x.json", twins=False)
    one_line(e.value, "x.json", "twice")

def test_layout_of_every_file_is_strict(tmp_path):
    f = write_safetensors(tmp_path / "f.safetensors", dict(a=torch.ones(2, 2), b=torch.ones(3)))
    a, b = read_safetensors(f).values()
    for bad in (replace(b, start=b.start - 4), replace(b, start=b.start + 4), replace(b, shape=(4,)), replace(b, shape=(0,), nbytes=0)):
        with pytest.raises(LoadError, match="tensor b"): check_layout([a, bad], a.start)
