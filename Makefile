# Every target works on a machine with only Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile  # of what is installed much is never imported
# A stamp per extra, newer than pyproject.toml, says that the extra is installed. The package itself is built once.
STAMPS := $(VENV)/stamps

.PHONY: help demo test test-slow test-all lint types readme notebooks docs build bench stress clean

help:
	@echo "make demo       install, then sweep epsilon of shuffling over eps0 and n: out/sweep.nc, out/sweep.png, a table"
	@echo "make test       install, then run the tests"
	@echo "make test-slow  the tests that take seconds each; .ci/run runs both"
	@echo "make test-all   these and the tests that take longest: before a release"
	@echo "make lint types readme notebooks docs build bench stress    the other checks"

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "jaxdp needs Python >= 3.11; say make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/package: pyproject.toml | $(STAMPS)/venv
	$(PIP) --editable .
	touch $@

$(STAMPS)/%: $(STAMPS)/package
	$(PIP) "jaxdp-accounting[$*]"
	touch $@

$(STAMPS)/demo: $(STAMPS)/package
	$(PIP) "jaxdp-accounting[sweep,plot]"
	touch $@

demo: $(STAMPS)/demo
	mkdir -p out
	rm -rf out/sweep.nc out/sweep.nc.parts
	$(BIN)/jaxdp sweep shuffle --eps0 0.1:8:80 --num-users 1e3:1e9:61:log --delta 1e-6 --bound clones,stronger \
		--out out/sweep.nc --plot out/sweep.png > out/sweep.txt
	cat out/sweep.txt

# A file compiles in one process. NumPy multiplies matrices in one thread: several wait busily for one another.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(STAMPS)/test
	$(PYTEST) -m "not slow and not thorough"

test-slow: $(STAMPS)/test
	$(PYTEST) -m "slow and not thorough"

test-all: $(STAMPS)/test
	$(PYTEST)

lint: $(STAMPS)/lint
	$(BIN)/ruff check .

types: $(STAMPS)/lint
	$(BIN)/mypy

# The Python blocks of the README, run as they stand, one after the other.
readme: $(STAMPS)/demo
	$(BIN)/python -c 'import re; blocks = re.findall(r"```python\n(.*?)```", open("README.md").read(), re.S); exec(compile("\n".join(blocks), "README.md", "exec"))'

# The flag is for releases of jaxlib whose sums are wrong without it (docs/limits.md).
notebooks: $(STAMPS)/notebooks
	XLA_FLAGS="$$XLA_FLAGS --xla_cpu_experimental_ynn_fusion_type=" $(BIN)/python .ci/run_notebooks.py notebooks/*.ipynb

# The site in out/docs, from stored outputs: nothing is executed or fetched, and a warning (a dead link) is an error.
docs: $(STAMPS)/docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs out/docs

build: $(STAMPS)/venv
	$(PIP) build
	rm -rf dist
	$(BIN)/python -m build --outdir dist

bench: $(STAMPS)/all $(STAMPS)/bench
	for script in benchmarks/bench_*.py benchmarks/peers.py; do $(BIN)/python $$script || exit 1; done

# Random cases against independent routes; not part of the daily checks.
stress: $(STAMPS)/bench
	$(BIN)/python benchmarks/stress.py --cases 20000 --seed 1

clean:
	rm -rf $(VENV) out dist
