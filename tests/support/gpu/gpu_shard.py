"""The host of a shard with a kernel that serves, as far as that kernel needs one: memory, mailbox, adapters.

A method that takes time is a generator that yields while the world has to go on.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from types import SimpleNamespace

import numpy as np

from kernels_cuda.residency import LANES
from kernels_cuda.sizes import CHUNK, CHUNKS, PAGE_TILES, TILE_BYTES
from kernels_cuda.tables import BLOCK
from lora_server.device.protocol import codes, layout
from lora_server.device.protocol.codes import CommandKind, NoteKind, Refusal
from lora_server.spec import PROJECTIONS, Site
from lora_server.wire import slot
from tests.support.gpu import gpu_weights as weights
from tests.support.gpu.gpu_weights import LAYOUT, MAX_RANK, MAX_ROWS, SITES, SPEC, TABLE_BYTES, site_index
from tests.support.gpu.gpu_world import VARIANT, Memory, World, address

HANDLES, LINKS = 3, 6
GRID, THREADS = 3, VARIANT.warps * 32 + 32
DEVICE = 0
GONE = 1 << codes.GONE_BIT
Waiting = Generator[None, None, None]


def new_pages() -> Memory:
    """One for each handle's index."""
    return Memory((HANDLES + 1) * PAGE_TILES * TILE_BYTES + 4096)


def places(world: World, client: int, in_heap: bool) -> SimpleNamespace:
    """Memory of one link, at both ends."""

    def new(pe: int, *shape: int) -> np.ndarray:
        nbytes = math.prod(shape)
        return (world.symmetric(pe, nbytes) if in_heap else world.shared.new("u1", nbytes)).reshape(shape)

    return SimpleNamespace(
        request_signal=new(DEVICE, 8).view("<u8"), requests=new(DEVICE, LAYOUT.depth, LAYOUT.request_bytes),
        response_signal=new(client, 8).view("<u8"), responses=new(client, LAYOUT.depth, LAYOUT.response_bytes),
        tables=world.private.new("u1", TABLE_BYTES),
    )  # fmt: skip


class Shard:
    pages = new_pages()

    def __init__(self, world: World, random, idle_ns: int, links=range(LINKS), device=DEVICE, pages=pages) -> None:
        """links: those of the clients, the first one's first. Of more than LINKS none are PEs."""
        self.world, self.random, self.links_of, self.device, self.pages = world, random, links, device, pages
        self.num_links = -(-(max(links) + 1) // LANES) * LANES
        self.pages.clear()
        self.places = [places(world, 1 + i, i < LINKS and device == DEVICE) for i in range(len(links))]
        self.mailbox = world.shared.new(layout.MAILBOX)[0]
        self.directory = world.shared.new(layout.ENTRY, HANDLES + 1, SPEC.layers * len(PROJECTIONS))
        self.directory["ready"] = GONE + 1  # no step of one that has not come yet waits for it
        self.held = world.shared.new("<u4", self.num_links, HANDLES + 1)
        self.blocks = world.shared.new(BLOCK, (HANDLES + 1) * len(SITES))
        self.page_lists = world.shared.new("<u8", HANDLES + 1, 2)
        self.page = [self.pages.new("u1", weights.MOST_TILES * TILE_BYTES, align=512) for _ in range(HANDLES + 1)]
        self.serve = world.private.new(layout.SERVE)[0]
        self._fill(idle_ns)
        self.generation = [0] * (HANDLES + 1)
        self.variant: dict[int, int] = {}  # of each handle that ever was
        self.ready, self.known = set[int](), [0] * (HANDLES + 1)  # handles
        self.notes = list[tuple[int, int, int, int]]()
        self.launches = self.grid = self.ordered = self._posted = 0
        self.draining = self.stopped = self._busy = False
        self.steady = True  # its kernel leaves only at the end
        self.never = 0  # a handle whose weights never come
        self.foreign: tuple[int, int] | None = None  # a link, and the index of the handles that it never holds

    def _fill(self, idle_ns: int) -> None:
        new, serve = self.world.private.new, self.serve
        sites = new(layout.SITE, SPEC.layers, len(PROJECTIONS))
        for site in SPEC.sites():
            place = sites[site.layer, PROJECTIONS.index(site.projection)]
            place["in_width"], place["out_width"] = SPEC.in_width(site), SPEC.out_width(site)
            place["experts"] = SPEC.experts_at(site)
        wide_in, wide_out = max(map(SPEC.in_width, SITES)), max(map(SPEC.out_width, SITES))
        self.links = new(layout.LINK, self.num_links)
        self.tenants = new(layout.TENANT, codes.MAX_TENANTS)
        self.arrivals, self.used = new("<u8", 2), new("<u8", HANDLES + 1)
        self.expert_places = self.world.shared.new("<i4", HANDLES + 1, len(SITES), SPEC.experts, 2)
        arrays = {"links": self.links, "sites": sites, "held": self.held, "used": self.used, "blocks": self.blocks}
        arrays["tenants"] = self.tenants
        arrays |= {"orders": new("u1", codes.ORDERS * layout.ORDER_BYTES), "directory": self.directory}
        arrays |= {"places": self.expert_places, "arrivals": self.arrivals, "mailbox": self.mailbox}
        partial = -(-wide_in // (CHUNK * CHUNKS)), MAX_ROWS, MAX_RANK
        arrays |= {"partial": new("<f4", *partial), "other_partial": new("<f4", *partial)}
        arrays |= {"v": new("<f4", MAX_ROWS, MAX_RANK), "delta": new("<f4", MAX_ROWS, wide_out)}
        arrays |= {"groups": new("<i4", MAX_ROWS), "results": new("<u2", MAX_ROWS, wide_out)}
        for name, array in arrays.items():
            serve[name] = address(array)
        serve["max_entries"], serve["max_rank"], serve["table_bytes"] = MAX_ROWS, MAX_RANK, TABLE_BYTES
        self.wire = "e4m3_" if self.world.library.in_codes else ""
        serve["dtype"], serve["num_handles"] = slot.E4M3 if self.wire else weights.DTYPE_INDEX, HANDLES + 1
        serve["num_layers"], serve["num_projections"], serve["tells_all"] = SPEC.layers, len(PROJECTIONS), 1
        serve["num_links"], serve["idle_ns"] = self.num_links, idle_ns

    def mail(self, name: str, values: object, at: int | None = None) -> None:
        self.world.write(self.mailed(name, at), values)

    def mailed(self, name: str, at: int | None = None) -> np.ndarray:
        """A word of the mailbox, or one of a list."""
        kind, offset = layout.MAILBOX.fields[name][:2]
        base = kind.subdtype[0] if kind.subdtype else kind
        begin = address(self.mailbox) - World.shared.begin + offset + (at or 0) * base.itemsize
        return World.shared.bytes[begin : begin + base.itemsize].view(base)

    # -- the kernel

    def launch(self) -> None:
        self.launches += 1
        where = {"grid": GRID, "threads": THREADS, "device": self.device}
        values, nbytes = (address(self.serve), self.launches), self.world.library.layout_of(b"shared")
        self.grid = self.world.launch(f"serve_{self.wire}bfloat16", *values, shared_bytes=nbytes, **where)

    def pump(self) -> None:
        """Hear what the kernel says; launch it again where it left."""
        noted, heard = int(self.mailbox["noted"]), int(self.mailbox["heard"])
        for i in range(heard, noted):
            kind, link, seq, what = (int(v) for v in self.mailbox["notes"][i % codes.NOTES])
            self.notes.append((kind, link, seq, what))
            self.ordered += kind == NoteKind.ORDERED and what == Refusal.NOTHING_WRONG
        assert noted - heard < codes.NOTES, "notes may have been lost: a smaller quantum, please"
        if noted != heard:
            self.mail("heard", noted)
        if not self.stopped and not self.world.running(self.grid):
            assert not self.arrivals[1], "the grid gave up"
            self.launch()

    def post(self, kind: CommandKind, link: int = 0, *words: int) -> Generator[None, None, int]:
        """The turn after which it holds."""
        while self._busy:
            yield
        self._busy = True
        number, ordered = self._posted, self.ordered
        command = np.zeros(1, layout.COMMAND)
        command["kind"], command["link"] = kind, link
        command["words"][0, : len(words)] = words
        self.mail("commands", command, number % codes.COMMANDS)
        self._posted += 1
        self.mail("posted", self._posted)
        while int(self.mailbox["taken"]) <= number:
            yield
        acknowledged = self.mailed("acks", number % codes.COMMANDS)
        assert self.world.is_ordered(address(self.mailed("taken")), acknowledged), "an ack may come behind its word"
        ack = int(acknowledged[0])
        self._busy = False
        assert ack >= ordered, "a command holds after the newest turn, not before it"
        return ack

    def settled(self, turn: int) -> Waiting:
        while int(self.mailbox["done"]) < turn:
            yield

    # -- adapters

    def begin(self, index: int, variant: int) -> int:
        """A handle, known from now on and not loaded."""
        self.generation[index] += 1
        handle = layout.handle_of(index, self.generation[index])
        self.variant[handle], self.known[index] = variant, handle
        for link in self.links_of:
            if (link, index) != self.foreign:
                self.hold(link, handle)
        for site in SITES:
            self.world.write(self._entry(index, site)["ready"], 0)
            self.world.write(self._entry(index, site)["generation"], self.generation[index])
        return handle

    def hold(self, link: int, handle: int) -> None:
        """A client holds it from now on, and no other at that index."""
        self.world.write(self.held[link, handle & 0xFFFF :][:1], handle >> 16)

    def finish(self, handle: int) -> None:
        """Pages and what says where they are, then the words that say so: the order of a copy engine's stream."""
        index = handle & 0xFFFF
        adapter = weights.packed(self.variant[handle])
        self.world.copy_pages(self.page[index], adapter.tiles)
        self.world.write(self.page_lists[index], [address(self.page[index]), 0])
        for i, site in enumerate(SITES):
            shape, block, row = adapter.shapes[site], np.zeros(1, BLOCK), index * len(SITES) + i
            block["pages"], block["groups"] = address(self.page_lists[index]), shape.groups
            block["tiles"], block["out_rows"] = shape.num_expand_jobs, shape.out_width
            block["num_pairs"] = len(shape.pairs)
            for j, pair in enumerate(shape.pairs):
                block["pairs"][0, j] = (pair.groups, pair.out_begin, pair.out_rows, pair.scale)
            self.world.write(self.blocks[row : row + 1], block)
            entry = np.zeros(1, layout.ENTRY)
            entry["generation"], entry["row"], entry["first_tile"] = handle >> 16, row, adapter.first[site]
            entry["tiles_each"], entry["end_expert"] = shape.num_tiles, SPEC.experts
            if self.variant[handle] % 2:  # as if they differed in shape
                tiles = adapter.first[site] + shape.num_tiles * np.arange(SPEC.experts)
                self.world.write(self.expert_places[index, i], np.stack([np.full(SPEC.experts, row), tiles], axis=1))
                entry["first_tile"], entry["tiles_each"] = row * SPEC.experts, codes.UNEVEN
            self.world.write(self._entry(index, site), entry)
        for site in SITES:
            self.world.write(self._entry(index, site)["ready"], handle >> 16)
        self.ready.add(handle)

    def _entry(self, index: int, site: Site) -> np.ndarray:
        return self.directory[index : index + 1, site_index(site)]

    def drop(self, index: int) -> Waiting:
        """Unlist an adapter, wait until no turn can still read it, then overwrite its memory."""
        self.ready.discard(self.known[index])
        self.known[index] = 0
        for site in SITES:
            self.world.write(self._entry(index, site)["generation"], 0)
            self.world.write(self._entry(index, site)["ready"], GONE + self.generation[index])
        turn = yield from self.post(CommandKind.RETIRE, index)
        yield from self.settled(turn)
        ours = self.blocks[index * len(SITES) :][: len(SITES)].view(np.uint8)
        assert self.world.is_ordered(address(self.mailed("done")), ours, read=True), "a turn may still read its blocks"
        self.world.copy_pages(self.page[index], np.full(len(self.page[index]), 0xFF, np.uint8))
        row = index * len(SITES)
        self.world.write(self.blocks[row : row + len(SITES)].view(np.uint8), 0)
