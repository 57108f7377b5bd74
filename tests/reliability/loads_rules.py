"""L9: the allocator and the scheduler against models of their rules; no model of a language."""
from __future__ import annotations
import random
import test_scheduler
from reliability.table import Counted, family

STEPS = 250     # of one world


@family("L9", "Property tests: random allocator and scheduler steps against a model of the rules", 100_000, 5_000)
def random_steps(seed: int, count: int, c: Counted) -> None:
    "A case is a step; a world whose books or texts are wrong takes its steps with it."
    worlds = -(-count // STEPS)
    for w in range(worlds):
        n = min(STEPS, count - w * STEPS)
        c.tried += n
        try:
            world = test_scheduler.World(random.Random(seed * 1_000_003 + w))
            for _ in range(n): world.act()
            world.finish()
        except Exception as e: c.fail(f"world {w}", f"{type(e).__name__}: {e}")
        else: c.good += n
    c.notes["worlds"] = worlds
