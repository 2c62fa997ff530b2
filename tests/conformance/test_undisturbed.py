"""Every row that a transformers engine gets through an outage is, bit by bit, that of an undisturbed run; what it does
not get is a typed error. A batch keeps its shape there, and so its rounding. LORA_DEATHS=50 is the long campaign."""

import contextlib

import pytest
import torch

from client_connector.transformers import attach
from lora_server.demo import tiny
from lora_server.demo.engine import generate, pad
from lora_server.errors import LoraServerError, ServerUnavailableError, StepError
from tests.support import undisturbed
from tests.support.gpu import emulated_gpu
from tests.support.serving import HANG_SECONDS, shard_processes, until
from tests.support.undisturbed import DISTURBANCES, SEEDS, Death, ModuleCalls, kill_in
from tests.support.workload import workload

pytestmark = pytest.mark.usefixtures("forked")
NEW_TOKENS = 4
MANY = 200  # requests that may fail before one is answered again
SHORT_SECONDS = 2.0  # of a step, where a shard stands still
OUTAGE = (StepError, ServerUnavailableError)


@pytest.fixture(scope="module", params=undisturbed.TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def model(transport):
    return tiny.make_model("mixtral", dtype=torch.bfloat16) if transport == "gpu" else workload("mixtral").model


@pytest.fixture(scope="module")
def server(transport, tmp_path_factory):
    with undisturbed.serving(workload("mixtral"), transport, tmp_path_factory.mktemp(transport)) as running:
        if transport == "gpu":
            emulated_gpu.use()
        yield running
    emulated_gpu.opened.openers.pop("cpu", None)


class Requests:
    """One batch again and again, each time under holds of its own: the logits of every position, and what follows."""

    def __init__(self, model, server, transport: str) -> None:
        self.model, self.batch, self.calls = model, undisturbed.batch(), ModuleCalls()
        self._attach = lambda: attach(model, server.address, transport=transport, timeout_seconds=HANG_SECONDS)
        self.ids, self.mask = pad(self.batch, 0)
        with self.attached():
            self.expected = self.request()
            self.calls.begin()
            assert self.agrees(self.request())
        self.number = self.calls.end()

    @contextlib.contextmanager
    def attached(self):
        with self._attach() as self.lora:
            yield

    def request(self):
        with self.lora.adapters([one.adapter for one in self.batch]):
            return self.model(self.ids, attention_mask=self.mask).logits, generate(self.model, self.batch, NEW_TOKENS)

    def agrees(self, found) -> bool:
        return torch.equal(found[0], self.expected[0]) and found[1] == self.expected[1]

    def until_right(self) -> list[str]:
        """The codes of the errors before the first answer, which has to be right."""
        codes = []
        for _ in range(MANY):
            try:
                assert self.agrees(self.request()), codes
                return codes
            except LoraServerError as error:
                assert isinstance(error, OUTAGE), error
                codes.append(error.code)
        raise AssertionError(codes)


@pytest.fixture(scope="module")
def requests(model, server, transport):
    with torch.no_grad():
        return Requests(model, server, transport)


@pytest.mark.parametrize("disturbance", DISTURBANCES, ids=str)
def test_rows_are_those_of_an_undisturbed_run(requests, server, disturbance):
    with requests.attached(), contextlib.ExitStack() as going_on:

        def disturb() -> None:
            going_on.enter_context(disturbance.begin(server))
            if disturbance.seen:
                requests.lora.client.timeout_seconds = SHORT_SECONDS

        requests.calls.begin(disturb, requests.number // 2)
        codes = []
        if disturbance.seen:
            with pytest.raises(OUTAGE) as raised:
                requests.request()
            requests.lora.client.timeout_seconds = HANG_SECONDS
            codes = [raised.value.code]
            going_on.close()
        codes += requests.until_right()
        requests.calls.end()
        assert disturbance.seen is None or bool(codes) == disturbance.seen, codes
        until(lambda: requests.until_right() == [], "requests are answered", HANG_SECONDS)
        going_on.close()
        requests.until_right()
    undisturbed.wait_complete(server)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_death_at_any_moment_of_a_step_changes_no_bit(requests, server, seed):
    death = Death.of(seed, shards=2)
    pid = shard_processes(server.address)[death.shard].pid
    with requests.attached():
        requests.calls.begin(lambda: kill_in(pid, death.seconds), int(death.moment * requests.number))
        codes = requests.until_right()
        requests.calls.end()
        print(death, codes)
        undisturbed.wait_complete(server)
        requests.until_right()
