"""The notebooks run, the library is what they export, and they keep the house style."""
import ast, os, re, shutil, subprocess, sys
from pathlib import Path
import pytest
from house import ROOT, cells, is_exported, module_of, notebooks, source

BIN = Path(sys.executable).parent
NBS = notebooks()
MAX_CELL, MAX_FUNCTION, MAX_MODULE, MAX_BYTES = 40, 60, 600, 300_000

def seconds(nb) -> int:
    "What the notebook says of itself: `Runs on a CPU in N s`."
    m = re.search(r"[Rr]uns on a CPU in (\d+) s", source(cells(nb)[0]))
    return int(m[1]) if m else 10

def name(nb: Path) -> str: return nb.relative_to(ROOT / "nbs").as_posix()

def nbdev(command: str, *args: str, cwd: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"} | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    r = subprocess.run([str(BIN / command), *args], cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert r.returncode == 0, f"{command} {' '.join(args)}\n{r.stdout[-2000:]}\n{r.stderr[-4000:]}"

@pytest.mark.parametrize("nb", sorted(NBS, key=seconds, reverse=True), ids=name)   # longest first: two workers end together
def test_notebook_runs(nb): nbdev("nbdev-test", str(nb), cwd=ROOT)

def generated(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in (root / "llminfer").rglob("*.py") if not p.name.startswith("__")}

def differing(a: dict[str, bytes], b: dict[str, bytes]) -> list[str]: return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))

def test_library_is_what_notebooks_export(tmp_path):
    for d in ("nbs", "llminfer"): shutil.copytree(ROOT / d, tmp_path / d, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for f in ("pyproject.toml", "settings.ini", "_quarto.yml", "README.md"): shutil.copy(ROOT / f, tmp_path / f)
    want, inits = generated(ROOT), {p: p.read_bytes() for p in (tmp_path / "llminfer").rglob("__*__.py")}
    for f in generated(tmp_path): (tmp_path / f).unlink()
    for cwd in (tmp_path, tmp_path / "nbs"):      # from two directories: the result must not depend on it
        nbdev("nbdev-export", cwd=cwd)
        assert not differing(want, generated(tmp_path)), f"run nbdev-export; it changes {differing(want, generated(tmp_path))}"
    assert {p: p.read_bytes() for p in inits} == inits
    nbdev("nbdev-clean", cwd=tmp_path)
    dirty = [name(nb) for nb in NBS if nb.read_bytes() != (tmp_path / "nbs" / name(nb)).read_bytes()]
    assert not dirty, f"run nbdev-clean; it changes {dirty}"

def lines(cell) -> int: return len(source(cell).splitlines())

def test_cells_functions_modules_and_notebooks_are_small():
    long = [f"{name(nb)} #{c['id']}: {lines(c)} lines" for nb in NBS for c in cells(nb) if is_exported(c) and lines(c) > MAX_CELL]
    for p in (ROOT / "llminfer").rglob("*.py"):
        if p.name == "_modidx.py": continue
        text = p.read_text(encoding="utf-8")
        if (n := len(text.splitlines())) > MAX_MODULE: long.append(f"{p.name}: {n} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (n := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION:
                long.append(f"{p.name} {node.name}: {n} lines")
    long += [f"{name(nb)}: {nb.stat().st_size} bytes" for nb in NBS if nb.stat().st_size > MAX_BYTES]
    assert not long, "\n".join(long)

def test_outputs_hold_no_addresses_and_no_widgets():
    for nb in NBS:
        for c in cells(nb):
            for o in c.get("outputs", []):
                text = str(o.get("text", "")) + str(o.get("data", ""))
                assert not re.search(r" at 0x[0-9a-f]{6,}", text), f"{name(nb)} #{c['id']} stores an address"
                assert "widget-view" not in text, f"{name(nb)} #{c['id']} stores a widget"

def test_links_between_notebooks_lead_somewhere():
    links = [(name(nb), link) for nb in NBS for c in cells(nb) if c["cell_type"] == "markdown" for link in re.findall(r"\]\(([\w./-]+\.(?:ipynb|html))", source(c))]
    broken = [f"{nb}: {link}" for nb, link in links if not (ROOT / "nbs" / nb).parent.joinpath(link).exists()]
    assert not broken, "\n".join(broken)

def public_names(tree: ast.Module) -> set[str]:
    out: set[str] = set()
    for n in tree.body:
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): out.add(n.name)
        elif isinstance(n, ast.Assign): out |= {t.id for target in n.targets for t in ast.walk(target) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}
        elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name): out.add(n.target.id)
    return {x for x in out if not x.startswith("_")}

def test_every_exported_public_name_is_in_all():
    from_notebooks = {}
    for nb in NBS:
        if mod := module_of(nb):
            assert mod not in from_notebooks, f"{name(nb)} and {from_notebooks[mod]} export the same module"
            from_notebooks[mod] = name(nb)
            want = set()
            for c in cells(nb):
                if not is_exported(c): continue
                tree = ast.parse(source(c))
                want |= public_names(tree)
                for n in ast.walk(tree): assert not (isinstance(n, ast.ImportFrom) and n.level), f"{name(nb)} #{c['id']}: a relative import"
            tree = ast.parse((ROOT / "llminfer" / (mod.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
            have = next(ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
            assert len(have) == len(set(have)) and set(have) == want, f"{name(nb)}: __all__ differs by {set(have) ^ want}"

@pytest.mark.parametrize("nb", [p for p in NBS if p.stem != "index"], ids=name)   # README wants an example in one piece
def test_imports_have_cells_of_their_own(nb):
    "The site's build runs every cell that holds an import, and no others before it."
    for c in cells(nb):
        text = source(c)
        if c["cell_type"] != "code" or re.search(r"^#\|\s*(exports?|exporti|eval: false)\b", text, re.M): continue
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        imports = [line for line in lines if re.match(r"(import|from)\s", line)]
        others = [line for line in lines if line not in imports and "os.environ" not in line]
        assert not (imports and others), f"{name(nb)}: an import among other code:\n{text}"
