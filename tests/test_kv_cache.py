"""The block pool against a naive model under random actions, and the cases B13, B14, B15, B17, B18 at pool level."""
from __future__ import annotations
import random
from typing import Any
import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from llminfer import kv_cache
from llminfer.config import ConfigError
from llminfer.kv_cache import BlockPool, block_table_svg, draw_text, draw_tree, pool_svg

KEYS = (b"", b"-1", b"-2")
Name = tuple[bytes, tuple[int, ...]]  # what a block's KV depends on: key, and all ids up to its end


class World:
    """A pool, the rules of the pool as plain scans, and a KV memory that remembers what each slot was computed from."""
    def __init__(self, n_blocks: int, size: int, policy: str):
        self.pool, self.size, self.policy = BlockPool(n_blocks, size, eviction=policy), size, policy
        self.tables: dict[int, list[int]] = {}
        self.text: dict[int, Name] = {}
        self.valid: dict[int, int] = {}               # tokens whose KV is written
        self.frozen: set[int] = set()                 # cache no more, since the cache was reset
        self.content: dict[int, Name] = {}            # registered block -> content
        self.owner: dict[Name, int] = {}              # content -> the block that hits are given
        self.lost: set[Name] = set()                  # cached, but FIFO evicted the prefix first
        self.idle: list[int] = []                     # next victim first
        self.cached_at: dict[Name, int] = {}
        self.free = set(range(1, n_blocks))
        self.drain: list[tuple[int, int]] = []
        self.late: dict[int, int] = {}
        self.clock = self.done = self.window = self.next_seq = 0
        self.kv: dict[tuple[int, int], Any] = {}
        self.scribbles: list[tuple[int, int, int]] = []  # (fence, block, slot): released rows that windows in flight still write

    # the rules
    def match(self, ids: tuple[int, ...], key: bytes) -> list[int]:
        out: list[int] = []
        while (len(out) + 1) * self.size < len(ids):
            name = key, ids[:(len(out) + 1) * self.size]
            if name not in self.owner or name in self.lost: break
            out.append(self.owner[name])
        return out

    def unlink(self, block: int) -> None:
        name = self.content.pop(block)
        twins = [b for b, n in self.content.items() if n == name]
        if twins: self.owner[name] = next(b for b in twins if self.pool._node[b].block == b)  # type: ignore[union-attr]  # any twin may step in: ask which
        else:
            del self.owner[name]
            self.cached_at.pop(name, None)
            self.lost.discard(name)
            self.lost |= {n for n in self.owner if n[0] == name[0] and n[1][:len(name[1])] == name[1]}

    def let_go(self, block: int, fence: int) -> None:
        if any(block in t for t in self.tables.values()):
            self.late[block] = max(fence, self.late.get(block, 0))
            return
        fence = max(fence, self.late.pop(block, 0))
        if (name := self.content.get(block)) is not None:
            own = self.owner[name]
            if own == block and self.policy != "none":
                self.idle.append(block)
                self.clock += 1
                self.cached_at.setdefault(name, self.clock)
                if self.policy == "fifo": self.idle.sort(key=lambda b: self.cached_at[self.content[b]])
                return
            if own == block: self.unlink(block)
            else:
                del self.content[block]
                if self.policy == "lru" and own in self.idle: self.idle.remove(own); self.idle.append(own)
        if fence > self.done: self.drain.append((fence, block))
        else: self.free.add(block)

    def take(self, blocks: list[int]) -> None:
        while len(self.free) < len(blocks):
            self.free.add(victim := self.idle.pop(0))
            self.unlink(victim)
        assert set(blocks) <= self.free and len(set(blocks)) == len(blocks)
        self.free -= set(blocks)

    # actions: each is done to the pool and to the model
    def admit(self, ids: tuple[int, ...], key: bytes, extra: int) -> int | None:
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        want, scratch = self.match(ids, key), np.array(ids, np.int32)
        assert self.pool.match(scratch, key).blocks == want
        m = self.pool.admit(seq, scratch, key)
        assert m.blocks == want and m.n_tokens == len(want) * self.size < max(1, len(ids))
        scratch[:] = 0  # the caller reuses its buffer
        self.idle = [b for b in self.idle if b not in want]
        self.tables[seq], self.text[seq], self.valid[seq] = list(want), (key, ids), m.n_tokens
        if not self.reserve(seq, len(ids) + extra):
            self.release(seq, False)
            return None
        self.write(seq, len(ids))
        return seq

    def reserve(self, seq: int, n_tokens: int) -> bool:
        need = -(-n_tokens // self.size) - len(self.tables[seq])
        got = self.pool.reserve(seq, n_tokens)
        if need > len(self.free) + len(self.idle):
            assert got is None
            return False
        assert got is not None and got.dtype == np.int32 and len(got) == max(0, need)
        self.take(got.tolist())
        self.tables[seq] += got.tolist()
        return True

    def write(self, seq: int, upto: int) -> None:
        key, ids = self.text[seq]
        for p in range(self.valid[seq], upto):
            b = self.tables[seq][p // self.size]
            assert b not in self.content and sum(b in t for t in self.tables.values()) == 1, f"block {b} is shared or cached"
            self.kv[b, p % self.size] = (key, ids[:p + 1])
        self.valid[seq] = upto

    def grow(self, seq: int, ids: tuple[int, ...]) -> None:
        key, old = self.text[seq]
        if self.reserve(seq, len(old) + len(ids)):
            self.text[seq] = key, old + ids
            self.write(seq, len(old) + len(ids))

    def fork(self, parent: int, n_valid: int) -> None:
        child, self.next_seq = self.next_seq, self.next_seq + 1
        copies = self.pool.fork(parent, child, n_valid)
        n_full, rest = divmod(n_valid, self.size)
        if rest and not self.free and not self.idle:
            assert copies is None
            return
        assert copies is not None and [s for s, _ in copies] == self.tables[parent][n_full:n_full + 1] * bool(rest)
        fresh = [d for _, d in copies]
        self.take(fresh)
        self.tables[child] = self.tables[parent][:n_full] + fresh
        self.text[child], self.valid[child] = (self.text[parent][0], self.text[parent][1][:n_valid]), n_valid
        for s, d in copies:
            for i in range(rest): self.kv[d, i] = self.kv[s, i]
        if parent in self.frozen: self.frozen.add(child)

    def register(self, seq: int, n_valid: int) -> None:
        key, ids = self.text[seq]
        self.pool.register(seq, np.array(ids[:n_valid], np.int32), n_valid)
        if seq in self.frozen: return
        for i in range(n_valid // self.size):
            block, name = self.tables[seq][i], (key, ids[:(i + 1) * self.size])
            if block in self.content: continue
            if name in self.lost:
                self.idle.remove(self.owner[name])
                self.free.add(self.owner[name])
                self.unlink(self.owner[name])
            self.content[block] = name
            self.owner.setdefault(name, block)

    def release(self, seq: int, in_flight: bool) -> None:
        fence = self.window if in_flight else 0
        self.pool.release(seq, fence or None)
        self.pool.release(seq, fence or None)  # abort twice
        table, valid = self.tables.pop(seq), self.valid.pop(seq)
        if fence > self.done: self.scribbles += [(fence, table[p // self.size], p % self.size) for p in range(valid, len(table) * self.size)]
        for b in reversed(table): self.let_go(b, fence)
        del self.text[seq]
        self.frozen.discard(seq)

    def launch(self) -> None: self.window += 1

    def retire(self, window: int) -> None:
        for f, b, i in self.scribbles:
            if f <= window: self.kv[b, i] = "garbage"
        self.scribbles = [s for s in self.scribbles if s[0] > window]
        self.pool.retire(window)
        self.done = max(self.done, window)
        self.free |= {b for f, b in self.drain if f <= self.done}
        self.drain = [(f, b) for f, b in self.drain if f > self.done]

    def reset(self) -> None:
        self.pool.reset_cache()
        self.free |= set(self.idle)
        self.idle, self.content, self.owner, self.lost, self.cached_at = [], {}, {}, set(), {}
        self.frozen = set(self.tables)

    def compare(self) -> None:
        p = self.pool
        p.check()
        assert {s: p.table(s) for s in p._seqs} == self.tables
        assert set(p._free) == self.free and p.n_free == len(self.free)
        assert sorted(p._idle) == sorted(self.idle) and (self.policy != "lru" or list(p._idle) == self.idle)
        assert sorted((f, b) for f, bs in p._drain.items() for b in bs) == sorted(self.drain)
        assert not self.lost or self.policy == "fifo" and {self.owner[n] for n in self.lost} <= set(self.idle)
        for seq, t in self.tables.items():
            key, ids = self.text[seq]
            assert p.match(np.array(ids), key).blocks == self.match(ids, key)
            for q in range(self.valid[seq]):
                assert self.kv[t[q // self.size], q % self.size] == (key, ids[:q + 1]), f"sequence {seq} lost position {q}"

    def finish(self) -> None:
        for seq in list(self.tables): self.release(seq, True)
        self.retire(self.window)
        self.compare()
        assert self.pool.n_held == self.pool.n_draining == 0 and not any(self.pool._ref) and not self.pool._late


class PoolMachine(RuleBasedStateMachine):
    @initialize(n=st.integers(2, 14), size=st.integers(1, 3), policy=st.sampled_from(["lru", "fifo", "none"]))
    def start(self, n, size, policy): self.w = World(n, size, policy)

    def pick(self, i: int) -> int | None: return list(self.w.tables)[i % len(self.w.tables)] if self.w.tables else None

    @rule(ids=st.lists(st.integers(0, 1), min_size=0, max_size=9), key=st.sampled_from(KEYS), extra=st.integers(0, 3))
    def admit(self, ids, key, extra): self.w.admit(tuple(ids), key, extra)

    @rule(i=st.integers(0, 9), ids=st.lists(st.integers(0, 1), min_size=1, max_size=4), register=st.booleans())
    def grow(self, i, ids, register):
        if (s := self.pick(i)) is None: return
        self.w.grow(s, tuple(ids))
        if register: self.w.register(s, self.w.valid[s])

    @rule(i=st.integers(0, 9), back=st.integers(0, 3))
    def register(self, i, back):
        if (s := self.pick(i)) is not None: self.w.register(s, max(0, self.w.valid[s] - back))

    @rule(i=st.integers(0, 9), back=st.integers(0, 3))
    def fork(self, i, back):
        if (s := self.pick(i)) is not None: self.w.fork(s, max(0, self.w.valid[s] - back))

    @rule(i=st.integers(0, 9), in_flight=st.booleans())
    def release(self, i, in_flight):
        if (s := self.pick(i)) is not None: self.w.release(s, in_flight)

    @rule()
    def launch(self): self.w.launch()

    @rule(lag=st.integers(0, 2))
    def retire(self, lag): self.w.retire(max(0, self.w.window - lag))

    @rule(sure=st.integers(0, 7))
    def reset(self, sure):
        if not sure: self.w.reset()

    def check_invariants(self, *a, **k):
        super().check_invariants(*a, **k)
        if hasattr(self, "w"): self.w.compare()

    def teardown(self):
        if hasattr(self, "w"): self.w.finish()


def test_pool_against_model():
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True,
                                                              suppress_health_check=list(HealthCheck)))


@pytest.mark.parametrize("policy", ["lru", "fifo", "none"])
def test_10000_random_actions_leave_nothing_held(policy):
    "B17: 3 x 10,000 actions; every one is followed by the full comparison."
    r, w = random.Random(17), World(32, 4, policy)
    for k in range(10_000):
        seqs, act = list(w.tables), r.random()
        s = r.choice(seqs) if seqs else None
        ids = tuple(r.choices((0, 1), (9, 1), k=r.randrange(0, 24)))
        if s is None or act < .25:
            if (new := w.admit(ids, r.choice(KEYS), r.randrange(4))) is not None and r.random() < .5: w.register(new, len(ids))
        elif act < .5: w.grow(s, ids[:6])
        elif act < .65: w.register(s, w.valid[s])
        elif act < .70: w.fork(s, r.randrange(w.valid[s] + 1))
        elif act < .85: w.release(s, r.random() < .7)
        elif act < .9: w.launch()
        elif act < .998: w.retire(r.randrange(w.done, w.window + 1))
        else: w.reset()
        w.compare()
    assert (w.pool.evictions > 200) == (policy != "none") and w.pool.hits > 200
    w.finish()


def serve(pool: BlockPool, seq: int, ids: Any, key: bytes = b"") -> int:
    n = pool.admit(seq, ids, key).n_tokens
    assert pool.reserve(seq, len(ids) + 1) is not None
    pool.register(seq, ids, len(ids))
    return n


def test_b13_a_whole_prompt_is_never_cached():
    for n, want in zip((1, 15, 16, 17, 31, 32, 33), (0, 0, 0, 16, 16, 16, 32)):
        for release in (True, False):
            pool = BlockPool(20, 16)
            hits = []
            for k in range(3):
                hits.append(serve(pool, k, np.arange(n)))
                if release: pool.release(k)
                pool.check()
            assert hits == [0, want, want], n


def test_b14_hash_collisions(monkeypatch):
    pool = BlockPool(40, 3)
    assert serve(pool, 0, [5, 40, 7, 1]) == 0 and serve(pool, 1, [6, 9, 7, 1]) == 0   # equal under a base-31 polynomial
    for i, key in enumerate((b"-1", b"-2", (-1).to_bytes(8, "little", signed=True), (-2).to_bytes(8, "little", signed=True))):
        assert serve(pool, 2 + i, [5, 40, 7, 1], key) == 0
    assert serve(pool, 9, [5, 40, 7, 2]) == 3
    for constant in (b"", b"same"):
        monkeypatch.setattr(kv_cache, "block_digest", lambda parent, content: constant)
        pool, prompts = BlockPool(200, 4), [tuple([i % 3] * 4 + [i] * 5) for i in range(20)]
        for i, ids in enumerate(prompts * 2):
            m = pool.admit(i, np.array(ids), b"%d" % (i % 2))
            for j, b in enumerate(m.blocks):    # whoever registered the block had the same key and the same prefix
                node = pool._nodes[constant]
                assert node.block == b and j == 0 and node.parent == b"%d" % (i % 2) and node.ids == np.array(ids[:4], "<i4").tobytes()
            assert pool.reserve(i, 10) is not None
            pool.register(i, np.array(ids), 9)
            if i % 3: pool.release(i)
            pool.check()
        assert len(pool._nodes) == 1 and pool.hits > 0
        pool = BlockPool(9, 4)
        serve(pool, 0, [1] * 9)                  # the second block has the same ids and name, not the same past
        assert [pool._node[b] is not None for b in pool.table(0)] == [True, False, False]


def test_b15_half_filled_blocks_are_private():
    pool, ids = BlockPool(20, 16), np.arange(40)
    serve(pool, 1, ids[:20])
    assert pool.admit(2, ids[:20]).n_tokens == 16
    pool.reserve(2, 21)
    assert pool.table(1)[0] == pool.table(2)[0] and pool.table(1)[1] != pool.table(2)[1]
    pool.reserve(1, 34)
    pool.register(1, ids, 31)
    assert pool.match(ids).n_tokens == 16       # position 31 is not there yet
    pool.register(1, ids, 33)
    assert pool.match(ids).n_tokens == 32 and pool.match(ids[:33]).n_tokens == 32 and pool.match(ids[:32]).n_tokens == 16
    other = np.concatenate([ids[:20], np.arange(500, 512), [7]])
    pool.reserve(2, 33)
    pool.register(2, other, 33)
    assert pool.match(other).blocks == pool.table(2)[:2] != pool.match(ids).blocks
    pool.check()


def test_b18_eviction_counts_blocks_and_spares_the_living():
    pool, scratch = BlockPool(9, 4), np.arange(13, dtype=np.int32)
    serve(pool, 1, scratch[:12].copy())
    serve(pool, 2, scratch[:12] + 50)            # 4 blocks each: 12 tokens and room for one more
    kept = pool.match(scratch)
    assert kept.n_tokens == 12
    pool.release(2)
    table = pool.table(1)
    assert pool.reserve(1, 16 + 5 * 4) is None and (pool.n_free, pool.n_cached, pool.n_held) == (1, 3, 4)
    pool.admit(3, [])
    assert len(pool.reserve(3, 13)) == 4 and pool.evictions == 3     # 1 free + 3 evicted, exactly what was missing
    scratch[:] = -1
    assert pool.match(np.arange(13)).blocks == kept.blocks == table[:3]
    pool.table(1).clear()
    assert pool.table(1) == table
    for s in (1, 3, 3, 1, 77): pool.release(s)
    pool.check()
    assert pool.n_held == 0 and pool.n_available == 8


def test_eviction_order():
    def visit(policy: str) -> list[int]:
        pool = BlockPool(7, 4, eviction=policy)
        for s, base in enumerate((0, 100, 0, 200)):                  # 0 is old, but was used again
            serve(pool, s, np.arange(9) + base)
            pool.release(s)
        pool.check()
        return [pool.match(np.arange(9) + base).n_tokens for base in (0, 100, 200)]
    assert visit("lru") == [8, 4, 8] and visit("fifo") == [4, 8, 8] and visit("none") == [0, 0, 0]   # one block had to go: a tail
    pool = BlockPool(9, 4, eviction="none")
    assert (serve(pool, 1, np.arange(9)), serve(pool, 2, np.arange(9))) == (0, 8)    # the living share
    pool.release(1), pool.check(), pool.release(2, fence=3)
    assert (pool.n_cached, pool.n_draining, pool.n_free) == (0, 3, 5)
    pool.retire(2), pool.retire(3)
    assert pool.n_free == 8


def test_twin_steps_in_when_the_original_is_evicted():
    pool, ids = BlockPool(9, 4), np.arange(8)
    for s in (1, 2): pool.admit(s, ids), pool.reserve(s, 8)          # both compute the same two blocks
    for s in (1, 2): pool.register(s, ids, 8)
    assert pool.match(np.arange(9)).blocks == pool.table(1)
    pool.release(1)
    pool.admit(3, []), pool.reserve(3, 24)
    pool.check()
    assert pool.evictions == 2 and pool.match(np.arange(9)).blocks == pool.table(2)


def test_fences():
    pool = BlockPool(9, 4)
    pool.admit(1, np.arange(6)), pool.reserve(1, 8)
    pool.fork(1, 2, 4)
    pool.release(1, fence=7)                     # shared block: still held by 2, but window 7 may be running
    assert (pool.n_draining, pool.n_held) == (1, 1)
    pool.release(2)
    assert (pool.n_draining, pool.n_free) == (2, 6)
    pool.retire(6)
    assert pool.n_draining == 2 and pool.n_available == 6
    pool.retire(7)
    pool.admit(3, np.arange(4)), pool.reserve(3, 5), pool.release(3, fence=7)   # its window is over already
    assert pool.n_free == 8
    pool.check()


def test_stats_waste_and_prefix_cache_off():
    pool = BlockPool(33, 4)
    serve(pool, 1, np.arange(9))
    assert pool.admit(2, np.arange(9)).n_tokens == 8 and pool.reserve(2, 400) is None
    pool.release(2)                              # no room: not counted as a query
    serve(pool, 2, np.arange(9))
    assert len(pool.reserve(2, 13)) == 1         # growing is not another query
    s = pool.stats()
    assert (s["queries"], s["hits"], s["hit_tokens"], s["query_tokens"], s["held"]) == (2, 1, 8, 18, 5)
    assert pool.waste({1: 9, 2: 9}) == dict(tokens=10, slots=20, fraction=0.5) and pool.waste({})["fraction"] == 0
    pool = BlockPool(33, 4, prefix_cache=False)
    assert [serve(pool, i, np.arange(9)) for i in range(2)] == [0, 0] and not pool.fork(0, 5, 8)
    pool.check()
    for i in (0, 1, 5): pool.release(i)
    assert pool.n_free == 32


def test_mistakes_are_named_and_change_nothing():
    pool = BlockPool(8, 4)
    serve(pool, 1, np.arange(6))
    before = pool.stats()
    for error, text, call in [
        (KeyError, "sequence 5 has no block table", lambda: pool.reserve(5, 1)), (KeyError, "sequence 5", lambda: pool.fork(5, 6, 0)),
        (ValueError, "already has", lambda: pool.admit(1, [1])), (ValueError, "already has", lambda: pool.fork(1, 1, 2)),
        (ValueError, "room for 8 tokens, 9", lambda: pool.register(1, np.arange(9), 9)), (ValueError, "room for 8", lambda: pool.fork(1, 2, 9)),
        (ValueError, "6 ids given where 8", lambda: pool.register(1, np.arange(6), 8)),
        (ValueError, "fit 32 bits", lambda: pool.admit(2, [2**32] * 5)),
    ]:
        with pytest.raises(error, match=text): call()
        pool.check()
        assert pool.stats() == before
    for bad in (dict(n_blocks=1, block_size=4), dict(n_blocks=4, block_size=0), dict(n_blocks=4, block_size=4, eviction="mru")):
        with pytest.raises(ConfigError): BlockPool(**bad)


def test_drawings():
    pool = BlockPool(40, 4)
    for s, n in ((1, 9), (2, 13), (3, 6)): serve(pool, s, np.arange(n))
    pool.release(3, fence=4)
    text = draw_text(pool, {1: "chat <1>"}, width=20)
    assert text.splitlines()[1] == "     0 #==ABB~............." and "chat <1>: 1-3" in text and "(20 more blocks, free)" in text
    assert pool_svg(pool).count("<rect") == 40 and pool._repr_html_().startswith("<svg") and "first 8 drawn" in pool_svg(pool, max_blocks=8)
    table = pool.table(2)
    assert (picture := table._repr_html_()) == block_table_svg(pool, [2]) and picture.count("<rect") == len(table)
    table.append(9)
    assert table._repr_html_() is None                       # a changed copy is nobody's table
    svg = block_table_svg(pool, [2], {2: "<b>"})
    assert svg.count("<rect") == 4 and "&lt;b&gt;" in svg
    assert draw_tree(pool).splitlines() == ["[1-2] [0, 1, 2, 3].. 8 tokens, held by 2", "    [4] [8, 9, 10, 11].. 4 tokens, held by 1"]
    pool.release(1)
    assert draw_text(pool).splitlines()[1].startswith("     0 #BB.BB~")   # B keeps its letter
