"""The rules of the house: floors, light imports, settings in step, README current, commands that explain themselves."""
import ast, os, re, shlex, shutil, subprocess, sys, tomllib
from pathlib import Path
import pytest
import house, readme
from house import ROOT

LIB = ROOT / "llminfer"
MODULES = {".".join(p.relative_to(LIB).with_suffix("").parts).removesuffix(".__init__"): p for p in LIB.rglob("*.py") if p.name != "_modidx.py" and p not in (LIB / "__init__.py", LIB / "__main__.py")}
FLOORS = house.floors()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

def floor(mod: str) -> tuple[int, str] | None:
    "Floor of a module; a package stands as high as its highest part."
    return FLOORS.get(mod, max((n for m, n in FLOORS.items() if m.startswith(mod + ".")), default=None))

def imported(mod: str, path: Path) -> list[tuple[int, str]]:
    "(line, module) of each import of our own code, in functions too; `llminfer` itself is the module ''."
    out = []
    package = ["llminfer", *mod.split(".")][: None if path.name == "__init__.py" else -1]
    for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(n, ast.Import): targets = [a.name for a in n.names]
        elif isinstance(n, ast.ImportFrom):
            base = ".".join([*package[: len(package) - n.level + 1], *([n.module] if n.module else [])]) if n.level else n.module or ""
            targets = [f"{base}.{a.name}" if f"{base}.{a.name}".removeprefix("llminfer.") in MODULES else base for a in n.names]
        else: continue
        out += [(n.lineno, t.removeprefix("llminfer").lstrip(".")) for t in targets if t.split(".")[0] == "llminfer"]
    return out

@pytest.mark.parametrize("mod", sorted(MODULES))
def test_a_module_imports_only_from_lower_floors(mod):
    here = floor(mod)
    assert here is not None, f"no notebook exports llminfer.{mod}"
    for line, target in imported(mod, MODULES[mod]):
        if target.startswith(mod + ".") and MODULES[mod].name == "__init__.py": continue   # a package may gather its parts
        there = floor(target)
        assert there is not None, f"{MODULES[mod].name}:{line} imports llminfer{'.' * bool(target)}{target}, which is on no floor"
        assert there < here, f"{MODULES[mod].name}:{line}: floor {here} imports {target} on floor {there}"

def test_library_needs_no_fastcore_and_patches_nothing():
    for mod, path in MODULES.items():
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in n.names] if isinstance(n, ast.Import) else [n.module or ""] if isinstance(n, ast.ImportFrom) else []
            assert not {x.split(".")[0] for x in names} & {"fastcore", "nbdev", "execnb"}, f"{mod} imports {names}"
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)): assert not any("patch" in ast.unparse(d) for d in n.decorator_list), f"{mod}: {n.name}"

def loaded_by(code: str) -> set[str]:
    "Top-level modules that a fresh process has loaded after running `code`."
    r = subprocess.run([sys.executable, "-c", f"{code}\nimport sys; print(' '.join({{m.split('.')[0] for m in sys.modules}}))"], cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    return set(r.stdout.splitlines()[-1].split())

@pytest.mark.parametrize("code", ["import llminfer", "import llminfer; dir(llminfer); llminfer.__version__", "from llminfer import EngineConfig, GenerationRequest; EngineConfig(device='cpu').validate()",
    "import llminfer.kv_cache, llminfer.batching" if {"kv_cache", "batching"} <= FLOORS.keys() else "import llminfer.interfaces"])
def test_light_imports_load_no_torch(code): assert not loaded_by(code) & {"torch", "transformers", "tokenizers"}

def test_floors_below_21_load_nothing_heavy_at_import():
    low = sorted((n, m) for m, n in FLOORS.items() if n < (21, ""))
    got = loaded_by("\n".join(f"import llminfer.{m}" for _, m in low))
    assert not got & {"fastapi", "typer", "ipywidgets", "peft", "bitsandbytes", "vllm", "transformers", "triton_kernels", "flashinfer", "gguf"}

def test_lazy_exports_are_the_real_things():
    import llminfer
    for name in llminfer.__all__:
        assert name in dir(llminfer)
        if llminfer._HOMES[name] in FLOORS: assert getattr(llminfer, name).__module__ == f"llminfer.{llminfer._HOMES[name]}"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"): getattr(llminfer, "Nothing")  # noqa: B009
    assert set(llminfer.__all__) == set(llminfer._HOMES) and llminfer.__version__ == "0.1.0"

def test_settings_ini_agrees_with_pyproject():
    s, p, n = house.settings(), PROJECT["project"], PROJECT["tool"]["nbdev"]
    import llminfer
    assert s["version"] == llminfer.__version__
    assert s["requirements"].split() == p["dependencies"]
    assert (s["lib_name"], s["description"], ">=" + s["min_python"]) == (p["name"], p["description"], p["requires-python"])
    assert s["keywords"].split() == p["keywords"] and s["author"] == p["authors"][0]["name"]
    assert {k: s[k] for k in ("lib_path", "nbs_path", "doc_path", "tst_flags", "readme_nb", "branch")} == {k: n[k] for k in ("lib_path", "nbs_path", "doc_path", "tst_flags", "readme_nb", "branch")}
    for k in ("put_version_in_init", "update_pyproject", "custom_sidebar"): assert s[k] == str(n[k])
    assert dict([s["console_scripts"].split("=")]) == p["scripts"]

def test_extras_and_package_data():
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras.keys() >= {"serve", "serving", "viz", "quant", "peft", "gpu", "vllm", "ray", "structured", "dev"}
    assert not any(d.startswith("transformers") for d in PROJECT["project"]["dependencies"])     # make demo does without
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["llminfer*"]         # subpackages too
    assert (LIB / "py.typed").exists()

def test_quarto_file_is_at_the_top():
    link = ROOT / "nbs" / "_quarto.yml"
    assert link.is_symlink() and os.readlink(link) == "../_quarto.yml" and link.resolve() == ROOT / "_quarto.yml"
    assert (ROOT / "nbs" / "styles.css").exists() and (ROOT / "nbs" / "nbdev.yml").exists()

def test_readme_and_index_are_current(): assert not readme.stale(), "run make readme"

def test_reading_order_names_every_notebook_once_and_keeps_its_promises():
    table = readme.floor_table()
    for stem in readme.by_floor(): assert sum(f"[{stem}]({stem}.ipynb) |" in row or f"[{stem}]({stem}.ipynb)** |" in row for row in table.splitlines()) == 1, stem
    assert readme.section((0, "")) == readme.SECTIONS[0][1] and readme.section((28, "")) == readme.SECTIONS[-1][1]
    hour, day, _ = (stems for _, _, stems in readme.PATHS)
    assert hour and day and {*hour, *day} <= readme.by_floor().keys() and hour == sorted(hour) and day == sorted(day)
    assert 40 <= readme.path_minutes(hour) <= 75 and readme.path_minutes(day) <= 6 * 60
    assert readme.seconds().keys() <= {p.stem for p in house.notebooks()} and max(readme.seconds().values()) < 60

def test_every_make_target_is_in_the_help_and_ci_calls_make_test():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.M)[1].split()) - {"help"}  # type: ignore[index]
    assert targets >= {"demo", "test", "check", "parity", "docs", "lab", "clean"}
    shown = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert {line.split()[1] for line in shown.splitlines()} == targets
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK) and "make test" in ci.read_text(encoding="utf-8")

def test_ci_passes_on_failure_and_reads_no_input(tmp_path):
    for rc in (0, 2):
        (tmp_path / "make").write_text(f"#!/bin/sh\necho fake make $*; cat; exit {rc}\n")
        (tmp_path / "make").chmod(0o755)
        r = subprocess.run(["bash", str(ROOT / ".ci/run")], input="never read", capture_output=True, text=True, env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
        assert (r.returncode, "passed" in r.stdout, "never read" in r.stdout) == (rc, rc == 0, False)

def test_a_python_that_is_too_old_is_named(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c \"import sys; sys.version_info = (3, 9); sys.version = '3.9.1 x'; exec(sys.argv[1])\" \"$2\"\n")
    old.chmod(0o755)
    for f in ("Makefile", "pyproject.toml"): shutil.copy(ROOT / f, tmp_path / f)
    r = subprocess.run(["make", "test", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert r.returncode == 2 and "llminfer needs Python 3.11 or newer" in r.stderr and not (tmp_path / ".venv").exists()
