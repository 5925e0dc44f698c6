# One target, one verb. Each makes or reuses .venv; nothing has to be activated.
#   PYTHON=python3.13   the Python to build .venv with (a .venv of another version is rebuilt)
#   ARGS="…"            passed on to the program behind the target
#   CONFIG=…            the config that `train` uses
#   TORCH=no            `bench` without PyTorch, which is a large download
.DEFAULT_GOAL := help
PYTHON ?=
ARGS ?=
CONFIG ?= configs/shakespeare.yaml
TORCH ?= yes
RUN := .venv/bin/python -m
# Neighbouring tests stay with one worker, which then has their programs compiled already.
WORKERS := -n 2 --dist worksteal

# What `check` runs of the fast tests: those that compile little, over every part.
QUICK := tests/test_structure.py tests/test_docs.py tests/masks tests/lab \
  tests/attention/test_choice.py tests/attention/test_online_softmax.py \
  tests/contract/test_errors.py tests/nanogpt_jax/data tests/nanogpt_jax/test_config.py \
  tests/nanogpt_jax/test_metrics.py

# The step whose time the article gives, with each attention/preprocess.
STEP := --config configs/gpt2_124m_v6e_16.yaml --override optimizer.name=adamw \
  --override training.remat=false --override training.grad_accumulation=1 \
  --impl xla/xla,ours/xla,xla/pallas,ours/pallas,jax_flash/xla,splash/xla --rows 8,16 \
  --measured xla/xla=242.81 --json bench-results/step.json

# libtpu is in .venv for its compiler, and complains at each start of jax where there is no TPU.
ifeq ($(wildcard /dev/accel* /dev/vfio/[0-9]* /dev/nvidia0),)
export JAX_PLATFORMS ?= cpu
endif

.PHONY: help venv train test check bench bench-tpu-estimate bench-tpu-step clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s  %s\n", $$1, $$2}' Makefile
	@echo '  Options: PYTHON=python3.13, ARGS="…" for the program behind a target, TORCH=no for bench'

venv: ## make the development environment in .venv, or bring it up to date
	@PYTHON='$(PYTHON)' scripts/venv

train: venv ## train a small transformer on Shakespeare and print what it writes
	@$(RUN) nanogpt_jax.train --config $(CONFIG) $(ARGS)

test: venv ## run the whole test suite
	@$(RUN) pytest $(WORKERS) --durations=30 $(ARGS)

check: venv ## lint, format check, types and the quickest tests: under a minute
	@$(RUN) ruff check
	@$(RUN) ruff format --check
	@$(RUN) pyright
	@$(RUN) pytest $(WORKERS) -q -m "not slow" $(QUICK) $(ARGS)

bench: venv ## time attention on this CPU beside its peers, and write JSON
	@TORCH='$(TORCH)' scripts/venv bench
	@$(RUN) smalti.lab.bench $(ARGS)

bench-tpu-estimate: venv ## compare attention with its peers on TPUs by estimate; no TPU is needed
	@$(RUN) smalti.cli estimate bench $(ARGS)

bench-tpu-step: venv ## compare whole training steps on TPU v6e by estimate; no TPU is needed
	@$(RUN) nanogpt_jax.estimate $(STEP) $(ARGS)

clean: ## remove .venv, caches and build output (runs/, data/ and bench-results/ stay)
	@rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
