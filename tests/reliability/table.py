"""The tables of the reliability campaign: a row is a family of faults, inputs or loads, with its full count and a function that tries them."""
from __future__ import annotations
import importlib, time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator

KINDS = {"F": "faults", "I": "inputs", "L": "loads"}


@dataclass
class Counted:
    "What became of the cases of one family. A case is tried when it begins and good when everything that must hold has been seen to hold."
    family: str
    seed: int
    tried: int = 0
    good: int = 0
    notes: dict[str, Any] = field(default_factory=dict)   # figures worth keeping; JSON
    bad: list[str] = field(default_factory=list)          # what went wrong, enough to repeat it
    seconds: float = 0.0
    error: str | None = None                              # what stopped the driver itself: the cases before it count, those after it were not tried

    @contextmanager
    def case(self, name: object) -> Iterator[None]:
        "One case. An exception inside means that it was not survived, and the campaign goes on."
        self.tried += 1
        try: yield
        except Exception as e: self.fail(name, f"{type(e).__name__}: {e}")
        else: self.good += 1

    def add(self, name: object, why: str | None = None) -> None:
        "One case that is over; `why` says what was wrong with it."
        self.tried += 1
        if why is None: self.good += 1
        else: self.fail(name, why)

    def fail(self, name: object, why: str) -> None: self.bad.append(f"{self.family} seed {self.seed} case {name}: {why}"[:600])

    def spoil(self, why: str, n: int | None = None) -> None:
        "Something that concerns all cases, or n of them, went wrong: a leaked block, a dead server."
        self.bad.append(f"{self.family} seed {self.seed}: {why}"[:600])
        self.good = max(0, self.good - (self.tried if n is None else n))

    @property
    def ok(self) -> bool: return self.good == self.tried > 0 and not self.bad and not self.error


@dataclass(frozen=True)
class Family:
    "A row of the tables in cases.md, section 3."
    id: str                                   # F1 ... I1 ... L1
    title: str
    goal: int                                 # the full count
    sample: int                               # the count of `make test`; 0: another test is its sample
    run: Callable[[int, int, Counted], None]  # (seed, count, counted)
    nightly: bool = False                     # long: only when asked for by name or with --all
    counted: bool = True                      # part of the total that is promised

    def __call__(self, count: int | None = None, seed: int = 0) -> Counted:
        "Try so many cases, or all. A promise that does not hold around the cases spoils them; any other exception here is the harness's own."
        c, t = Counted(self.id, seed), time.monotonic()
        try: self.run(seed, self.goal if count is None else count, c)
        except AssertionError as e: c.spoil(f"the family stopped after {c.tried} cases: {type(e).__name__}: {e}")
        except Exception as e: c.error = f"{type(e).__name__}: {e}"[:600]
        c.seconds = round(time.monotonic() - t, 1)
        return c


FAMILIES: dict[str, Family] = {}


def family(id: str, title: str, goal: int, sample: int, nightly: bool = False, counted: bool = True) -> Callable[[Callable[[int, int, Counted], None]], Family]:
    "Register a function `(seed, count, counted)` as a row."
    def register(f: Callable[[int, int, Counted], None]) -> Family:
        assert id not in FAMILIES and id[0] in KINDS, f"{id} is not a new row"
        FAMILIES[id] = Family(id, title, goal, sample, f, nightly, counted)
        return FAMILIES[id]
    return register


def load_tables(kinds: str = "FIL") -> dict[str, Family]:
    "Rows in the order of the tables; every module faults_*, inputs_* and loads_* of this folder registers its own."
    for kind in kinds:
        for p in sorted(Path(__file__).parent.glob(f"{KINDS[kind]}_*.py")): importlib.import_module(f"reliability.{p.stem}")
    return dict(sorted(FAMILIES.items(), key=lambda kv: (kv[0][0], int(kv[0][1:]))))
