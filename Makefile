# `make demo` first; then `make test`, `make site`, `make check`. Each works in a fresh checkout, in an environment of its own,
# .venv. docs/howto/install.md prints the same lines for systems without make.
.PHONY: help demo test site check torch
INSTALL = .venv/bin/pip install -q -c constraints.txt
# On Linux without an NVIDIA GPU, PyTorch's CPU build: the default one brings several gigabytes of CUDA.
CPU = $(shell test "$$(uname -s)" = Linux && ! command -v nvidia-smi >/dev/null && echo --extra-index-url https://download.pytorch.org/whl/cpu)

help:
	@echo "make demo    install, and run federated learning on handwritten digits, offline (about two minutes)"
	@echo "make test    install, and run the fast tests (about eight minutes on two cores)"
	@echo "make site    install, and build the documentation in site/"
	@echo "make check   everything that CI runs (twenty minutes on two cores)"

demo: torch
	$(INSTALL) ".[fl,data,tune,export]"
	.venv/bin/sparsekit fedlps

test: torch
	$(INSTALL) -e ".[test]"
	.venv/bin/pytest -n 2 -m "not slow and not gpu and not flower"

site: torch
	$(INSTALL) -U "pip>=25.1"
	$(INSTALL) -e ".[fl]" --group docs
	.venv/bin/mkdocs build --strict

check:
	.ci/run

torch:
	python3 -m venv .venv
	$(INSTALL) --no-deps --retries 1 $(CPU) torch
