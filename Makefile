# `make test` and `make demo` set up all that they need in .venv, on a machine with nothing but Python 3.11 and make.
BIN := .venv/bin
STAMP := .venv/.installed-$(shell scripts/setup-key)

.PHONY: help test check demo bench lint setup lock clean
.SILENT:

help:
	echo "make test    all checks and all tests (sets up .venv first)"
	echo "make check   the quick loop: ruff, mypy and the fast tests, under a minute"
	echo "make demo    a real transformer through the store: the same tokens, and how long it took"
	echo "make bench   the local benchmark, with its data verified"
	echo "make lock    resolve requirements/ci.lock anew"
	echo "make clean   remove .venv, caches and build outputs"

setup: $(STAMP)

$(STAMP):
	scripts/setup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -q

check: lint
	$(BIN)/pytest -q -m "not slow"

demo: $(STAMP)
	$(BIN)/moonpool demo

bench: $(STAMP)
	$(BIN)/moonpool bench local

lock:
	scripts/lock

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/moonpool/client/_streaming.so
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
