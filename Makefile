# One-word commands. Each sets up what it needs in a virtual environment of its own.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
USABLE := $(VENV)/usable
READY  := $(VENV)/ready
# ruff does not walk through links by itself
SOURCES := pippy pippy/ir pippy/drivers tests exps docs/conf.py docs/markdown_site.py docs/source_pages.py docs/notebook.ipynb

.DEFAULT_GOAL := help
.PHONY: help demo test check newest pythons bench gpu docs package setup clean

help: ## list the commands
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

demo: $(USABLE) ## split, draw and train a small transformer on workers, report where its time goes, and time it beside plain PyTorch
	@$(BIN)/python exps/demo.py

# what failed is said at the end (-rsfE). The tests start a hundred processes, and without its byte code each of them would compile pippy again
test: $(READY) ## run all tests, and say what was skipped
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 -rsfE

check: $(READY) ## ruff, mypy, pyright on the public names, and the layering test
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy pippy tests
	@$(BIN)/basedpyright --level error --pythonpath $(BIN)/python
	@$(BIN)/python -m pytest tests/test_layering.py

newest: $(READY) ## run a short suite on the newest CPU build of torch, if pip finds one newer than the pinned one
	@$(BIN)/python -m tests.short_suite newest $(TORCH)

pythons: $(READY) ## run the short suite on the other Pythons of this machine, as far as pip finds a CPU build of torch for them
	@$(BIN)/python -m tests.short_suite pythons $(PYTHONS)

bench: $(READY) ## run the benchmarks (minutes)
	@$(BIN)/python exps/compile_scale.py
	@$(BIN)/python exps/schedule_scale.py
	@$(BIN)/python -m exps.versus_torch --size tiny --rounds 30
	@$(BIN)/python -m exps.versus_torch --size small --rounds 30
	@$(BIN)/python -m exps.versus_torch --size medium --rounds 12 --only bound "torch 1F1B" "torch ZBV" "pippy 1f1b" "pippy zb_h1"
	@$(BIN)/python -m exps.gpt2_step --rounds 5
	@$(BIN)/python -m exps.control --chunks 8 128 --only "torch GPipe" "torch 1F1B" "pippy fill_drain" "pippy 1f1b"
	@$(BIN)/python -m exps.controller
	@$(BIN)/python -m exps.bubbles

gpu: $(READY) ## run the tests and benchmarks that need a GPU (minutes); without one it says so, and ends with status 0
	@$(BIN)/python -m exps.gpu --tests

docs: $(READY) ## make the documentation as a site, with a reference of the public names, in build/docs
	@$(BIN)/python -m sphinx -q -E -W --keep-going -c docs . build/docs
	@echo The documentation is in build/docs/index.html

package: $(READY) ## build the source distribution and the wheel in build/dist, and check them as an index of packages does
	@$(BIN)/python -m pip install --quiet twine
	@$(BIN)/python -m tests.distributions build/dist
	@$(BIN)/python -m twine check --strict build/dist/*

setup: $(READY) ## make the virtual environment

# torch and pippy, which are all that the demo needs
$(USABLE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pippy needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $(USABLE)

# and what tests, checks and benchmarks need
$(READY): $(USABLE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

clean: ## remove the virtual environment and what was built
	rm -rf $(VENV) build dist out *.egg-info
