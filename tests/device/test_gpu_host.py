"""What a shard's host does for a kernel that serves by itself, and a client's for its own; kernels run on this CPU."""

from __future__ import annotations

import contextlib
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels_cuda.heuristics import STAGES
from kernels_cuda.launch import most_combined_entries
from kernels_cuda.residency import LANES
from kernels_cuda.routing import Route
from lora_server.adapters import open_adapter
from lora_server.daemon import backends
from lora_server.demo import tiny
from lora_server.device.client.captured import Captured
from lora_server.device.client.ends import HostEnds
from lora_server.device.host.directory import Places
from lora_server.device.host.kernel import KernelLostError, ServeKernel
from lora_server.device.host.mailbox import Mailbox
from lora_server.device.protocol.codes import COMMANDS, GONE_BIT, MAX_LINKS, CommandKind
from lora_server.device.protocol.layout import SERVE, handle_of, parts
from lora_server.errors import ConfigError, ProtocolError, UnknownAdapterError
from lora_server.spec import PROJECTIONS, Site
from lora_server.transport.base import Grant, Port
from lora_server.transport.shm_listener import ShmListener
from lora_server.wire import slot
from lora_server.wire.messages import Hello
from lora_server.wire.region import RegionLayout
from tests.support.gpu import emulated, emulated_gpu
from tests.support.gpu.gpu_steps import ROWS, SITE, Host
from tests.support.serving import until
from tests.support.workload import model_of, spec_of


@pytest.fixture(scope="module")
def host(tmp_path_factory, tiny_adapters):
    """One whose kernel leaves whenever no client has asked for 0.3 s: much longer than the emulator's naps, 60 ms, in
    the middle of which its clock goes on."""
    if emulated.MISSING:
        pytest.skip(emulated.MISSING)
    emulated_gpu.compile_all()
    one = Host(tmp_path_factory.mktemp("shard"), idle_ns=300_000_000)
    yield one
    one.close()


@pytest.fixture
def steps(host, tiny_adapters):
    """Of a client, and an adapter of its own."""
    one = host.join(host.load(tiny_adapters["all"]))
    yield one
    one.link.close()


def test_a_kernel_that_leaves_is_launched_again(host, steps):
    before, launches = steps.step(), host.kernel.launches
    until(lambda: host.kernel.launches > launches + 1, "it left, twice")
    assert torch.equal(steps.step(), before)


@pytest.mark.emulator
def test_a_step_that_sums_more_entries_than_a_warp_lists_is_refused(tmp_path, tiny_adapters):
    """Their list lies in shared memory, where a longer one would overwrite what other warps compute with."""
    most = most_combined_entries(STAGES)
    emulated_gpu.compile_all()
    with contextlib.closing(Host(tmp_path, rows=most + 1)) as host:
        steps = host.join(host.load(tiny_adapters["all"]))
        before = steps.step()
        assert steps.answer(steps.push(combined=most + 1)) == "protocol"
        assert torch.equal(steps.step(), before)
        assert isinstance(steps.answer(steps.push(combined=most)), torch.Tensor)
        steps.link.close()


def test_a_shard_is_not_given_steps_that_it_cannot_sum():
    with pytest.raises(ConfigError, match=r"--max-step-rows: got 8193, expected at most 8192"):
        backends.resident(None, 0, torch.bfloat16, None, None, 8193, None)


def test_a_step_whose_weights_are_not_there_brings_them_or_waits_for_its_budget(host, tiny_adapters):
    known = host.load(tiny_adapters["bf16"], eager=False)
    steps = host.join(known)
    mailbox, posted = host.kernel.mailbox, host.kernel.mailbox._posted
    host.store.adapters.drop(known)
    assert mailbox._posted > posted, "the kernel was asked"
    until(lambda: mailbox.is_empty, "it has taken that, and the leave of a client before")
    assert steps.step() == "unknown_adapter", "a handle of nobody's"
    never = handle_of(500, 1)
    host.tier.know(never)
    host.aim(steps, never)
    assert steps.step(seconds=0.2) == "adapter_not_loaded"
    host.tier.forget(never)
    host.aim(steps, host.load(tiny_adapters["all"], eager=False))
    assert isinstance(steps.step(), torch.Tensor)
    steps.link.close()
    until(lambda: not host.port.connections, "it went")


@pytest.mark.parametrize("eager", [True, False], ids=["loaded", "known"])
def test_no_step_waits_for_an_adapter_that_was_dropped(host, tiny_adapters, eager):
    handle = host.load(tiny_adapters["bf16"], eager=eager)
    index, generation = parts(handle)
    host.store.adapters.drop(handle)
    entries = host.tier._mirror._on_device._host[index]
    assert (entries["ready"] == 1 << GONE_BIT | generation).all() and not entries["generation"].any()


def test_a_client_names_what_it_holds(host, steps, tiny_adapters):
    own, others = steps.handle, host.load(tiny_adapters["all"])
    before = steps.step()
    steps.handle = others
    assert steps.step(seconds=0.2) == "permission_denied"
    host.aim(steps, others)
    assert torch.equal(steps.step(), before)
    host.port.hold(steps.terms.client, [], fewer=[own])
    steps.handle = own
    until(lambda: steps.step(seconds=0.2) == "permission_denied", "its host has told the kernel")


def test_what_cannot_grow_beside_a_kernel_grows_between_two(host, steps):
    """The directory, and the workspace of higher ranks, while a client's steps go on."""
    before, stop, wrong = steps.step(), threading.Event(), list[object]()

    def on_and_on() -> None:
        while not stop.is_set():
            got = steps.step()
            if not (isinstance(got, torch.Tensor) and torch.equal(got, before)):
                wrong.append(got)

    thread = threading.Thread(target=on_and_on)
    thread.start()
    host.tier.know(handle_of(5000, 1))
    host.kernel.reserve_rank(48)
    stop.set()
    thread.join(60)
    assert not wrong and torch.equal(steps.step(), before)
    host.tier.forget(handle_of(5000, 1))


def test_more_clients_than_the_poller_has_lanes(host, tiny_adapters):
    """The first of the second 32 makes room for them between two launches; who was there keeps its place."""
    handle, before = host.load(tiny_adapters["all"]), host.kernel.arguments["num_links"]
    clients = [host.join(handle) for _ in range(LANES + 2)]
    first = clients[0].step()
    for one in (*reversed(clients), *clients):
        assert torch.equal(one.step(), first)
    until(lambda: len(host.host.clients.seats) == len(clients), "those of other tests have gone")
    assert before == LANES and host.kernel.arguments["num_links"] == 2 * LANES
    for one in clients[:-1]:
        one.link.close()
    until(lambda: len(host.host.clients.free) == MAX_LINKS - 1, "they went")
    assert torch.equal(clients[-1].step(), first) and host.host.clients.free[0] == 0, "the least link is the next one's"
    clients[-1].link.close()


def route_of(steps) -> Route:
    """Rows 2, 0, 1 of x, which are those of tokens 2, 0, 1."""
    route, ints = Route.empty(ROWS, "cpu", max_rows=ROWS), torch.tensor([2, 0, 1], dtype=torch.int32)
    route.counts.copy_(torch.tensor([1, ROWS, ROWS, ROWS]))
    route.segments[0] = torch.tensor([steps.handle, 0, 0, ROWS], dtype=torch.int32)
    route.token_M.copy_(ints), route.pair_N.copy_(ints), route.row_N.copy_(torch.arange(ROWS, dtype=torch.int32))
    return route


class Added:
    """Captured launches of one site, of a link of their own; called, they say what a pass leaves in zeros."""

    def __init__(self, host: Host, steps, route: Route, site: Site = SITE, by_entry: bool = False) -> None:
        self.link, self.width = host.join(steps.handle).link, host.spec.out_width(site)
        self.captured = Captured(self.link)
        header = steps.header(0, 0)._replace(
            flags=slot.HAS_OUT_MAP if by_entry else slot.HAS_IN_MAP, windows=((0, self.width),),
            layer=site.layer, projection=PROJECTIONS.index(site.projection),
        )  # fmt: skip
        self.site = self.captured.site(header, steps.x, route, by_entry=by_entry)

    def __call__(self) -> torch.Tensor:
        y = torch.zeros(ROWS, self.width, dtype=torch.bfloat16)
        self.captured.begin(60)
        self.site.put(), self.site.add(y)
        self.captured.finish()
        return y

    def pushed(self) -> int:
        return int(self.link.state.read()["pushed"])


def test_what_the_kernel_served_counts_as_used(host, tiny_adapters):
    """So that the least recently used makes room, though no host sees a step."""
    used, idle = host.load(tiny_adapters["all"]), host.load(tiny_adapters["bf16"])
    steps = host.join(used)
    for times in (1, 2):
        assert isinstance(steps.step(), torch.Tensor)
        host.store.report.use(), host.store.report.use()
        rates = [host.store._table.entries[handle].usage.rate for handle in (used, idle)]
        assert times - 0.5 < rates[0] <= times and rates[1] == 0.0, "each use counts once"
    steps.link.close()


def test_captured_launches_weigh_a_row_per_entry(host, steps):
    """A row of x for each entry; the answer has one per token: their sum, each times its weight."""
    deltas, route = steps.step().float(), route_of(steps)
    route.counts.copy_(torch.tensor([1, ROWS, 2, 2]))
    route.row_N.copy_(torch.tensor([0, 1, 1], dtype=torch.int32))
    route.token_M[:2] = torch.tensor([2, 0], dtype=torch.int32)
    route.weights_N.copy_(torch.tensor([1.0, 0.5, 0.25]))
    added = Added(host, steps, route, by_entry=True)
    y = added()
    assert torch.equal(y[2].float(), deltas[2]) and not y[1].any()
    rounded = 2**-8 * float(deltas.abs().max())
    torch.testing.assert_close(y[0].float(), 0.5 * deltas[0] + 0.25 * deltas[1], rtol=0, atol=rounded)
    added.link.close()


def test_captured_launches_outlive_their_link(host, steps):
    """put, wait and add: the deltas that a host gets, or an error; nothing is sent for nobody."""
    deltas, route = steps.step(), route_of(steps)
    added = Added(host, steps, route)
    assert torch.equal(added(), deltas) and torch.equal(added(), deltas) and added.pushed() == 2
    assert added.captured.last().pushed_ns > 0, "the whole of the header is sent"
    route.counts.zero_()
    assert not added().any() and added.pushed() == 2
    route.counts.copy_(route_of(steps).counts)
    route.segments[0, 0] = handle_of(700, 1)
    with pytest.raises(UnknownAdapterError, match="names an adapter that is not here"):
        added()
    route.segments[0, 0] = steps.handle
    assert torch.equal(added(), deltas)
    added.link.close()
    added.link = host.join(steps.handle).link
    added.captured.take_over(added.link)
    assert torch.equal(added(), deltas) and added.pushed() == 1
    added.link.close()


def test_one_warp_waits_before_all_blocks_of_the_first_add(host, steps, monkeypatch):
    """Where they waited themselves, they would take a shard's GPU from it."""
    added, launched = Added(host, steps, route_of(steps)), list[str]()
    launch = added.link.queue.launch
    monkeypatch.setattr(
        added.link.queue, "launch", lambda name, *values: (launched.append(name), launch(name, *values))
    )
    y = added()
    added.site.add(y), added.captured.finish()
    assert launched == ["link_put_vectors", "link_wait", "link_add_bfloat16", "link_add_bfloat16"]
    added()
    assert launched[4:] == launched[:3]
    added.link.close()


@pytest.mark.emulator
def test_captured_launches_add_codes_as_the_host_reads_them(tmp_path, tiny_adapters):
    """Codes put by a kernel that routes nothing, the answer added by one; rows of zeros and of what is no number."""
    host = Host(tmp_path, wire="e4m3")
    steps = host.join(host.load(tiny_adapters["all"]))
    x = steps.x
    x[1], x[2, 5] = 0, math.inf
    deltas = steps.step()
    assert deltas[0].isfinite().all() and deltas[0].any() and not deltas[1].any() and deltas[2].isnan().all()
    added = Added(host, steps, route_of(steps))
    assert torch.equal(added().nan_to_num(7), deltas.nan_to_num(7))
    with pytest.raises(ProtocolError, match="got float32 rows for a GPU, expected bfloat16 or float16"):
        steps.link.put_rows(steps.header(0, 0), x.float(), torch.arange(ROWS))
    added.link.close(), steps.link.close(), host.close()


def test_columns_that_cannot_be_added_in_pairs_are_an_error(host, steps):
    y, route = torch.zeros(ROWS, 8, dtype=torch.bfloat16), route_of(steps)
    site, odd = (
        Captured(steps.link).site(steps.header(0, 0)._replace(windows=((0, width),)), steps.x, route, by_entry=False)
        for width in (8, 7)
    )
    for where, columns, skip in ((site, y[:, 1:3], 0), (site, y[:, :3], 0), (site, y[:, :2], 1), (odd, y[:, :2], 0)):
        with pytest.raises(ProtocolError, match="expected an even number"):
            where.add_columns(columns, skip)
    with pytest.raises(ProtocolError, match="even number of contiguous"):
        site.add_columns(y[:, ::2], 0)


@pytest.mark.emulator
def test_at_the_end_who_waits_hears_of_it(tmp_path, tiny_adapters):
    host = Host(tmp_path)
    host.tier.know(handle_of(9, 1))
    steps = host.join(handle_of(9, 1))
    sent = steps.push()
    until(lambda: np.frombuffer(bytes(host.kernel.arguments._there.tolist()), SERVE)["tickets"][0] == 1, "it was taken")
    host.stop()
    assert steps.answer(sent) == "shard_unavailable"
    steps.link.close()
    host.close()


@pytest.mark.emulator
def test_a_kernel_without_a_heartbeat_ends_its_shard():
    class Dead(emulated_gpu.EmulatedGpu):
        def queue(self, urgent=False):
            queue = super().queue(urgent)
            queue.launch = lambda *values: None
            return queue

    spec = spec_of("mixtral")
    kernel = ServeKernel(Dead(), spec, torch.bfloat16, RegionLayout.for_model(spec, 8, 2), 8, heartbeat_seconds=0.05)
    kernel.start()
    with pytest.raises(KernelLostError, match=r"no heartbeat for 0.05 s"):
        until(kernel.look, "it is missed")


def test_experts_of_a_site_may_differ_in_rank(host, tmp_path):
    """And what one had, another gets, once the kernel reads it no more."""
    site, experts, ranks = Site(1, "gate_up"), (0, 3, 6), {r".*experts\.3\.w1": 40, r".*experts\.[56]\.w[12]": 1}
    recipe = {"lora_rank": 4, "seed": 1, "alpha": 8, "style": "per_expert", "rank_pattern": ranks}
    tiny.make_adapter(model_of("mixtral"), tmp_path, **recipe)
    width, deltas = host.spec.out_width(site), dict[int, torch.Tensor]()
    with open_adapter(tmp_path, host.spec) as adapter:
        for expert in experts:
            deltas[expert] = torch.zeros(width, host.spec.in_width(site), dtype=torch.float64)
            for pair, a, b in adapter.read(site, expert):
                deltas[expert][pair.out_begin : pair.out_end] += pair.scale * (b.double() @ a.double())
    taken = []
    for _ in range(2):
        steps = host.join(host.load(tmp_path))
        route = route_of(steps)
        route.counts[0] = len(experts)
        route.segments[:3] = torch.tensor([[steps.handle, e, i, 1] for i, e in enumerate(experts)], dtype=torch.int32)
        added = Added(host, steps, route, site)
        y = added()
        for row, expert in zip(route.pair_N.tolist(), experts, strict=True):
            exact = deltas[expert] @ steps.x[row].double()
            torch.testing.assert_close(y[row].double(), exact, rtol=0, atol=0.02 * float(exact.abs().max()))
        added.link.close(), steps.link.close()
        taken.append(host.tier._mirror._on_device._places._used)
        host.store.adapters.drop(steps.handle)
    assert taken[0] == taken[1] > 0, "the second had the places of the first"


def test_places_grow_between_two_launches():
    sizes, gpu = [], emulated_gpu.EmulatedGpu()
    arguments = SimpleNamespace(point=lambda name, places: sizes.append(len(places)))
    places = Places(SimpleNamespace(gpu=gpu, arguments=arguments, between=lambda action: action()), places=4)
    rows = np.arange(6, dtype=np.int32).reshape(3, 2)
    assert [places.put(handle, rows) for handle in (1, 1, 2)] == [0, 3, 6] and sizes == [4, 8, 16]
    assert np.array_equal(places._device[6:9].numpy(), rows) and np.array_equal(places._device[:3].numpy(), rows)
    places.free(1)
    assert {places.put(3, rows), places.put(3, rows)} == {0, 3} and places.put(3, rows[:2]) == 9


@pytest.mark.emulator
def test_a_shard_without_such_memory_says_so(tmp_path):
    port = Port(RegionLayout(2, 8192, 4096, 1024))
    listener = ShmListener(port, tmp_path / "shard.sock")
    port.grant(Grant(1, 1, b"key"))
    with pytest.raises(ConfigError, match="the shard does not compute on a GPU"):
        HostEnds(listener.address, Hello(1, 1, b"key"), 0, emulated_gpu.EmulatedGpu())
    listener.close()


def test_a_command_holds_when_what_was_ordered_before_it_is_done():
    mailbox = Mailbox(emulated_gpu.EmulatedGpu())
    first, second = mailbox.post(CommandKind.RETIRE, 1), mailbox.post(CommandKind.REVOKE, 2, [1])
    assert not mailbox.holds(first)
    mailbox._box["acks"][:2], mailbox._box["taken"], mailbox._box["done"] = (7, 8), 2, 6
    assert not mailbox.holds(first)
    mailbox._box["done"] = 7
    assert mailbox.holds(first) and not mailbox.holds(second)
    others = [mailbox.try_post(CommandKind.RETIRE) for _ in range(COMMANDS + 1)]
    assert others == [*range(2, 2 + COMMANDS), None], "there is room for as many as nobody has taken"
    mailbox._box["done"] = 8
    assert mailbox.holds(second) and mailbox.holds(first)


def test_memory_that_the_kernel_may_write_to_is_not_unmapped(host, tiny_adapters):
    steps = host.join(host.load(tiny_adapters["all"]))
    steps.step()
    (connection,) = host.port.connections
    mirror = next(peer.mirror for peer in host.peers() if peer.connection is connection)
    assert not mirror.free() and not mirror._requests.closed.is_set()
    steps.link.close()
    until(mirror.free, "the kernel gave it up")
    assert mirror._requests.closed.is_set() and mirror._responses.closed.is_set()
