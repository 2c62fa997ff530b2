"""Malformed inputs: each gets a typed error or is served, and no other client notices."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from lora_server.adapters import validate_adapter
from lora_server.errors import LoraServerError
from lora_server.wire import messages, slot
from tests.chaos.report import Line
from tests.support.hostile_http import HOSTILE, attack
from tests.support.rig import Client, healthy, loaded_rig
from tests.support.workload import Workload

MESSAGES = (messages.Hello, messages.Welcome, messages.Challenge, messages.Answer, messages.Mapped, messages.Order)


def outcome(run: Callable[[], object]) -> str:
    """Run a call and name its outcome: `right`, the code of a typed error, or an untyped error."""
    try:
        run()
    except LoraServerError as error:
        return error.code
    except Exception as error:
        return f"untyped {error!r}"
    return "right"


def slots(adapter: Path, count: int, dice: random.Random) -> Line:
    """Flip bits and words of a good step, beside a client that must get the same answers as before."""
    line = Line("slots", count)
    with loaded_rig(adapter) as rig:
        other = Client(rig.shard, 2)
        expected = healthy(other)
        bits = (slot.request_offsets(2, 4, 3, 0).rows + 8) * 8
        for _ in range(count):
            fuzzer = Client(rig.shard, 1)
            memory = fuzzer.request()
            for bit in dice.sample(range(bits), dice.randrange(1, 5)):
                memory[bit // 8] ^= 1 << bit % 8
            if dice.random() < 0.5:
                struct.pack_into("<I", memory, 4 * dice.randrange(61), dice.choice([0, 1, 2**31, 2**32 - 1]))
            said = outcome(lambda: fuzzer.send(memory, seconds=2.0))  # noqa: B023
            line.answers["typed" if not said.startswith("untyped") else said] += 1
            line.answers["right" if healthy(other) == expected else "wrong"] += 1
            fuzzer.link.close()
        other.link.close()
    return line


def control_messages(count: int, dice: random.Random) -> Line:
    """Decode bad messages as every type: noise, flipped bits, and messages of another type or cut short."""
    line, nonce = Line("control messages", count), bytes(32)
    sound = messages.Hello(1, 2, b"k"), messages.Welcome(1, 2, 3), messages.Challenge(nonce)
    good = [messages.encode(one) for one in sound]
    for _ in range(count):
        data = bytearray(dice.choice(good) if dice.random() < 0.7 else dice.randbytes(dice.randrange(300)))
        for _ in range(dice.randrange(4)):
            if data:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        cut = bytes(data[: dice.randrange(len(data) + 1)]) if dice.random() < 0.3 else bytes(data)
        line.answers[outcome(lambda: messages.decode(cut, dice.choice(MESSAGES)))] += 1  # noqa: B023
    return line


def http(port: int, count: int, dice: random.Random, lives: Callable[[], bool]) -> Line:
    """Send the requests of tests/support/hostile_http.py; the port must go on answering good ones."""
    line = Line("HTTP requests", count)
    for turn in range(count):
        payload = HOSTILE[dice.choice(sorted(HOSTILE))](dice)
        try:
            attack(port, payload, dice.choice(["read", "close", "reset"]))
        except TimeoutError:
            line.late += 1
        if turn % 100 == 99:
            line.answers["right" if lives() else "wrong"] += 1
    return line


def adapter_files(load: Workload, scratch: Path, count: int, dice: random.Random) -> Line:
    """Bytes of a good adapter's files, changed, cut or doubled."""
    line, spec = Line("adapter files", count), load.spec
    sources = sorted(load.paths.items())
    for _ in range(count):
        work = scratch / "adapter"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(dice.choice(sources)[1], work)
        victim = dice.choice(sorted(work.iterdir()))
        data = bytearray(victim.read_bytes())
        head = min(len(data), 2000)  # the header; weights that differ are no error
        for _ in range(dice.randrange(1, 6)):
            at = dice.randrange(head)
            data[at : at + dice.randrange(3)] = dice.randbytes(dice.randrange(3))
        if dice.random() < 0.2:
            del data[dice.randrange(len(data)) :]
        victim.write_bytes(data)
        line.answers[outcome(lambda: validate_adapter(work, spec)[0].close())] += 1  # noqa: B023
    return line
