"""Many kinds of bad adapter, each refused by a server with a message of its own; its registry is as before."""

import json
import shutil

import pytest
import torch

from lora_server.demo import tiny
from lora_server.demo.launch import running_server
from lora_server.errors import AdapterError, LoraServerError
from lora_server.registry.database import FILE, Database
from lora_server.registry.versions import versions
from tests.support.adapter_files import LAYERS, Q, good
from tests.support.serving import HANG_SECONDS, ask, until
from tests.support.workload import workload

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "w1"]}
FIRST = f"{Q}.lora_A.weight"
# kind: what is changed in the config, what in the tensors, and what the refusal says
FILES = {
    "DoRA": ({"use_dora": True}, {}, "use_dora"),
    "biases": ({"bias": "all"}, {}, "bias"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
    "another method": ({"peft_type": "IA3"}, {}, "peft_type"),
    "PiSSA": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights"),
    "replicated layers": ({"layer_replication": [[0, 2], [1, 4]]}, {}, "layer_replication"),
    "QA-LoRA": ({"use_qalora": True}, {}, "use_qalora"),
    "block diagonal": ({"use_bdlora": {"nblocks": 2}}, {}, "use_bdlora"),
    "trained tokens": ({"trainable_token_indices": [3]}, {}, "trainable_token_indices"),
    "what nobody knows": ({"use_something_new": True}, {}, "use_something_new"),
    "rank 0": ({"r": 0}, {}, "got 0"),
    "rank too large": ({"r": 1025}, {}, "got 1025"),
    "rank no number": ({"r": "8"}, {}, "got '8'"),
    "alpha NaN": ({"lora_alpha": float("nan")}, {}, "lora_alpha"),
    "a pattern that never ends": ({"rank_pattern": {r"(a)\1": 4}}, {}, "references to groups"),
    "an empty invocation": ({"alora_invocation_tokens": []}, {}, "alora_invocation_tokens"),
    "a rank that is not the tensors'": ({"r": 8}, {}, "lora_rank 8"),
    "NaN": ({}, {FIRST: torch.full((4, 64), float("nan"))}, "NaN"),
    "another width": ({}, {FIRST: torch.ones(4, 63)}, "[4, 63]"),
    "a scalar": ({}, {FIRST: torch.ones(())}, "shape []"),
    "64 bits": ({}, {FIRST: torch.ones(4, 64, dtype=torch.float64)}, "'F64'"),
    "integers": ({}, {FIRST: torch.ones(4, 64, dtype=torch.int8)}, "'I8'"),
    "a layer too many": ({}, {f"{LAYERS}.9.self_attn.q_proj.lora_A.weight": torch.ones(4, 64)}, "layer 9"),
    "an expert too many": ({}, {f"{LAYERS}.0.mlp.experts.99.w1.lora_A.weight": torch.ones(4, 64)}, "expert 99"),
    "a module without a site": ({}, {f"{LAYERS}.0.mlp.gate.lora_A.weight": torch.ones(4, 64)}, "no site takes"),
}


def config_text(directory, text):
    (directory / "adapter_config.json").write_text(text)


# kind: what happens to a good adapter's directory, and what the refusal says
DIRECTORIES = {
    "no directory": (shutil.rmtree, "got none at this path"),
    "no config": (lambda path: (path / "adapter_config.json").unlink(), "adapter_config.json"),
    "no JSON": (lambda path: config_text(path, "{"), "adapter_config.json"),
    "no object": (lambda path: config_text(path, "[]"), "adapter_config.json"),
    "a pickle": (lambda path: (path / "adapter_model.safetensors").rename(path / "adapter_model.bin"), "pickle"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "safetensors"),
    "cut short": (lambda path: cut(path, 100), "truncated"),
    "half a pair": (lambda path: without(path, FIRST), "half a pair"),
}
URIS = {
    "no path": ("", "adapter source"),
    "a password": ("s3://user:secret@bucket/law", "a password"),
    "no scheme of ours": ("gopher://host/law", "gopher"),
    "outside": ("/etc", "leads elsewhere"),
}
NAMES = {"no name": "", "a path's": "../law", "not ASCII": "lаw"}


def cut(path, less):
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-less])


def without(path, key):
    tiny.write_adapter(path, {name: value for name, value in good().items() if name != key}, CONFIG)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory, load = tmp_path_factory.mktemp("served"), workload("mixtral")
    (directory / "adapters").mkdir()
    flags = ["--base-model", str(load.base), "--data-dir", str(directory / "data")]
    with running_server(directory / "log", [*flags, "--adapter-root", str(directory / "adapters")]) as server:

        def add(name, uri):
            return ask(server.address, "Add", name=name, uri=str(uri), wait_seconds=HANG_SECONDS)

        tiny.write_adapter(directory / "adapters" / "first", *fitting({}, {}))
        add("first", directory / "adapters" / "first")
        yield directory, add


def fitting(config, tensors):
    return good() | tensors, CONFIG | config


def state(data):
    """Rows of the registry, and the copies that the server has."""
    database = Database(f"sqlite:///{data / FILE}")
    try:
        rows = database.read(lambda connection: sorted(map(tuple, connection.execute(versions.select()).all())))
    finally:
        database.close()
    return rows, sorted(one.name for one in (data / "adapters").iterdir())


def bad_adapters(adapters):
    """(kind, name, source, what the refusal says) of each; their directories are made."""
    for kind, (config, tensors, said) in FILES.items():
        path = adapters / kind
        tiny.write_adapter(path, *fitting(config, tensors))
        yield kind, "bad", path, said
    for kind, (damage, said) in DIRECTORIES.items():
        path = adapters / kind
        tiny.write_adapter(path, *fitting({}, {}))
        damage(path)
        yield kind, "bad", path, said
    for kind, (uri, said) in URIS.items():
        yield kind, "bad", uri, said
    for kind, name in NAMES.items():
        yield kind, name, adapters / "first", "adapter name"
    second = adapters / "second"
    tiny.write_adapter(second, *fitting({"lora_alpha": 9}, {}))
    yield "a name that is taken", "first", second, "adapters update first SOURCE"


def test_each_kind_has_a_message_of_its_own_and_the_registry_is_as_before(served):
    directory, add = served
    before, messages = state(directory / "data"), {}
    assert list(map(len, before)) == [1, 1]
    for kind, name, source, said in bad_adapters(directory / "adapters"):
        with pytest.raises(LoraServerError) as caught:
            add(name, source)
        message = str(caught.value)
        assert isinstance(caught.value, AdapterError) and said in message, (kind, message)
        messages[kind] = message.replace(str(source), "")
    until(lambda: state(directory / "data") == before, "its rows and its copies are as before")
    assert len(messages) >= 25 and len(set(messages.values())) == len(messages), json.dumps(messages, indent=1)
