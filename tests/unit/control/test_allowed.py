"""Sources that may be added by name, or are derived from one; a refusal tells nothing of the rest of the disk."""

import errno
import json
import os
import threading
from unittest.mock import Mock

import pytest

from lora_server import errors
from lora_server.config import ServeConfig, load
from lora_server.control.adapters.allowed import Allowed
from lora_server.control.adapters.files import opened
from lora_server.control.adapters.resolver import COMING, Resolver
from lora_server.errors import AdapterSourceError, ConfigError
from lora_server.timings import Timings
from tests.support.adapter_files import spec_of
from tests.support.controllers import ToldShard, make_tiny_controller
from tests.support.serving import HANG_SECONDS, until


@pytest.fixture
def places(tmp_path):
    """A root, and a place outside of it that has an adapter."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for directory in (root / "law", outside / "secret"):
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return root, outside


def said(allowed, uri):
    with pytest.raises(AdapterSourceError) as refused:
        allowed.check(str(uri))
    return str(refused.value).partition(": got ")[2]


def test_every_path_outside_gets_the_same_refusal(places):
    root, outside = places
    allowed = Allowed((str(root),))
    (root / "up").symlink_to(outside / "secret")
    (root / "nowhere").symlink_to(outside / "missing")
    (root / "law" / "link").symlink_to(outside)
    bad = [outside / "secret", outside / "missing", outside, root / "up", root / "nowhere"]
    bad += [root / "law" / ".." / ".." / "outside", root / "law" / "link" / "secret", f"{root}-and-more"]
    bad += [f"file://{outside}/secret", "/root/.ssh", "/", "~nobody/x", "relative"]
    (text,) = {said(allowed, uri) for uri in bad}
    assert "--adapter-root" in text and str(root) in text and str(outside) not in text
    for good in (root, root / "law", root / "missing", root / "law" / ".." / "law", f"file://{root}/law"):
        allowed.check(str(good))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "part-1.safetensors"])
def test_a_file_that_links_outside_is_refused(places, name):
    root, outside = places
    file = root / "law" / name
    file.unlink(missing_ok=True)
    for target in (outside / "secret" / "adapter_config.json", outside / "missing"):
        file.symlink_to(target)
        assert "a link that leads elsewhere" in said(Allowed((str(root),)), root / "law")
        file.unlink()
    file.symlink_to(root / "law" / "blob")  # as in a hub's cache
    Allowed((str(root),)).check(str(root / "law"))


def test_urls_need_an_allowed_prefix(places):
    allowed = Allowed((), ("s3://adapters/mine", "hf://org", "https://host/a"))
    for good in ("s3://adapters/mine/law", "S3://adapters/mine", "hf://org/name@main", "https://host/a/b/"):
        allowed.check(good)
    strangers = ["s3://adapters/mine-not", "s3://adapters", "s3://adapters/mine@x/law", "http://169.254.169.254/latest"]
    steps = ("../b", "%2e%2e/b", "..%2fb", "%252e%252e%252fb", "x%5c..%5c..%5cb", "%" + "25" * 20 + "2e")
    for bad in (*strangers, *(f"https://host/a/{step}" for step in steps)):
        assert "--allow-source" in said(allowed, bad)
    Allowed().check("http://anywhere/law")
    assert "none was given" in said(Allowed(), places[0])


@pytest.mark.parametrize("uri", ["", "a\0b", "file://[::1", "file://", "http://[::1", "://", "s3://", "file:///x\0y"])
def test_a_bad_uri_is_refused(uri):
    with pytest.raises(errors.LoraServerError), opened("law", uri, spec_of(), None, 1.0):
        pass


def test_a_path_that_cannot_be_resolved_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    Allowed((str(tmp_path),)).check(str(tmp_path / "loop"))
    for uri in (tmp_path / "loop", tmp_path / "loop" / "law", tmp_path / ("x" * 300)):
        test_a_bad_uri_is_refused(str(uri))


def config(**flags):
    return ServeConfig(base_model="mixtral-8x7b", **flags)


def test_roots_follow_from_the_servers_flags(places, monkeypatch):
    root, outside = places
    monkeypatch.chdir(outside)
    link = outside / "link"
    link.symlink_to(root)
    assert Allowed.of(config()).roots == (str(outside),)
    assert Allowed.of(config(adapters=link)).roots == (str(root), str(outside))
    assert Allowed.of(config(adapters=root, listen="10.0.0.1:7400")).roots == (str(root),)
    assert Allowed.of(config(listen="0.0.0.0:7400")).roots == ()
    assert Allowed.of(config(adapters=root, adapter_root=[outside / "secret"])).roots == (str(outside / "secret"),)
    monkeypatch.chdir("/")
    assert Allowed.of(config()).roots == (), "a service's directory is no place for adapters"


def test_roots_and_sources_are_lists_in_the_environment_and_in_a_file(tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps({"base_model": "mixtral-8x7b", "adapter-root": ["/c", "/d"]}))
    assert [*map(str, load({}, file).adapter_root)] == ["/c", "/d"]
    monkeypatch.setenv("LORA_SERVER_ADAPTER_ROOT", f"{tmp_path},/b")
    monkeypatch.setenv("LORA_SERVER_ALLOW_SOURCE", "s3://a")
    found = load({}, file)
    assert ([*map(str, found.adapter_root)], found.allow_source) == ([str(tmp_path), "/b"], ("s3://a",))
    for source in ("https://me:word@host/", "adapters", "file:///x"):
        with pytest.raises(ConfigError, match="--allow-source"):
            Allowed.of(config(allow_source=[source]))


def test_add_is_checked_and_the_directory_of_the_start_is_trusted(tmp_path, tiny_adapters, monkeypatch):
    adapter, root = tiny_adapters["down"], tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(adapter)
    controller = make_tiny_controller(allowed=Allowed((str(root),)))
    adapters, shard = controller.adapters, ToldShard(controller)
    with pytest.raises(AdapterSourceError, match="--adapter-root"):
        adapters.rollout.add("out", str(root / "linked"), 5.0)
    assert not adapters.catalog.records()
    (root / "law").mkdir()
    (root / "law" / "adapter_config.json").write_text("{}")
    validate = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr("lora_server.control.adapters.files.validate_adapter", validate)
    with pytest.raises(AdapterSourceError, match="cannot be read: Input/output error"):
        adapters.rollout.add("law", str(root / "law"), 5.0)
    monkeypatch.undo()
    adapters.directory.register({"linked": root / "linked"})  # who may write there is believed
    assert adapters.listings.get("linked").record.path == str(adapter.resolve())
    shard.close()


class Bringing:
    """What a resolver adds to; it adds when it is told to."""

    def __init__(self):
        self.now, self.asked, self.fails, self.go = 0.0, [], {}, threading.Event()
        self.resolver = Resolver("s3://adapters/{tenant}/{name}", lambda: self.now)

    def ask(self, name):
        self.resolver.ask(name, self.add)

    def add(self, name, uri, seconds):
        self.asked.append((name, uri))
        assert self.go.wait(HANG_SECONDS)
        if name in self.fails:
            raise self.fails[name]

    def settled(self):
        self.go.set()
        until(lambda: not self.resolver._coming, "nothing comes any more")


@pytest.fixture
def bringing():
    one = Bringing()
    yield one
    one.settled()
    one.resolver.close()


def test_callers_of_one_name_share_one_load(bringing):
    for _ in range(5):
        with pytest.raises(errors.ServerBusyError, match="being added from s3://adapters/acme/team/bot; try again"):
            bringing.ask("acme/team/bot")
    bringing.settled()
    assert bringing.asked == [("acme/team/bot", "s3://adapters/acme/team/bot")]
    assert bringing.resolver.uri("law") == "s3://adapters/default/law"


def test_a_source_that_failed_is_not_asked_again_for_a_while(bringing):
    bringing.fails = {
        "gone": AdapterSourceError("got no config there"),
        "over": errors.LimitError("tenant acme: got 3 adapters, 2 may be"),
        "later": errors.ServerUnavailableError(""),
    }
    bringing.go.set()
    for name in bringing.fails:
        with pytest.raises(errors.ServerBusyError):
            bringing.ask(name)
    bringing.settled()
    with pytest.raises(errors.UnknownAdapterError, match="be added from s3://adapters/default/gone: got no config"):
        bringing.ask("gone")
    with pytest.raises(errors.LimitError, match=r"^tenant acme: got 3 adapters, 2 may be$"):
        bringing.ask("over")
    with pytest.raises(errors.ServerBusyError):
        bringing.ask("later")
    bringing.settled()
    bringing.now += Timings.resolve_again + 1
    with pytest.raises(errors.ServerBusyError):
        bringing.ask("gone")
    bringing.settled()
    assert [name for name, _ in bringing.asked].count("gone") == 2
    with pytest.raises(errors.UnknownAdapterError, match="expected 1 to 200 letters"):
        bringing.ask("../../etc")


def test_the_number_of_concurrent_loads_is_limited(bringing):
    for number in range(COMING + 10):
        with pytest.raises(errors.ServerBusyError):
            bringing.ask(f"name-{number}")
    bringing.settled()
    assert len(bringing.asked) == COMING


BAD_TEMPLATES = ["", "s3://adapters", "/adapters/{name}", "s3://{other}/{name}", "s3://{name", "s3://{}"]


@pytest.mark.parametrize("template", [*BAD_TEMPLATES, "local:///{name}"])
def test_a_bad_template_is_refused(template):
    with pytest.raises(ConfigError, match=r"--resolve: got .*expected a URL with {name}"):
        Resolver(template)
