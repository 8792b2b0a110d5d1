# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv and install by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test check browser crash-sweep fuzz load clean

demo: $(INSTALLED)  ## calibrate the small model that ships with calibeam, and write out/demo/report.html
	$(BIN)/calibeam run recipes/demo.toml

test: check browser  ## everything that CI runs
	$(BIN)/pytest

check: $(INSTALLED)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check -q src tests
	$(BIN)/mypy

browser:  # the report's tests open it in a real browser
	@command -v chromium >/dev/null || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null) \
	  || (echo "the tests need chromium: please install it" && exit 1)

crash-sweep: $(INSTALLED)  ## kill -9 at 60 points of each of five stages, and compare what comes out in the end
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/crash_sweep.py 60

fuzz: $(INSTALLED)  ## 10,000 cases for everything that reads what others wrote, and a million for Parquet
	CALIBEAM_FUZZ=10000 $(BIN)/pytest tests/test_fuzz.py
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python tests/coverage_fuzz.py out/fuzz -runs=1000000

load: $(INSTALLED)  ## time and memory at 20,000, 200,000 and 2 million rows
	$(BIN)/python benchmarks/load.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) out
