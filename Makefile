# Two commands set everything up on a fresh machine: `make bandwidth` (the main job) and `make test`.
PYTHON ?= python3
# Test processes: more than cores, because ranks wait for each other.
WORKERS ?= 3
VENV := .venv
FRAMEWORKS := .venv-frameworks
TORCH := .venv-torch-$(VERSION)
RUN := $(VENV)/bin/python
# Versions are pinned in constraints.txt, torch's too. Modules are compiled where
# they are imported first: all of torch's would take longer than its installation. Compiled again in every process,
# they would take half of the tests' time.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(RUN) -m pip install --quiet --no-compile --constraint constraints.txt

# Makes an environment that sees what is in $(VENV), torch among it; what is installed into it comes first, and is not in $(VENV).
ABOVE = $(RUN) -m venv --clear --without-pip $(1) && $(RUN) -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
	> $$($(1)/bin/python -c "import site; print(site.getsitepackages()[0])")/below.pth

.PHONY: bandwidth test test-all test-frameworks test-torch cubins docs format clean

bandwidth: $(VENV)/experiments
	$(RUN) -m experiments.bandwidth

# Beside mypy, a process compiles the modules of all tests: each worker would compile them for itself.
test: $(VENV)/dev
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy & $(RUN) -m pytest --collect-only -qq > /dev/null; wait $$!
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow"

# Before a release: also every scheme in every wrapper, and what sanitizers, other GPU architectures
# and ten thousand steps show.
test-all: test $(VENV)/docs
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist worksteal -m slow

# Lightning, Accelerate, Transformers, Ray, Megatron-Core and torchft, in an environment of their own: it sees what is
# in $(VENV), torch among it, and adds the frameworks. Scripts run in two processes; about ten minutes.
# Then docs/integrations/matrix.md says which versions passed.
test-frameworks: $(VENV)/frameworks
	$(FRAMEWORKS)/bin/python -m pytest -p no:cacheprovider tests/frameworks tests/hosts/test_torchft.py
	$(FRAMEWORKS)/bin/python -m tests.frameworks.versions

$(VENV)/frameworks: $(VENV)/dev pyproject.toml
	$(call ABOVE,$(FRAMEWORKS))
	$(RUN) experiments/tools/needs.py frameworks > $(FRAMEWORKS)/requirements.txt
	$(FRAMEWORKS)/bin/python -m pip install --quiet --constraint constraints.txt \
		--requirement $(FRAMEWORKS)/requirements.txt
	touch $@

# The tests, without format, lint and types, on another torch: make test-torch VERSION=2.11.0. On x86-64 pip fetches
# gigabytes of CUDA packages with it, unless PIP_EXTRA_INDEX_URL names an index of builds for the CPU.
test-torch: $(TORCH)/created
	$(TORCH)/bin/python -m tests.unit.test_torch_versions
	$(TORCH)/bin/python -m pytest -p no:cacheprovider --numprocesses $(WORKERS) --dist worksteal -m "not slow"

.venv-torch-%/created: $(VENV)/dev
	$(call ABOVE,.venv-torch-$*)
	grep -vE '^(torch|nvidia-.*|setuptools)==' constraints.txt > .venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python -m pip install --quiet --constraint .venv-torch-$*/constraints.txt torch==$* 'setuptools>=77'
	touch $@

# Compiles the CUDA kernels (two minutes, no GPU) for a machine without compilers, by the NVRTC that it has. There, with
# .cubins brought along: COMMHOOKS_CACHE=.cubins python -m experiments.gpu_kernels --run 1
NVRTC ?= 13.0.88
ARCHITECTURE ?= 90
cubins: $(VENV)/dev
	$(RUN) -m pip install --quiet --no-deps --upgrade --target .nvrtc/$(NVRTC) nvidia-cuda-nvrtc$(if $(filter 12.%,$(NVRTC)),-cu12)==$(NVRTC)
	PYTHONPATH=.nvrtc/$(NVRTC) COMMHOOKS_CACHE=.cubins $(RUN) -m experiments.gpu_kernels --part cubins --architecture $(ARCHITECTURE) --minutes 60 --out .cubins

# The site of docs/ with reference and search: python -m http.server --directory build/site
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

format: $(VENV)/dev
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# Kernels are compiled while other packages are installed.
$(VENV)/experiments $(VENV)/dev: $(VENV)/%: $(VENV)/created pyproject.toml constraints.txt
	$(MAKE) --no-print-directory --jobs 2 $(VENV)/package $(VENV)/$*.needs
	touch $@ $(VENV)/experiments

$(VENV)/package: $(VENV)/created pyproject.toml
	$(INSTALL) --no-deps --editable .
	touch $@

$(VENV)/%.needs: $(VENV)/created pyproject.toml constraints.txt
	$(RUN) experiments/tools/needs.py $* > $@.txt
	$(INSTALL) --requirement $@.txt
	touch $@

# Apart from the rest: a theme of mkdocs has more files than torch.
$(VENV)/docs: $(VENV)/dev $(VENV)/docs.needs
	touch $@

clean:
	rm -rf $(VENV) .nvrtc .cubins $(FRAMEWORKS) .venv-torch-* build dist *.egg-info
