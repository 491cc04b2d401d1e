# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN     = $(VENV)/bin
# Bytecode of what is imported, at the first import: of all that is installed it takes a minute.
PIP     = $(BIN)/python -m pip install --quiet --no-compile
STAMP   = $(VENV)/.installed.stamp
# What compiles needs no more than torch, and runs while the rest is installed.
WITH_TORCH   = $(VENV)/.torch.stamp
WITH_KERNELS = $(VENV)/.kernels.stamp
WITH_REST    = $(VENV)/.rest.stamp

# A thread per process: idle threads that wait for a busy core cost more than they give.
test notebooks docs: export OMP_NUM_THREADS ?= 1

unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types notebooks docs dist check-cuda check-aarch64 clean

demo: $(STAMP)
	$(BIN)/python tutorials/copying_demo.py --output out

# On two workers; in one process, say, with PYTEST_ARGS="-n 0 tests/properties/test_golden.py".
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

# What the libraries say of the terminal that is missing here is no part of a notebook.
notebooks: export PYTHONWARNINGS = ignore:IProgress not found
# Without a network a notebook falls back on a model that comes with the package.
notebooks: export HF_HUB_OFFLINE = 1

# All of them; some with NOTEBOOKS="Copying_Mamba Time_Series".
notebooks: $(STAMP)
	$(BIN)/python tutorials/run_notebooks.py $(NOTEBOOKS)

# The pages are of the package as a wheel installs it, and with the notebooks' committed outputs, which a
# run of the notebooks checks.
docs: $(STAMP)
	rm -rf build docs/_build/site
	CAPTUM_SSM_BUILD=0 $(PIP) --no-deps --no-build-isolation --target docs/_build/site .
	# The examples on the pages run: without the kernels they take four times as long.
	-cp captum_ssm/*.so docs/_build/site/captum_ssm
	cd docs && PYTHONPATH=_build/site ../$(BIN)/python -m sphinx -q -W --keep-going . _build/html

# What would be published, built and checked; then installed into an environment of its own, and tried.
dist: $(STAMP)
	PYTHON=$(BIN)/python TORCH="$(TORCH)" .ci/dist

check-cuda: $(WITH_TORCH)
	PYTHON=$(BIN)/python bash csrc/check_cuda.sh

check-aarch64: $(WITH_TORCH)
	PYTHON=$(BIN)/python sh csrc/check_aarch64.sh

# torch first: a build that finds no torch would fetch another one, with gigabytes of CUDA.
$(WITH_TORCH):
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip "setuptools>=77" wheel ninja
	$(PIP) "$(TORCH)"
	touch $@

$(WITH_KERNELS): $(WITH_TORCH) setup.py $(shell find csrc -type f 2>/dev/null)
	$(BIN)/python setup.py --quiet build_ext --inplace > $(VENV)/kernels.log
	touch $@

$(WITH_REST): $(WITH_TORCH) setup.cfg setup.py pyproject.toml
	CAPTUM_SSM_BUILD=0 $(PIP) --no-build-isolation --editable ".[dev,docs]"
	# mamba-ssm's modules without their kernels: its reference code is tested against on a CPU.
	-MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(PIP) \
	    --no-build-isolation --no-deps mamba-ssm==2.3.2.post1
	# Weights that a notebook and a test explain; both are skipped where they cannot be had.
	-$(PIP) --no-deps typeseg==0.2.7
	touch $@

$(STAMP): $(WITH_KERNELS) $(WITH_REST)
	touch $@

clean:
	rm -rf $(VENV) .venv-fla build dist out docs/_build docs/tutorials captum_ssm/*.so *.egg-info
