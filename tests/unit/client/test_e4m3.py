"""The 8-bit wire: its error against float64, rows that no 8 bits hold, and steps of a wire that is not the server's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client_connector.connect import agreed_wire, check_wire
from client_connector.transformers import attach
from kernels_cuda import reference
from kernels_cuda.ops import Step
from lora_server.demo import tiny
from lora_server.demo.engine import pad
from lora_server.demo.inproc import InprocServer
from lora_server.errors import ConfigError, ProtocolError
from lora_server.spec import from_config
from lora_server.transport import e4m3
from lora_server.transport.rows import TORCH_DTYPES
from lora_server.wire import slot
from lora_server.wire.slot import RequestHeader
from tests.support.bounds import magnitudes, replaced
from tests.support.rig import LAYER0, LOADED, Client, healthy, load, make_rig
from tests.support.workload import workload

pytestmark = pytest.mark.usefixtures("quiet")
EXACT = TORCH_DTYPES[: slot.E4M3]
ROUNDING = 1e-6  # of the float32 arithmetic beside that of e4m3


def round_trip(x_TK):
    """(values, scales) as the other end has them."""
    codes_TK, scales_T = torch.empty(x_TK.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x_TK))
    e4m3.quantise(x_TK, codes_TK, scales_T)
    return e4m3.expand(codes_TK, scales_T), scales_T


def error_of_format(x_TK: np.ndarray) -> np.ndarray:
    """What an element may lose: half a unit of 3 bits of mantissa, or of the least exponent."""
    scale_T1 = np.maximum(np.abs(x_TK).max(1, keepdims=True) / 448, e4m3.LEAST_SCALE)
    return (2.0**-4 + ROUNDING) * np.abs(x_TK) + 2.0**-10 * scale_T1


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 70), st.integers(-149, 120), st.sampled_from(EXACT))
def test_every_element_is_within_the_error_of_the_format(seed, rows, width, exponent, dtype):
    pick = torch.Generator().manual_seed(seed)
    spread = torch.randint(-20, 1, (rows, width), generator=pick)
    x = torch.ldexp(torch.randn(rows, width, generator=pick), spread + exponent).clamp(-3e38, 3e38).to(dtype)
    x = x.masked_fill(x.isinf(), 1.0)
    ours, scales = round_trip(x)
    assert (scales > 0).all() and scales.isfinite().all()
    exact = x.double().numpy()
    if rows:
        assert (np.abs(ours.double().numpy() - exact) <= error_of_format(exact)).all()
    assert torch.equal(ours == 0, ours.double() * scales[:, None].double() == 0)


def test_expansion_equals_torchs_of_all_codes():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    torch.testing.assert_close(e4m3.expand(codes), codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(bad):
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    x[0, 3], x[2, 8], x[3] = bad, bad, 0.0
    ours, scales = round_trip(x)
    assert ours[0].isnan().all() and ours[2].isnan().all() and scales.isfinite().all() and (scales >= 0).all()
    assert torch.equal(ours[1], round_trip(x[1:2])[0][0]) and ours[1].isfinite().all()
    assert torch.equal(ours[3], torch.zeros(9))


@pytest.fixture(scope="module")
def rig(tiny_adapters):
    rig = make_rig(wire="e4m3")
    assert load(rig.shard.store, LOADED, tiny_adapters["all"]).result() is None
    yield rig
    rig.shard.store.close()


def request(client: Client, x: torch.Tensor, maps: bool = True) -> bytearray:
    """A step of these rows, as the connector packs them."""
    memory = client.request(rows=len(x), maps=maps)
    sound = RequestHeader.unpack_from(memoryview(memory))
    counts = (sound.num_segments, sound.num_entries, sound.flags)
    tables = slot.request_offsets(*counts, 0).rows
    end = slot.request_offsets(*counts, x.numel(), len(x)).end
    header = sound._replace(dtype=slot.E4M3, payload_bytes=end - slot.HEADER_BYTES)
    slots = client.link.region.request(header.seq)
    slots[:tables] = memory[:tables]
    header.pack_into(slots)
    client.link.put_rows(header, x, torch.arange(len(x)))
    return bytearray(slots[:end])


def scales_of(client: Client, memory: bytearray) -> np.ndarray:
    header = RequestHeader.unpack_from(memoryview(memory))
    at = slot.request_offsets(header.num_segments, header.num_entries, header.flags, 0, header.num_rows)
    return np.frombuffer(memory, np.float32, header.num_rows, at.scales)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("maps", [True, False])
def test_a_step_is_within_the_error_of_the_format(rig, maps, dtype):
    """Of its rows, through both of its matrices, and of its deltas; with and without tables to fold the scales into."""
    client, pick = Client(rig.shard, 1), torch.Generator().manual_seed(3)
    x = torch.ldexp(torch.randn(5, 64, generator=pick), torch.tensor([[0], [-12], [9], [3], [-2]])).to(dtype)
    memory = request(client, x, maps)
    header = RequestHeader.unpack_from(memoryview(memory))
    seq = client.push(memory)
    assert client.answer(seq)[0].dtype == slot.E4M3
    ours = client.link.rows.deltas(header, x)
    assert ours.dtype == dtype and ours.shape == (5, header.out_width)
    entries = 10 if maps else 5
    table = [[LOADED, 1, 0, 5], [LOADED, 2, 5, 5]][: 1 + maps]
    segments = rig.shard.store.gather(LAYER0, np.array(table, np.int32), "here")
    rows = torch.arange(entries) % 5
    tables = {"in_map_N": rows, "out_map_N": rows, "weights_N": torch.full((entries,), 0.5)}
    tables = tables if maps else dict.fromkeys(tables)
    sizes = {"num_entries": entries, "num_out_rows": 5, "windows": header.windows}
    step = Step(rows_TK=x.double(), segments=segments, **sizes, **tables)
    exact = reference.lora_step(step)
    lost = magnitudes(replaced(step, rows_TK=torch.from_numpy(error_of_format(x.double().numpy()))))
    bound = lost + error_of_format(np.abs(exact) + lost) + torch.finfo(dtype).eps * np.abs(exact)
    bound += 2.0**-20 * magnitudes(step)
    assert (np.abs(ours.double().numpy() - exact) <= bound).all()
    assert np.abs(ours.double().numpy() - exact).max() > 1e-3 * np.abs(exact).max(), "8 bits were not exact"
    client.link.close()


def test_a_row_of_nan_comes_back_as_one_and_its_neighbours_do_not(rig):
    client, x = Client(rig.shard, 1), torch.ones(3, 64)
    x[1, 5] = math.inf
    memory = request(client, x)
    seq = client.push(memory)
    client.answer(seq)
    ours = client.link.rows.deltas(RequestHeader.unpack_from(memoryview(memory)), x)
    assert ours[1].isnan().all() and ours[0].isfinite().all() and torch.equal(ours[0], ours[2])
    client.link.close()


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1e-30, -1.0])
def test_a_malformed_scale_is_refused(rig, scale):
    bad, good = Client(rig.shard, 1), Client(rig.shard, 2)
    memory = request(bad, torch.ones(2, 64))
    scales_of(bad, memory)[1] = scale
    with pytest.raises(ProtocolError, match=r"client 1 .* got scale .* of row 1, expected it finite and from 0 on"):
        bad.send(memory)
    good.send(request(good, torch.ones(2, 64)))
    scales_of(bad, memory := request(bad, torch.ones(2, 64)))[:] = 0.0
    assert not any(bad.send(memory)[1][64:]), "a scale of 0 is one of a row of zeros"
    bad.link.close(), good.link.close()


def test_rows_of_another_wire_than_the_servers_are_refused(rig, tiny_adapters):
    exact_rows, client = Client(rig.shard, 1), Client(rig.shard, 2)
    with pytest.raises(ProtocolError, match=r"got float32 rows, but this server's --wire is e4m3"):
        exact_rows.send(exact_rows.request(rows=1))
    exact = make_rig()
    assert load(exact.shard.store, LOADED, tiny_adapters["all"]).result() is None
    other = Client(exact.shard, 1)
    with pytest.raises(ProtocolError, match=r"got e4m3 rows, but this server's --wire is exact"):
        other.send(request(other, torch.ones(2, 64)))
    healthy(other), client.send(request(client, torch.ones(2, 64)))
    assert client.link.region.layout.nbytes < 0.4 * other.link.region.layout.nbytes
    exact.shard.store.close()
    for one in (exact_rows, client, other):
        one.link.close()


def test_what_an_engine_asks_for_is_what_the_server_has():
    assert agreed_wire("", "any") == agreed_wire("exact", "exact") == "exact" and agreed_wire("e4m3", "any") == "e4m3"
    for served, wanted in (("e4m3", "exact"), ("exact", "e4m3"), ("", "e4m3"), ("e5m2", "any")):
        with pytest.raises(ConfigError, match=f"server's is {served or 'exact'}, the engine takes {wanted}"):
            agreed_wire(served, wanted)
    with pytest.raises(ConfigError, match="got 'int8', expected one of any, exact, e4m3"):
        check_wire("int8")


@pytest.mark.parametrize("dtype", EXACT[:2], ids=str)
def test_a_model_says_nearly_the_same(dtype):
    """All of its sites, chunks and slots; what travels is less. Every row goes to all experts: otherwise rounding, each
    processor's own, decides between them."""
    work = workload("mixtral")
    model = tiny.make_model("mixtral", dtype=dtype, num_experts_per_tok=work.spec.experts)
    spec = from_config(model.config.to_dict(), name=work.spec.name)
    ids, mask = pad(work.batch, 0)
    logits, sent = {}, {}
    for wire in ("exact", "e4m3"):
        server = InprocServer(spec, work.paths, layout="ep2-pp2", max_step_rows=24, slots=2, wire=wire)
        with attach(model, server) as lora, lora.adapters(work.names):
            assert lora.client.described()["wire"] == wire
            logits[wire] = model(ids, attention_mask=mask).logits[:, -1].float()
        sent[wire] = sum(shard.counters.request_bytes + shard.counters.response_bytes for shard in server.shards)
        server.close()
    plain = model(ids, attention_mask=mask).logits[:, -1].float()
    with_adapter = [row for row, name in enumerate(work.names) if name]
    error = (logits["e4m3"] - logits["exact"])[with_adapter].norm()
    assert 0 < error < 0.25 * (logits["exact"] - plain)[with_adapter].norm(), "a small part of what the adapters add"
    assert sent["e4m3"] < 0.75 * sent["exact"]
