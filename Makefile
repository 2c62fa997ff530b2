# Two commands do all the set-up there is: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test lint bench proto clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/ready
	$(BIN)/lora-server demo $(ARGS)

test: $(VENV)/ready
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python -m bench.transport
	$(BIN)/python -m bench.prefill
	$(BIN)/python -m bench.coupled
	$(BIN)/python -m bench.provision_speed

# the oldest supported grpcio generates, in an environment of its own, so that the code runs with it and all newer ones
proto:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet grpcio-tools==1.75.1
	.venv-proto/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. lora_server/wire/lora_server.proto

clean:
	rm -rf .venv .venv-proto build *.egg-info
