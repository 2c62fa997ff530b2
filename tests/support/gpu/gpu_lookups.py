"""The poller's lookups of adapters in steps of hundreds of segments: their results, and their trips to memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import random
from dataclasses import dataclass, field

import numpy as np

from kernels_cuda.residency import LANES
from lora_server.device.protocol.codes import GONE_BIT, HANDLE_BITS, UNEVEN, Refusal
from lora_server.device.protocol.layout import ENTRY, MAX_GENERATION, SERVE, SITE, parts
from lora_server.errors import ProtocolError
from lora_server.shard import request as requests
from lora_server.spec import PROJECTIONS, Site
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader
from tests.support.gpu import gpu_weights
from tests.support.gpu.gpu_world import address

NEAR_BYTES = 4096  # of a step's tables, in shared memory
SPEC = dataclasses.replace(gpu_weights.SPEC, name="lookups", experts=8)
AT = Site(1, "down")
PROJECTION = PROJECTIONS.index(AT.projection)
HANDLES, LINK, TURN, MOST = 40, 3, 77, 1024
SEGMENTS, ENTRIES = 192, 256  # that a warp looks at together
NAMES = "checked checked_in untold foreign missing looked_up_in translated translated_in"
FOUND = np.dtype([(name, "<i4") for name in NAMES.split()])


@dataclass
class Tables:
    """A shard's directory at one site, and a step that names it."""

    segments: list[list[int]]  # handle, expert, first, entries
    entries: np.ndarray  # [handles, layers, projections] of ENTRY
    held: np.ndarray  # [links, handles]
    places: np.ndarray  # [.., 2]
    num_entries: int = 0  # of the step, whatever becomes of a segment
    memory: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.site = self.entries[:, AT.layer, PROJECTION]

    @classmethod
    def sound(cls, count: int, chooser: random.Random) -> Tables:
        """Make tables in which all adapters are ready: `count` segments, of one to three entries."""
        places = np.array([(i + 1000, i + 2000) for i in range(HANDLES * SPEC.experts)], np.int32)
        entries = np.zeros((HANDLES, SPEC.layers, len(PROJECTIONS)), ENTRY)
        tables = cls([], entries, np.zeros((LINK + 2, HANDLES), np.uint32), places)
        for index in range(HANDLES):
            generation = chooser.randrange(1, 1 << 15)
            each = UNEVEN if chooser.random() < 0.3 else chooser.randrange(1, 9)
            first = index * SPEC.experts if each == UNEVEN else chooser.randrange(1000)
            tables.site[index] = (generation, generation, index, first, each, 0, SPEC.experts)
            tables.held[LINK, index] = generation
        for _ in range(count):
            index, length = chooser.randrange(HANDLES), 1 if count > MOST // 3 else chooser.randrange(1, 4)
            tables.segments.append([tables.handle(index), chooser.randrange(SPEC.experts), tables.num_entries, length])
            tables.num_entries += length
        return tables

    def handle(self, index: int) -> int:
        return index | int(self.site[index]["generation"]) << HANDLE_BITS

    def write(self, wrong_map: bool, chooser: random.Random) -> None:
        """The step's bytes, without rows."""
        entries, tokens = self.num_entries, max(1, self.num_entries // 2)
        at = slot.request_offsets(len(self.segments), entries, slot.HAS_OUT_MAP, 2 * entries * SPEC.in_width(AT))
        header = RequestHeader(
            slot.DECODE, slot.HAS_OUT_MAP, 0, 1, 1, 1, AT.layer, PROJECTION,
            slot.DTYPES.index("bfloat16"), entries, entries, len(self.segments), tokens, 0, SPEC.in_width(AT),
            ((0, SPEC.out_width(AT)),), at.end - slot.HEADER_BYTES, 0, 0,
        )  # fmt: skip
        self.memory = bytearray(at.end)
        header.pack_into(memoryview(self.memory))
        out_map = np.array([chooser.randrange(tokens) for _ in range(entries)], np.int32)
        if wrong_map:
            out_map[chooser.randrange(entries)] = chooser.choice([tokens, -1])
        self.memory[at.segments : at.in_map] = np.array(self.segments, np.uint32).tobytes()
        self.memory[at.out_map : at.out_map + 4 * entries] = out_map.tobytes()

    # -- the same, one segment after the other

    def checked(self) -> bool:
        view = memoryview(self.memory)
        with contextlib.suppress(ProtocolError):
            requests.read_request(view, RequestHeader.unpack_from(view), SPEC, MOST)
            return True
        return False

    def entry_of(self, handle: int) -> np.void | None:
        index, generation = parts(handle)
        known = index < HANDLES and generation and self.site[index]["generation"] == generation
        return self.site[index] if known else None

    def may_come(self, handle: int) -> bool:
        """Whether a shard may still be told of an adapter that it does not know."""
        index, generation = parts(handle)
        if index >= HANDLES or not 0 < generation <= MAX_GENERATION:
            return 0 < generation <= MAX_GENERATION
        if self.held[LINK, index] == generation or self.site[index]["generation"]:
            return False
        return bool(self.site[index]["ready"] < 1 << GONE_BIT | generation)

    def lacks(self) -> tuple[bool, bool, int]:
        """Return whether a segment names an adapter that may still come, one that the client does not hold, and a
        handle without weights: that of the first lane that meets one."""
        untold, foreign, missing = False, False, 0
        for i in sorted(range(len(self.segments)), key=lambda i: (i % LANES, i)):
            handle = self.segments[i][0]
            entry = self.entry_of(handle)
            if entry is not None:
                index, generation = parts(handle)
                foreign |= self.held[LINK, index] != generation
                missing = missing or handle * int(entry["ready"] != generation)
            else:
                untold |= self.may_come(handle)
        return untold, foreign, missing

    def translated(self) -> list[tuple[int, int, int, int]] | Refusal:
        found, misplaced = [], False
        for handle, expert, first, length in self.segments:
            entry = self.entry_of(handle)
            if entry is None or entry["ready"] != entry["generation"]:
                return Refusal.UNKNOWN_ADAPTER
            if not entry["first_expert"] <= expert < entry["end_expert"]:
                misplaced = True
                continue
            number = expert - int(entry["first_expert"])
            place = int(entry["row"]), int(entry["first_tile"]) + number * int(entry["tiles_each"])
            if entry["tiles_each"] == UNEVEN:
                place = tuple(map(int, self.places[int(entry["first_tile"]) + number]))
            found.append((*place, first, length))
        return Refusal.MISPLACED if misplaced else found


def aligned(array: np.ndarray, to: int = 32) -> np.ndarray:
    """A copy of its bytes."""
    room = np.zeros(array.nbytes + to, np.uint8)
    copy: np.ndarray = room[-address(room) % to :][: array.nbytes]
    copy[:] = array.view(np.uint8)
    return copy


def ask(tables: Tables, library: ctypes.CDLL) -> tuple[np.void, np.ndarray]:
    """Run the kernels' lookups; return their findings and each handle's newest turn. Changes the step's memory."""
    sites = np.zeros((SPEC.layers, len(PROJECTIONS)), SITE)
    sites[AT.layer, PROJECTION] = (SPEC.in_width(AT), SPEC.out_width(AT), SPEC.experts, 0)
    used, found = np.zeros(HANDLES, np.uint64), np.zeros(1, FOUND)
    serve = np.zeros(1, SERVE)
    memory, directory = (
        aligned(np.frombuffer(tables.memory + bytes(NEAR_BYTES), np.uint8)),
        aligned(tables.entries.reshape(-1)),
    )
    arrays = {"directory": directory, "sites": sites, "held": tables.held, "used": used, "places": tables.places}
    for name, array in arrays.items():
        serve[name] = address(array)
    serve["num_handles"], serve["num_layers"], serve["num_projections"] = HANDLES, SPEC.layers, len(PROJECTIONS)
    serve["max_entries"], serve["dtype"] = MOST, slot.DTYPES.index("bfloat16")
    values = (ctypes.c_int64 * 5)(address(serve), address(memory), LINK, TURN, address(found))
    assert library.run(ctypes.cast(library["lookups"], ctypes.c_void_p), 1, 0, NEAR_BYTES, values, len(values)) == 0
    tables.memory[:] = memory[: len(tables.memory)].tobytes()
    return found[0], used


def compare(tables: Tables, library: ctypes.CDLL) -> np.void:
    """Raises AssertionError where the kernel finds something else than the loop over segments."""
    sound, lacking, expected = tables.checked(), tables.lacks(), tables.translated()
    found, used = ask(tables, library)
    assert (found["checked"] == Refusal.NOTHING_WRONG) == sound, Refusal(found["checked"])
    assert (bool(found["untold"]), bool(found["foreign"]), int(found["missing"])) == lacking
    if not sound:
        return found
    refused = isinstance(expected, Refusal)
    assert found["translated"] == (expected if refused else Refusal.NOTHING_WRONG)
    if refused:
        return found
    table = np.frombuffer(tables.memory, np.int32, 4 * len(expected), slot.HEADER_BYTES).reshape(-1, 4)
    assert table.tolist() == [list(one) for one in expected]
    named = {parts(segment[0])[0] for segment in tables.segments}
    assert {int(index) for index in np.flatnonzero(used == TURN)} == named
    return found


def spoil(tables: Tables, chooser: random.Random) -> bool:
    """Something about one segment, or its adapter, is not as it should be; whether a map's value is to be wrong."""
    segment = chooser.choice(tables.segments)
    index = parts(segment[0])[0] % HANDLES
    what = chooser.randrange(8)
    if what == 0:
        tables.site[index]["ready"] = chooser.choice([0, 1 << 32 | int(tables.site[index]["ready"])])
    elif what == 1:
        tables.held[LINK, index] = 0
    elif what == 2:
        segment[0] = index | (parts(segment[0])[1] % ((1 << 15) - 1) + 1) << HANDLE_BITS
    elif what == 3:
        segment[0] = chooser.choice([HANDLES + 1, 0xFFFF, index]) | chooser.choice([0, 1]) << HANDLE_BITS
    elif what == 4:
        tables.site[index]["first_expert"], tables.site[index]["end_expert"] = segment[1] + 1, SPEC.experts
    elif what == 5:
        segment[chooser.randrange(1, 4)] += chooser.choice([1, 8, 1 << 30])
    elif what == 6:
        gone = 1 << GONE_BIT | int(tables.site[index]["generation"])
        tables.site[index]["generation"], tables.site[index]["ready"] = 0, chooser.choice([0, gone])
        tables.held[LINK, index] *= chooser.randrange(2)
    return what == 7


def many_segments_are_looked_up_together(library: ctypes.CDLL) -> None:
    """Lookups find the same as one by one, but take trips to memory per hundreds of segments, not per segment."""
    for seed in range(60):
        chooser = random.Random(seed)
        count = chooser.choice([1, 2, 16, 31, 32, 33, 191, 192, 193, 256, 340, 512, 700])
        tables = Tables.sound(count, chooser)
        times = chooser.choice([1, 1, 2]) if chooser.random() < 0.7 else 0
        wrong_maps = [spoil(tables, chooser) for _ in range(times)]
        tables.write(any(wrong_maps), chooser)
        try:
            found = compare(tables, library)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {count} segments: {error}") from error
        if found["checked"] or found["translated"]:
            continue
        rounds, maps = -(-count // SEGMENTS), -(-tables.num_entries // ENTRIES)
        near = len(tables.memory) <= NEAR_BYTES
        assert found["checked_in"] <= (0 if near else rounds + maps), "segments; the map"
        assert found["looked_up_in"] <= rounds * (1 if near else 2), "segments; their entries and their holders"
        most = 1 + rounds * (2 if near else 3)
        assert found["translated_in"] <= most, "a fence; segments; entries, and perhaps the list of places"
