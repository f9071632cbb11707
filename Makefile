# Everything a fresh machine needs: Python 3.11, git and a C compiler. `make demo` and `make test` set up by themselves.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)

BIN := .venv/bin
READY := .venv/.ready
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q --progress-bar off
# Workers of both suites; each starts servers of its own.
JOBS ?= 2
# Bytecode is kept though the environment may say otherwise: servers under test are many processes, and each would compile the package again.
PYTEST := HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
CODE := bloomery tests bench
DASHBOARD := bloomery/ui/dist/index.html
PAGES := $(shell find web/src web/public -type f 2>/dev/null) web/index.html web/package-lock.json web/vite.config.ts web/svelte.config.js

.PHONY: bubblewrap chromium setup demo web dashboard test test-slow test-all test-gpu test-web test-cookbook lint check fix golden types contract fidelity charts clean

setup: $(READY) dashboard

demo: $(READY) dashboard
	$(BIN)/bloomery demo $(ARGS)

test: $(READY)
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not slow and not gpu and not web" $(ARGS)

test-all: test test-slow

# pytest says 5 when it found nothing to run.
test-slow: $(READY) bubblewrap
	$(PYTEST) -n $(JOBS) --dist loadfile -m "slow and not gpu and not web" $(ARGS) || [ $$? -eq 5 ]

# The container of graders; without it its tests are skipped.
bubblewrap:
	@command -v bwrap >/dev/null || { apt-get update -qq && apt-get install -y -qq bubblewrap; } >/dev/null 2>&1 || echo "no bubblewrap: what takes it is skipped"

# On a machine with a GPU, and torch for it; without one everything is skipped.
test-gpu: $(READY)
	$(PYTEST) -m gpu $(ARGS)

# The dashboard, built from web/ into the package.
web:
	@command -v npm >/dev/null || { echo "no npm found: install Node.js 20.19 or newer, which brings it, then make web again" >&2; exit 1; }
	@node -e 'const [major, minor] = process.versions.node.split("."); process.exit(major > 20 || (major == 20 && minor >= 19) ? 0 : 1)' \
	|| { echo "Node.js $$(node --version) is too old for the dashboard: install 20.19 or newer, then make web again" >&2; exit 1; }
	@$(MAKE) -s $(DASHBOARD)

# The same where it can be built, and a word where it cannot: everything else works without it.
dashboard:
	@{ command -v npm >/dev/null && $(MAKE) -s $(DASHBOARD); } || echo "the dashboard is not built: with Node.js 20.19 or newer, make web builds it"

$(DASHBOARD): $(PAGES)
	@echo "building the dashboard"
	@cd web && { npm ci --silent --no-audit --no-fund \
	|| { echo "npm cannot install what web/package-lock.json names: have it reach a package registry, then make web again" >&2; exit 1; }; }
	@cd web && npm run --silent build -- --logLevel warn

# The dashboard in a real browser; whatever is missing for it is installed, or named.
test-web: $(READY) web chromium
	@$(PIP) -r requirements-web.txt || { echo "Playwright is missing, and pip cannot install it: have pip reach a package index for requirements-web.txt, then make test-web again" >&2; exit 1; }
	$(PYTEST) -m web $(ARGS)

# Debian's, which takes root.
chromium:
	@command -v chromium >/dev/null || { echo "installing Chromium" && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } \
	|| { echo "no Chromium found, and apt-get cannot install it here: install the package chromium, which brings the program chromium, then make test-web again" >&2; exit 1; }

# The recipes of the published tinker-cookbook, which installs itself into build/cookbook the first time; part of test-all.
test-cookbook: $(READY)
	$(PYTEST) -m slow tests/cookbook $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy

check: lint test

fix: $(READY)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# Rewrites the golden files; review the diff.
golden: $(READY)
	$(BIN)/python -m tests.cli.golden

# Rewrites web/src/api.d.ts, the types of the HTTP API for the dashboard, from the OpenAPI document of this code.
types: $(READY)
	@command -v npm >/dev/null || { echo "no npm found: install Node.js 20 or newer, which brings it, then make types again" >&2; exit 1; }
	cd web && npm ci --no-audit --no-fund
	$(BIN)/python -m tests.web.api_types

# Runs the tests that show rows of docs/contract.md, and rewrites it from those that pass; review the diff.
contract: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.tinker.contract_page

# Trains a small instance of every architecture and rewrites docs/fidelity.md from its cards, some minutes; review the diff.
fidelity: $(READY)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.fidelity.page

# Draws the charts of docs/ from the newest figures in bench/results; review the diff.
charts: $(READY)
	$(BIN)/python -m bench.mixed_chart
	$(BIN)/python -m bench.rl_chart

clean:
	rm -rf .venv build dist bloomery/ui/dist web/node_modules .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first: an open range, or the default index on Linux, would bring gigabytes of GPU libraries onto a machine without a GPU.
$(READY): requirements.txt requirements-dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with ensurepip found: install one (on Debian: python3.11-venv), or make setup PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@if $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then echo "installing $(TORCH) from $(TORCH_INDEX)"; $(PIP) --index-url $(TORCH_INDEX) $(TORCH); \
	else echo "installing $(TORCH) from where pip finds it ($(TORCH_INDEX) does not answer)"; $(PIP) $(TORCH); fi
	@echo "installing pinned dependencies"
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m bloomery.models.native
	@touch $(READY)
