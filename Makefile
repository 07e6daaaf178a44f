# Needs python3 (with venv) and make; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
DEMO_DIR ?= demo_run

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv test test-fast gpu check format demo clean

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Error: $(PYTHON) is Python \
	%d.%d; 3.11 or newer is needed. Give one, as in: make PYTHON=python3.12" % v[:2])'
	@echo "Installing torch, torchtune and the rest into $(VENV): 2 to 5 minutes; 2 GB, or 6 GB with CUDA"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@
	@echo "Installed. The commands are in $(BIN): \`. $(BIN)/activate\`, then \`tune ls\`."

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 2 --dist worksteal

test: $(STAMP)
	$(PYTEST)

# What starts no `tune` process, and neither forks nor kills others for long.
test-fast: $(STAMP)
	$(PYTEST) tests/unit tests/property tests/parity

# Whether a GPU does what the tests on a CPU promise, and how fast: docs/gpu.md.
gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu; tests=$$?; \
	$(BIN)/python benchmarks/gpu.py && exit $$tests

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy torchtune_grpo

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

DEMO := grpo_full_finetune_single_device --config tiny_arithmetic_grpo

demo: $(STAMP)
	$(BIN)/tune run $(DEMO) output_dir=$(DEMO_DIR)
	$(BIN)/torchtune-grpo evaluate $(DEMO_DIR) --show 3
	@echo
	@echo "Now try:"
	@echo '  $(BIN)/torchtune-grpo sample $(DEMO_DIR) --samples 4 --prompt "What is 3 + 4?"'
	@echo '  $(BIN)/tune run $(DEMO) output_dir=$(DEMO_DIR)_lora model=torchtune_grpo.models.lora_hf_model optimizer.lr=1e-3'
	@echo '  $(BIN)/tune cp tiny_arithmetic_grpo my_config.yaml'
	@echo
	@echo "The run as a page, to open in a browser: $(DEMO_DIR)/run.html"

clean:
	rm -rf $(VENV) $(DEMO_DIR) $(DEMO_DIR)_lora gpu_check build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
