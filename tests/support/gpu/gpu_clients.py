"""Clients of a shard's kernel: one that has kernels of its own, and one that writes what it likes."""

from __future__ import annotations

import copy
import functools
import struct
from collections.abc import Sequence

import numpy as np
import torch

from lora_server.device.protocol import layout
from lora_server.device.protocol.codes import CommandKind, KernelRole, LinkStatus, NoteKind
from lora_server.errors import rebuild
from lora_server.wire import slot
from lora_server.wire.slot import ResponseHeader
from tests.support.gpu import gpu_weights as weights
from tests.support.gpu.gpu_shard import DEVICE, Shard, Waiting
from tests.support.gpu.gpu_weights import DEPTH, LAYOUT, MAX_ROWS, Body, reference
from tests.support.gpu.gpu_world import VARIANT, World, address

BUDGET_NS = 40_000_000  # of virtual time: no step takes that long
THREADS = VARIANT.warps * 32
WIDEST = 32
GRIDS = 3, 5  # blocks of a put, and of an add: those of each other client
FRESH = ("pushed", "status_seq", "arrived", "status")


class Client:
    """The common part of both kinds. `log`: (client, epoch, seq) -> the pushed bytes, for the oracle."""

    def __init__(self, world: World, shard: Shard, index: int, log: dict[tuple[int, int, int], bytes]) -> None:
        self.world, self.shard, self.index, self.log = world, shard, index, log
        self.random, self.places, self.id = shard.random, shard.places[index], index + 7
        self.epoch, self.seq, self.answered = self.random.choice([0, 0xFFFE, 0x1FFFE]), 0, 0
        self.link = shard.links_of[index]
        self.bodies = weights.BODIES_IN_CODES if world.library.in_codes else weights.BODIES
        self.reference = reference(world.library.in_codes)
        self.tenant, self.weight, self.step_us = 0, 1.0, 0
        self.since = 0  # notes that were there when it joined
        self.is_here = world.library.has_heaps and index == 1  # mapped, as without NVSHMEM, beside those that are PEs

    def seen_by(self, pe: int, array: np.ndarray) -> int:
        return address(array) if self.is_here else self.world.seen_by(pe, array)

    def words(self, pe: int) -> dict[str, int]:
        """Return the words that both ends know of a link, with addresses as `pe` sees them, in the order of CONNECT."""
        p, seen = self.places, functools.partial(self.seen_by, pe)
        words = {"epoch": self.epoch, "client": self.id, "depth": DEPTH}
        words |= {"request_slots": seen(p.requests), "request_signal": seen(p.request_signal)}
        words |= {"request_bytes": LAYOUT.request_bytes, "response_slots": seen(p.responses)}
        return words | {"response_signal": seen(p.response_signal), "response_bytes": LAYOUT.response_bytes}

    def join(self) -> Waiting:
        self.epoch, self.seq = self.epoch + 1, 0
        pe = layout.HERE if self.is_here else self.index + 1
        share = layout.share_words(self.tenant, self.weight, self.step_us)
        words = [*self.words(DEVICE).values(), address(self.places.tables), pe, *share.values()]
        yield from self.shard.post(CommandKind.CONNECT, self.link, *words)
        self.since = len(self.shard.notes)

    def cut_off(self) -> Waiting:
        """Revoke this client as the controller does; check that the shard then never writes to the client's memory."""
        turn = yield from self.shard.post(CommandKind.REVOKE, self.link, self.epoch)
        yield from self.shard.settled(turn)
        while self.world.in_flight():  # its slots may not be reused until then
            yield
        self.world.write(self.places.responses.reshape(-1), 0x5A)
        before = int(self.places.response_signal[0])
        handles = (self.shard.known[0],) * 2
        late = self.memory(self.bodies[0], handles, self.seq + 1, 2**40)  # in no log
        self.world.write(self.places.requests[(self.seq + 1) % DEPTH][: len(late)], np.frombuffer(late, np.uint8))
        self.world.write(self.places.request_signal, slot.signal(self.epoch, self.seq + 1))
        for _ in range(9):
            yield
        assert (self.places.responses == 0x5A).all(), "the shard wrote to memory that it had given up"
        assert int(self.places.response_signal[0]) == before

    def handles(self) -> tuple[int, int]:
        """Two, of which one may be loading, one that has gone, or one that never was."""
        known = [handle for handle in self.shard.known if handle and handle != self.shard.never]
        odd = [layout.handle_of(1, 999), *(set(self.shard.variant) - {self.shard.never})]
        pool = known if known and self.random.random() < 0.9 else odd
        return tuple(self.random.choice(pool) for _ in range(2))

    def expected(self, body: Body, handles: tuple[int, ...]) -> bytes:
        used = {which for which, *_ in body.entries}
        variants = tuple(self.shard.variant[h] if i in used else 0 for i, h in enumerate(handles))
        return self.reference.answer(body, variants)

    def response(self, seq: int) -> tuple[ResponseHeader, bytes]:
        memory = memoryview(self.places.responses[seq % DEPTH])
        header = ResponseHeader.unpack_from(memory)
        return header, bytes(memory[slot.HEADER_BYTES : slot.HEADER_BYTES + header.payload_bytes])

    def look(self, seq: int, body: Body | None, handles: tuple[int, ...], ready: set[int]) -> None:
        """An answer is there: it must be the right one. ready: those that were when the step was pushed."""
        header, payload = self.response(seq)
        assert (header.client, header.epoch, header.seq) == (self.id, self.epoch & 0xFFFFFFFF, seq)
        self.answered += 1
        if header.status == slot.OK:
            assert body is not None, "a step that is not sound was served"
            assert body.answered(payload) == self.expected(body, handles), f"seq {seq}: other bits than the loop's"
            used = {handles[which] for which, *_ in body.entries}
            assert not any(map(self.is_foreign, used)), "an adapter that its client does not hold was served"
            assert header.num_rows == body.num_out_rows
            return
        code = payload.decode().partition("\n")[0]
        handles = tuple(handles[which] for which in {which for which, *_ in body.entries}) if body else ()
        if code == "protocol":
            assert body is None, f"a sound step was refused: {payload!r}"
        elif code == "unknown_adapter":
            assert body is None or any(handle not in self.shard.known for handle in handles), payload
        elif code == "adapter_not_loaded":
            (named,) = rebuild(code, payload.decode().partition("\n")[2]).handles
            assert body is None or (named in handles and any(handle not in ready for handle in handles))
        elif code == "step_timeout":
            assert body is None or self.shard.serve["role"] == KernelRole.FOLLOWS
        elif code == "permission_denied":
            assert body is None or any(map(self.is_foreign, handles)), payload
        else:
            assert code == "shard_unavailable" and self.shard.draining, payload

    def memory(self, body: Body, handles: tuple[int, ...], seq: int, budget_us: int) -> bytearray:
        return body.request(handles, self.id, self.epoch & 0xFFFFFFFF, seq, budget_us)

    def record(self, seq: int, memory: bytearray) -> None:
        self.log[self.id, self.epoch, seq] = bytes(memory)

    def is_answered(self, seq: int = 0) -> bool:
        if slot.signalled_seq(int(self.places.response_signal[0]), self.epoch) < (seq or self.seq):
            return False
        self.world.confirm(self.index + 1)
        return True

    def answered_to(self, seq: int = 0) -> Waiting:
        while not self.is_answered(seq):
            yield

    def is_foreign(self, handle: int) -> bool:
        """Whether this client never held it."""
        return self.shard.foreign == (self.link, handle & 0xFFFF)


class GpuClient(Client):
    """A client of kernels: put, wait and add with fixed arguments, one set per body, captured before any step."""

    def __init__(self, world: World, shard: Shard, index: int, log: dict[tuple[int, int, int], bytes]) -> None:
        super().__init__(world, shard, index, log)
        new = world.private.new
        self.state, self.abort = new(layout.CLIENT)[0], new("<u8", 1)
        self.device, self.grid = index + 1, GRIDS[index % 2]
        self.put = "link_put_e4m3_bfloat16" if shard.wire else "link_put_vectors"
        self._capture()

    def another(self) -> GpuClient:
        """Return the same client's launches of another site: its steps may be in flight beside this one's."""
        other = copy.copy(self)
        other._capture()
        return other

    def _capture(self) -> None:
        new = self.world.private.new
        self.sent, self.template = new("<u8", 1), new("u1", slot.HEADER_BYTES)
        self.counts, self.segments = new("<i4", 4), new("<u4", MAX_ROWS, 4)
        self.rows, self.map, self.weights = new("<i4", MAX_ROWS), new("<i4", MAX_ROWS), new("<f4", MAX_ROWS)
        self.to = new("<i4", MAX_ROWS)
        self.x, self.y = new("<u2", MAX_ROWS, WIDEST), new("<u2", MAX_ROWS, WIDEST)

    def launch(self, kernel: str, *values: int, grid: int = 1, after: int = 0) -> int:
        threads = 32 if kernel == "link_wait" else THREADS
        where = {"grid": grid, "threads": threads, "device": self.device, "after": after}
        return self.world.launch(kernel, address(self.state), *values, **where)

    def own_slot(self, seq: int) -> np.ndarray:
        """A PE's own copy of a request's slot, which it puts."""
        heaps, at = self.world.heaps, self.places.requests[seq % DEPTH]
        return heaps[self.device, (address(at) - address(heaps)) % heaps.shape[1] :][: at.nbytes]

    def ended(self, grid: int) -> Waiting:
        while self.world.running(grid):
            yield

    def join(self) -> Waiting:
        """Captured graphs survive it: only the state block is another's."""
        yield from super().join()
        for name, value in (self.words(self.device) | dict.fromkeys(FRESH, 0)).items():
            self.state[name] = value
        self.abort[0], self.state["abort"] = 0, address(self.abort)
        self.state["budget_ns"], self.state["pe"] = BUDGET_NS, layout.HERE if self.is_here else DEVICE

    def fill(self, body: Body, handles: tuple[int, ...]) -> torch.Tensor:
        """Write what routing and the engine's layers leave on the device; return y before the step."""
        n = len(body.entries)
        self.counts[:] = [len(body.segments), n, body.tokens, body.tokens]
        self.segments[: len(body.segments)] = [(handles[which], *rest) for which, *rest in body.segments]
        order = np.random.default_rng(self.random.randrange(2**32)).permutation(MAX_ROWS)[: body.num_rows]
        self.x[order, : body.width] = body.rows.view(torch.uint16).numpy()
        self.rows[: body.num_rows] = order
        self.map[:n], self.weights[:n] = body.map, body.weights
        self.to[: body.num_out_rows] = np.random.default_rng(1).permutation(MAX_ROWS)[: body.num_out_rows]
        y = torch.randn(MAX_ROWS, WIDEST).to(weights.DTYPE)
        self.y[:] = y.view(torch.uint16).numpy()
        body.header(0, 0, 0, 0).pack_into(memoryview(self.template))
        return y

    def step(self, body: Body, handles: tuple[int, ...]) -> Waiting:
        y, ready = self.fill(body, handles), set(self.shard.ready)
        self.seq += 1
        self.record(self.seq, self.memory(body, handles, self.seq, BUDGET_NS // 1000))
        yield from self.launched(body)
        self.check(body, handles, ready, y)

    def put_values(self, by_entry: bool = False, x_bytes: int = 64) -> list[int]:
        values = [
            address(a) for a in (self.sent, self.template, self.x, self.counts, self.segments, self.rows, self.map)
        ]
        return [*values, address(self.weights) if by_entry else 0, x_bytes, WIDEST * 2]

    def launch_put(self, body: Body) -> int:
        return self.launch(self.put, *self.put_values(body.by_entry, body.width * 2), grid=self.grid)

    def waited(self) -> Waiting:
        yield from self.ended(self.launch("link_wait", address(self.sent)))

    def launched(self, body: Body) -> Waiting:
        yield from self.ended(self.launch_put(body))
        yield from self.added(body)

    def added(self, body: Body) -> Waiting:
        if self.random.random() < 0.3:
            yield from self.waited()
        yield from self.ended(self.launch_add(body))

    def launch_add(self, body: Body, after: int = 0) -> int:
        width, (begin, end) = sum(b - a for a, b in body.windows), body.windows[0]
        values = [*map(address, (self.sent, self.counts, self.to)), int(body.by_entry), address(self.y)]
        values += [WIDEST * 2, width, begin]
        kernel = f"link_add_{self.shard.wire}bfloat16"
        return self.launch(kernel, *values, end - begin, 0, grid=self.grid, after=after)

    def check(self, body: Body, handles: tuple[int, ...], ready: set[int], y: torch.Tensor) -> None:
        status = int(self.state["status"])
        assert status in (LinkStatus.OK, LinkStatus.FAILED), LinkStatus(status)
        assert int(self.state["pushed"]) == int(self.sent[0]) == self.seq
        self.look(self.seq, body, handles, ready)
        self.compare(y, body, handles, status == LinkStatus.OK)
        self.state["status"] = 0

    def compare(self, y: torch.Tensor, body: Body, handles: tuple[int, ...], is_added: bool) -> None:
        """Assert that the pass added the answer to y, or nothing."""
        got = torch.from_numpy(self.y.copy()).view(weights.DTYPE)
        if is_added:
            (begin, end), rows = body.windows[0], torch.from_numpy(self.to[: body.num_out_rows].astype(np.int64))
            y = y.float()
            y[rows, begin:end] += body.deltas(self.expected(body, handles)).float()
            y = y.to(weights.DTYPE)
        assert torch.equal(got.nan_to_num(7), y.nan_to_num(7))

    def nothing(self) -> Waiting:
        """A step without rows sends nothing, and waits for nothing."""
        self.counts[:] = 0
        before = int(self.places.request_signal[0])
        yield from self.ended(self.launch(self.put.replace("vectors", "halves"), *self.put_values(), grid=self.grid))
        yield from self.waited()
        assert self.sent[0] == 0
        assert int(self.places.request_signal[0]) == before and int(self.state["status"]) == 0

    def run(self, steps: int) -> Waiting:
        yield from self.join()
        while steps > 0:
            chance, steps = self.random.random(), steps - 1
            if chance < 0.08:
                yield from self.nothing()
            elif chance < 0.2:
                yield from self.die()
                yield from self.join()
            else:
                yield from self.step(self.random.choice(self.bodies), self.handles())

    def die(self) -> Waiting:
        """Kill the client in the middle of a put, or of a wait; then end its lease."""
        body, handles = self.random.choice(self.bodies), self.handles()
        self.fill(body, handles)
        self.record(self.seq + 1, self.memory(body, handles, self.seq + 1, BUDGET_NS // 1000))
        grid = self.launch_put(body)
        for _ in range(self.random.randrange(4)):
            yield
        self.world.kill(grid)
        for _ in range(self.random.randrange(3)):
            yield
        yield from self.cut_off()


class WildClient(Client):
    """Writes requests by hand, several ahead, some of them wrong, and changes them once they are pushed."""

    def wrong(self, memory: bytearray) -> None:
        flags = memory[7]
        dtype, rows, entries, segments = struct.unpack_from("<4I", memory, 40)
        at = slot.request_offsets(segments, entries, flags, 0, scales := slot.num_scales(rows, dtype))
        tables = [0, 4, 6, 8, 12, 16, *range(28, 88, 4), 96, 128, 132, 136, 140, at.end - 4, at.end - 8]
        offset = self.random.choice(tables + [at.scales, at.scales + 4 * scales - 4] * bool(scales))
        value = self.random.choice([0, 1, 5, 9, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
        struct.pack_into("<I", memory, offset - offset % 4, value)

    def push(self, body: Body, handles: tuple[int, ...], wrong: bool = False, budget_us: int = 2**60) -> bool:
        self.seq += 1
        memory = self.memory(body, handles, self.seq, budget_us)
        if wrong:
            self.wrong(memory)
        self.write(memory)
        return self.is_sound(self.seq) and memory == self.memory(body, handles, self.seq, budget_us)

    def write(self, memory: bytearray) -> None:
        self.record(self.seq, memory)
        self.world.write(self.places.requests[self.seq % DEPTH][: len(memory)], np.frombuffer(memory, np.uint8))
        self.world.write(self.places.request_signal, slot.signal(self.epoch, self.seq))

    def is_sound(self, seq: int) -> bool:
        memory = self.log[self.id, self.epoch, seq]
        return self.reference.check(memory, self.id, self.epoch & 0xFFFFFFFF, seq)[1] is not None

    def steps(self, bodies: Sequence[Body], handles: tuple[int, ...], budget_us: int = 2**60) -> Waiting:
        first = self.seq + 1
        for body in bodies:
            self.push(body, handles, budget_us=budget_us)
        for seq, body in enumerate(bodies, first):
            yield from self.answered_to(seq)
            self.look(seq, body, handles, self.shard.ready)

    def scribble(self, bodies: dict[int, Body]) -> None:
        """Over all but the rows of steps that the kernel has copied: what it checked is what it must use."""
        if not self.shard.steady:  # a kernel that is launched anew copies them again
            return
        for kind, link, seq, _ in self.shard.notes[self.since :]:
            if kind == NoteKind.READY and link == self.link and seq in bodies:
                end = bodies[seq].parts.rows
                self.world.write(self.places.requests[seq % DEPTH][:end].view("<u4"), 0x7FFFFFF0)

    def one(self, memory: bytearray) -> Waiting:
        self.write(memory)
        yield from self.answered_to()

    def code(self, seq: int) -> str:
        """Return the code of the error that answered a step; "" for rows."""
        header, payload = self.response(seq)
        return payload.decode().partition("\n")[0] if header.status else ""

    def exceed(self) -> Waiting:
        """A signal beyond its slots: cut off, and nothing is read."""
        self.world.write(self.places.request_signal, slot.signal(self.epoch, self.seq + DEPTH + 1))
        note = (NoteKind.CUT_OFF, self.link, self.seq + DEPTH + 1, 0)
        while note not in self.shard.notes:
            assert not any(n[:2] == (NoteKind.TAKEN, self.link) for n in self.shard.notes[-4:] if n[2] > self.seq)
            yield

    def run(self, steps: int) -> Waiting:
        yield from self.join()
        while steps > 0:
            steps -= 1
            pushed = []
            for _ in range(self.random.randint(1, DEPTH)):
                body, handles, wrong = self.random.choice(self.bodies), self.handles(), self.random.random() < 0.3
                budget_us = self.random.choice([1, 60, 2**60])
                if self.shard.never and self.random.random() < 0.2:
                    handles, budget_us = (self.shard.never, self.shard.never), 20
                if any(map(self.is_foreign, handles)):
                    budget_us = min(budget_us, 60)  # it is refused at the end of it
                sound = self.push(body, handles, wrong, budget_us)
                pushed.append((self.seq, body, sound, wrong, handles, set(self.shard.ready)))
            for seq, body, sound, wrong, handles, ready in pushed:
                while not self.is_answered(seq):
                    self.scribble({seq: body for seq, body, _, wrong, *_ in pushed if not wrong})
                    yield
                if sound or not wrong:
                    self.look(seq, body, handles, ready)
                elif not self.is_sound(seq):
                    self.look(seq, None, handles, ready)
                else:
                    self.answered += 1  # another step than was meant, and a sound one: the replay judges it
            if self.random.random() < 0.2:
                yield from self.exceed() if self.random.random() < 0.4 else self.cut_off()
                yield from self.join()
