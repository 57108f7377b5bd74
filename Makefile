# `make demo` and `make test` work from a bare clone. Stamps in .venv say what is installed there.
SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
# A CPU build where torch's own index is reached: make test TORCH=torch==2.13.0+cpu PIP_ARGS='--extra-index-url URL'
TORCH ?= torch==2.13.0
PIP_ARGS ?=
PYTEST_ARGS ?=
CODE := llminfer tests $(wildcard tools examples benchmarks)

.PHONY: help demo test check clients ray reproduce parity reliability readme docs lab audit clean
help:
	@echo "make demo    answer a question with the demo model (installs the base packages once)"
	@echo "make test    all tests, notebooks included (installs the dev packages once)"
	@echo "make check   ruff and mypy over library and tests"
	@echo "make clients heavy OpenAI clients against the server, in .venv-clients"
	@echo "make ray     replicas on a Ray cluster of two nodes on this machine, in .venv-ray"
	@echo "make reproduce  every number of the pages checked against the records, the registered comparisons judged (no GPU)"
	@echo "make parity  the long comparison with transformers (about 12 minutes, resumable)"
	@echo "make reliability  every fault, bad input and load of tests/reliability (about an hour, resumable), into benchmarks/records"
	@echo "make audit   installed packages against the advisories of osv.dev (needs the network)"
	@echo "make readme  README.md from nbs/index.ipynb"
	@echo "make docs    the site, into _docs"
	@echo "make lab     JupyterLab on the notebooks"
	@echo "make clean   remove what was built (not .venv)"

.venv/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llminfer needs Python 3.11 or newer, %s is %s: make PYTHON=python3.12 ..." % (sys.executable, sys.version.split()[0]))'
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q $(PIP_ARGS) '$(TORCH)'
	.venv/bin/python -m pip install -q $(PIP_ARGS) -e .
	@touch $@

.venv/.dev: .venv/.base
	.venv/bin/python -m pip install -q $(PIP_ARGS) '$(TORCH)' -e '.[dev]'
	@touch $@

.venv/.model: | .venv/.base
	llminfer pull demo
	@touch $@

.venv/.lab: .venv/.dev
	.venv/bin/python -m pip install -q $(PIP_ARGS) '$(TORCH)' -e '.[viz]' jupyterlab
	@touch $@

demo: .venv/.base .venv/.model
	python examples/demo.py

test: .venv/.dev .venv/.model
	OMP_NUM_THREADS=1 pytest -n 2 --dist worksteal -q $(PYTEST_ARGS)

check: .venv/.dev
	ruff check $(CODE)
	mypy

# langchain-openai, litellm and lm-eval against a real server here; heavy, so in an environment of their own
.venv-clients/.ready: tests/clients/requirements.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install -q $(PIP_ARGS) -r tests/clients/requirements.txt
	@touch $@

clients: .venv/.dev .venv-clients/.ready
	python tests/clients/run.py

# Ray has 240 MB, more than all of the dev packages but torch: an environment of its own, which sees .venv's packages too
.venv-ray/.ready: pyproject.toml .venv/.dev
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv/bin/python -c 'import site; print(site.getsitepackages()[0])' > "$$(.venv-ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/dev.pth"
	.venv-ray/bin/python -m pip install -q $(PIP_ARGS) $$(.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"])')
	@touch $@

ray: .venv-ray/.ready
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -q tests/cluster/on_ray.py

reproduce: .venv/.dev
	python tools/reproduce.py

parity: .venv/.dev .venv/.model
	python benchmarks/parity.py

reliability: .venv/.dev .venv/.model
	python -m tests.reliability.run --nightly --out benchmarks/records/reliability-$$(date -u +%F).json $(RELIABILITY_ARGS)

readme: .venv/.dev
	python tools/readme.py

docs: .venv/.dev
	python tools/docs.py

.venv-audit/.ready:
	test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install -q $(PIP_ARGS) pip-audit
	@touch $@

audit: .venv/.dev .venv-audit/.ready
	.venv-audit/bin/pip-audit --strict -s osv --path $$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || { echo 'the audit found something, or did not run'; exit 1; }

lab: .venv/.lab
	jupyter lab nbs

clean:
	rm -rf _proc _docs _site build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache *.egg-info nbs/sidebar.yml
	find llminfer tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
