# One command to serve, one to test; both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHAT_MODEL := smollm2
VECTOR_MODEL := minilm
CLIENTS := .venv-clients
CLIENT_PIP := $(CLIENTS)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check
# Each client of clients/more has an environment of its own.  Those of CI install in seconds and differ in what they send.
CLIENTS_MORE := .venv-clients-more
ONLY := $(patsubst clients/more/%/,%,$(dir $(wildcard clients/more/*/test_*.py)))
ifeq ($(ONLY),ci)
override ONLY := ai_sdk anthropic_node openai_agents shell_gpt smolagents
endif
# More test processes than cores, for many tests wait for servers, of one compute thread each: threads that share cores wait
# for each other at every kernel.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(if $(filter Linux,$(shell uname)),-p support.forked --forks 5,\
	--numprocesses 4 --dist loadfile --no-loadscope-reorder)

# Python keeps what it has compiled, whatever the shell says: else every process of the tests would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve weights vectors test suite quick families lint docs dist clients clients-install clients-more \
	clients-more-install gpu-check gpu-compile clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

install: $(VENV)/collected.ready $(VENV)/kernels.ready weights vectors   ## set everything up and run nothing

serve:           ## set up and serve a small chat model on http://127.0.0.1:8000 (ARGS=MODEL, or options)
	@$(MAKE) --jobs 2 --no-print-directory $(VENV)/serve.ready $(if $(ARGS),,weights)
	SLOTWISE_MODEL=$${SLOTWISE_MODEL-$(CHAT_MODEL)} $(BIN)/slotwise serve --or-builtin $(ARGS)

weights: $(VENV)/pip.ready   ## download the chat model, which `make serve` serves and tests use
	@PYTHONPATH="$(CURDIR)/src" $(BIN)/python -m slotwise pull $(CHAT_MODEL) >/dev/null || \
		echo "$(CHAT_MODEL) is missing: tests that need it are skipped"

vectors: $(VENV)/pip.ready   ## download the model of vectors that tests use
	@PYTHONPATH="$(CURDIR)/src" $(BIN)/python -m slotwise pull $(VECTOR_MODEL) >/dev/null || \
		echo "$(VECTOR_MODEL) is missing: tests that need it are skipped"

test: lint suite   ## set up and run every check and every test

suite: $(VENV)/collected.ready $(VENV)/kernels.ready weights vectors   ## every test
	$(PYTEST) $(ARGS)

quick: $(VENV)/collected.ready $(VENV)/kernels.ready weights vectors   ## the tests that take seconds
	$(PYTEST) -m "not slow" $(ARGS)

families: $(VENV)/collected.ready $(VENV)/kernels.ready   ## every architecture, also those that `make test` takes another one for; writes the table of docs/reference/architectures.md
	SLOTWISE_ALL_FAMILIES=1 $(PYTEST) -p support.families_result --families-result docs/families.json \
		tests/test_parity.py tests/test_every_family.py tests/test_rank_families.py tests/compute/model \
		tests/compute/gguf tests/test_encoders.py $(ARGS); \
	outcome=$$?; $(BIN)/python -m docs.generate && exit $$outcome

lint: $(VENV)/test.ready   ## style, types, and the arrows between packages
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/docs.ready   ## build the documentation as a site, build/site/index.html
	rm -rf build/pages && mkdir -p build/pages
	tar cf - README.md CHANGELOG.md LICENSE Dockerfile compose.yaml compose.cuda.yaml compose.scale.yaml compose.prefill.yaml deploy docs examples training/README.md training/curve.svg benchmarks/README.md benchmarks/gpu.md benchmarks/gpu-compile.md benchmarks/gpu-faults.md benchmarks/gpu-paper.md benchmarks/results \
		src/slotwise/core/interfaces.py src/slotwise/builtin/NOTICE.md | tar xf - -C build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

dist: $(VENV)/dist.ready   ## build the sdist and the wheel in build/dist, and try the wheel in an empty environment
	rm -rf build/dist build/lib
	$(BIN)/python -m build --outdir build/dist .
	$(BIN)/python -m twine check --strict build/dist/*
	test -z "$(TAG)" || test -f "build/dist/slotwise-$(patsubst v%,%,$(TAG)).tar.gz"  # a release's tag names its version
	$(PYTHON) deploy/try_wheel.py build/dist/*.whl

clients-install: $(CLIENTS)/clients.ready

clients: clients-install $(VENV)/kernels.ready   ## real clients against live servers; writes the table of docs/reference/clients.md
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest -W ignore clients --ignore clients/more $(or $(ARGS),--table docs/clients.json); \
	outcome=$$?; $(BIN)/python -m docs.generate && exit $$outcome

clients-more-install: $(ONLY:%=$(CLIENTS_MORE)/%.ready)

clients-more: clients-more-install $(VENV)/test.ready weights   ## more clients on a real model, each in an environment of its own (ONLY="aider crewai": two, ONLY=ci: the five of CI)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ONLY:%=clients/more/%) $(or $(ARGS),--table docs/clients.json); \
	outcome=$$?; $(BIN)/python -m docs.generate && exit $$outcome

gpu-check:       ## check and measure on a GPU, in eight minutes (ARGS=--rehearse: in small, on the CPU)
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then python=$(PYTHON); \
	else $(MAKE) $(VENV)/test.ready && python=$(BIN)/python; fi; \
	PYTHONPATH=src $$python -m benchmarks.gpu $(ARGS)

$(VENV)/pip.ready:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Slotwise needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --upgrade pip  # old ones take twice as long
	touch $@

$(VENV)/serve.ready: pyproject.toml | $(VENV)/pip.ready
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e .
	touch $@

$(VENV)/test.ready: $(VENV)/serve.ready   # by name: Slotwise is there already, and need not be built again
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "slotwise[dev]"
	touch $@

$(VENV)/docs.ready: $(VENV)/serve.ready
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "slotwise[docs]"
	touch $@

$(VENV)/dist.ready: $(VENV)/serve.ready
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "slotwise[dist]"
	touch $@

# It stands on the packages of $(VENV), torch above all: no second copy is fetched, and the server's stay as they are.
$(CLIENTS)/clients.ready: $(VENV)/test.ready $(wildcard clients/requirements*.txt) clients/package.json
	test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> $$($(CLIENTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/stands_on.pth
	{ $(CLIENT_PIP) --upgrade pip && $(CLIENT_PIP) -r clients/requirements.txt && \
	  $(CLIENT_PIP) --no-deps -r clients/requirements-alone.txt; } || \
		{ echo "The package registry did not give all clients of clients/requirements.txt: see above"; exit 1; }
	if command -v npm >/dev/null; then npm install --prefix clients --no-package-lock --no-audit --no-fund --silent || \
		{ echo "The package registry of Node did not give clients/package.json"; exit 1; }; fi
	touch $@

$(CLIENTS_MORE)/%.ready: clients/more/%/requirements.txt | $(VENV)/serve.ready
	$(BIN)/python -m venv --without-pip $(CLIENTS_MORE)/$*
	$(BIN)/python -m pip --python $(CLIENTS_MORE)/$* install --quiet --disable-pip-version-check -r $< || \
		{ echo "The package registry did not give all of $<: see above"; exit 1; }
	touch $@

$(CLIENTS_MORE)/%.ready: clients/more/%/package.json
	npm install --prefix $(<D) --no-package-lock --no-audit --no-fund --silent || \
		{ echo "The package registry of Node did not give $<: see above"; exit 1; }
	mkdir -p $(@D) && touch $@

# Read once, before four processes each rewrite the assertions of every test and compile whatever tests import.
$(VENV)/collected.ready: $(VENV)/test.ready
	$(BIN)/python -m pytest --collect-only --quiet >/dev/null || true
	touch $@

# Compiled once, before four processes that need them do so at the same time.
$(VENV)/kernels.ready: $(VENV)/serve.ready $(wildcard src/slotwise/compute/kernels/cpu/*.py src/slotwise/compute/kernels/cpu/*/*.py src/slotwise/compute/runner/sampling/*.py)
	for dtype in float32 bfloat16; do $(BIN)/slotwise generate --dtype $$dtype --max-tokens 1 x >/dev/null || exit; done
	touch $@

gpu-compile: $(VENV)/test.ready   ## compile every GPU kernel, and check its registers and memory; needs no GPU
	$(BIN)/python -m benchmarks.gpu_compile $(ARGS)

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) $(CLIENTS) $(CLIENTS_MORE) clients/node_modules clients/more/*/node_modules .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
