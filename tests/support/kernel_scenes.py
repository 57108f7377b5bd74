"Rows over scattered pages for the kernels' tests, on a CPU or a GPU."
import numpy as np
import torch
import torch.nn.functional as F
from llminfer.attention import PagedAttention
from llminfer.kv_codes import POOLS
from llminfer.splitkv import Places, rope_tables
from llminfer.model import ModelConfig, Rope, rotate
from llminfer.runner import DecodeState

NAN = float("nan")


def config(E=64, H=4, G=2, qk_norm=True, window=None, **kw):
    return ModelConfig("qwen3" if qk_norm else "llama", 300, 64, 96, 2, H, G, E, qk_norm=qk_norm, windows=(None, window), tie_embeddings=True, **kw)

class Scene:
    "Rows of random lengths over scattered blocks; every slot that no live row owns is NaN."
    def __init__(self, seed, E=64, H=4, G=2, block=4, window=None, dtype=torch.float32, most=40, rows=4, qk_norm=True, device="cpu", kv_dtype="auto"):
        self.rng, self.gen = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.c, self.dtype, self.device = config(E, H, G, qk_norm, window), dtype, torch.device(device)
        self.lens = self.rng.integers(0, most, rows)
        live = self.rng.random(rows) < 0.75
        live[0] = True
        self.live = torch.tensor(live, device=device)
        width = -(-(most + 1) // block)
        self.st = DecodeState(rows, most + 1, block, device)
        self.kv = POOLS[kv_dtype](2, rows * width + 3, block, G, E, dtype, device)
        self.att = PagedAttention(self.kv, H, windows=self.c.windows)
        for numbers in (self.kv.data,) if kv_dtype == "auto" else (self.kv.scales,):
            numbers.fill_(NAN)
            numbers[:, self.kv.zero_slot] = 0
        ids, table = iter((self.rng.permutation(rows * width + 2) + 1).tolist()), np.zeros((rows + 1, width), np.int32)
        for r, n in enumerate(self.lens): table[r, :n // block + 1] = [next(ids) for _ in range(n // block + 1)]
        self.st.table.copy_(torch.from_numpy(table))
        at = torch.tensor([int(table[r, i // block]) * block + i % block for r, n in enumerate(self.lens) for i in range(n)], dtype=torch.int64, device=device)
        for layer in range(2): self.kv.write(layer, torch.cat((at, at + self.kv.n_slots)), self.randn(len(at), G, E), self.randn(len(at), G, E))
        self.rope = Rope(self.c, torch.float32, self.device)
        self.weight = self.randn(H + G, E) * 0.1 + 1 if qk_norm else None
        self.at = Places(self.st, torch.arange(rows, device=device), torch.tensor(self.lens, device=device), self.live, *rope_tables(self.rope, most + 1))
        self.qkv = self.randn(rows, (H + 2 * G) * E)
        self.count = torch.zeros(8192, dtype=torch.int32, device=device)

    def randn(self, *shape): return torch.randn(*shape, generator=self.gen).to(self.device, self.dtype)

    def torch_heads(self, qkv, positions):
        "q, k, v as the model makes them."
        H, G, E = self.c.n_heads, self.c.n_kv_heads, self.c.head_dim
        qk, v = qkv.float().view(-1, H + 2 * G, E).split((H + G, G), 1)
        if self.weight is not None: qk = F.rms_norm(qk, (E,), None, 1e-6) * self.weight.float()
        qk = rotate(qk, *self.rope(positions)).to(self.dtype)
        return qk[:, :H], qk[:, H:], v.to(self.dtype)
