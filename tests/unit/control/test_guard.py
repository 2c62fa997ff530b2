"""A port that a node holds for the process that serves there."""

import concurrent.futures
import contextlib
import os
import socket

import pytest

from lora_server.address import Address
from lora_server.daemon import guard
from lora_server.daemon.guard import hold_port
from lora_server.demo.launch import CLAIMS, PORTS, free_address
from lora_server.errors import ConfigError

REUSE = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)
NOBODY = 65534


def as_another_user(act, *arguments):
    """The OSError that it raises, or ''. Skips the test where this user cannot be another."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "it ended"
        try:
            os.setuid(NOBODY)
            act(*arguments)
            said = ""
        except OSError as error:
            said = str(error)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        said = told.read()
    os.waitpid(child, 0)
    return said


def listen(host, port, options=REUSE):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((host, port))
        sock.listen()


def free_port():
    return int(free_address().rpartition(":")[2])


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize(("host", "others"), [("127.0.0.1", ()), ("0.0.0.0", ("::", "::1"))])
def test_a_held_port_is_this_users_alone(host, others, chosen):
    with contextlib.ExitStack() as stack:
        port = hold_port("--listen", Address(host, 0 if chosen else free_port()), stack).port
        for taken in ("127.0.0.1", "0.0.0.0", *others):
            for options in ((), REUSE[:1], REUSE):
                assert "in use" in as_another_user(listen, taken, port, options)
            with pytest.raises(OSError, match="in use"):
                listen(taken, port, REUSE[:1])  # a process of this user that is not meant to share it
        with pytest.raises(ConfigError, match=r"--listen .* in use"), contextlib.ExitStack() as another:
            hold_port("--listen", Address(host, port), another)
        listen(host, port)  # what serves there
        with socket.socket() as sock, pytest.raises(ConnectionRefusedError):
            sock.connect(("127.0.0.1", port))
    listen(host, port, REUSE[:1])


def test_a_chosen_port_is_free_at_every_address_of_the_host(monkeypatch, stack):
    """The kernel chooses one that is free at the first address; here another process has it at the second."""
    places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    hold, taken = guard._hold, []

    def held_and_taken(family, host, port):
        held = hold(family, host, port)
        if not port and len(taken) < 3:
            number = held.getsockname()[1]
            taken.append(number)
            stack.enter_context(socket.create_server(("127.0.0.2", number)))
        return held

    monkeypatch.setattr(guard, "_hold", held_and_taken)
    port = hold_port("--listen", Address("two.example", 0), stack).port
    assert len(taken) == 3 and port not in taken
    for host in ("127.0.0.1", "127.0.0.2"):
        with pytest.raises(OSError, match="in use"):
            listen(host, port, REUSE[:1])
    with socket.create_server(("127.0.0.1", taken[0])):
        pass  # it was given up
    with pytest.raises(ConfigError, match="in use"):
        hold_port("--listen", Address("two.example", taken[0]), stack)


def test_a_port_is_held_again_after_connections_to_it():
    address = Address("127.0.0.1", free_port())
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            hold_port("--listen", address, stack)
            server = stack.enter_context(socket.create_server(address, reuse_port=True))
            client = stack.enter_context(socket.create_connection(address))
            server.accept()[0].close()  # this side first: it lingers
            assert client.recv(1) == b""


@pytest.mark.parametrize("options", [(), REUSE[:1], REUSE])
def test_a_port_that_is_taken_is_not_held(options):
    with socket.socket() as sock:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(ConfigError, match="cannot listen there"), contextlib.ExitStack() as stack:
            hold_port("--http", Address(*sock.getsockname()), stack)


def test_free_ports_are_given_once_to_all_processes():
    with concurrent.futures.ProcessPoolExecutor(4) as processes:
        ports = [address.rpartition(":")[2] for address in processes.map(free_address, ["127.0.0.1"] * CLAIMS)]
        assert len(set(ports)) == CLAIMS and {int(port) for port in ports} <= set(PORTS)
    with socket.socket(socket.AF_UNIX) as claim:
        claim.bind(f"\0lora-server-port-{ports[0]}")  # given back at the end of its process
