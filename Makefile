# Two commands do everything on a fresh machine, set-up included: `make demo` and `make test`.
# Needs Python 3.11..3.13 and a package index. PYTHON=/path/to/python chooses another interpreter.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch comes first and by itself: its pin decides which build everything else is resolved against.
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)",$$/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help install demo test fuzz kills lint format clean

help:
	@echo "make demo     train the bundled 135M model through an OpenAI client, on this machine"
	@echo "make test     everything this repository claims, checked (set-up included); TESTS=tests WORKERS=3"
	@echo "make fuzz     fuzz the gateway and its workers, MINUTES=10"
	@echo "make kills    kill the processes of a training run while agents work with it, KILLS=200"
	@echo "make lint     formatting, lint and types only"
	@echo "make install  the virtual environment in $(VENV)"

install: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; install one or run make PYTHON=/path/to/python" >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/math_agent/demo.py $(OVERRIDES)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict areal

# Most tests wait for processes they started, so more of them than cores run at once. WORKERS=0: one by one, for --pdb.
WORKERS ?= 3

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

MINUTES ?= 10

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

KILLS ?= 200

kills: $(STAMP)
	$(BIN)/python -m tests.faults --kills $(KILLS) $(if $(SEED),--seed $(SEED))

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
