"""A process in reserve: who takes it, who ends it."""

from __future__ import annotations

import os
import signal
import threading

import psutil
import pytest

from lora_server.config import ProcessConfig
from lora_server.daemon import processes
from lora_server.daemon.processes import Child
from lora_server.daemon.spare import Spare
from tests.serving import all_gone, until


@pytest.fixture
def spare(monkeypatch):
    monkeypatch.setattr(processes, "SPARE_SECONDS", 0.0)
    made = Spare("tests.spared", 1)
    yield made
    made.close()


@pytest.fixture
def child(spare):
    config = ProcessConfig.model_construct(threads=1)
    made = Child("a child", spare, config, pytest.fail, threading.Event())
    made.start()
    yield made
    processes.stop([made])


def test_who_is_killed_comes_back_as_its_spare(child, spare):
    first = int(child.wait_up(60).listen)
    until(lambda: spare._process is not None, "a spare")
    successor = spare._process.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: child._process.pid == successor, "the spare is the child")
    until(lambda: spare._process is not None, "another spare")
    assert spare._process.pid != successor


def test_a_spare_that_died_is_not_taken(child, spare):
    first = int(child.wait_up(60).listen)
    until(lambda: spare._process is not None, "a spare")
    dead = spare._process
    dead.kill()
    dead.wait(30)
    os.kill(first, signal.SIGKILL)
    until(lambda: child._process.pid not in (first, dead.pid), "a new one")
    until(lambda: child._process.poll() is None and psutil.pid_exists(child._process.pid), "it runs")


def test_the_spare_goes_with_its_node(spare):
    spare.prepare()
    last = psutil.Process(spare._process.pid)
    spare.close()
    all_gone([last])
    spare.prepare()
    assert spare._process is None
