"""Every row that a vLLM engine gets through an outage is, bit by bit, that of an undisturbed run; what it does not get
is a typed error. Requests start over in batches of other shapes, so engine and shards compute each row by itself."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from client_connector.serving.plan import parse_flag
from tests.support import undisturbed
from tests.support.serving import HANG_SECONDS, shard_processes, until
from tests.support.undisturbed import DISTURBANCES, SEEDS, Death
from tests.vllm.engines import ROOT, Engine

NEW_TOKENS = 10
FORWARD = "llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager.forward"
SHORT_SECONDS = 2.0  # of a step, where a shard stands still
TYPED = ("shard_unavailable", "step_timeout", "server_unavailable")


@pytest.fixture(scope="module", params=undisturbed.TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def server(load, transport, tmp_path_factory):
    """Kernels compute rows apart anyway."""
    folder = tmp_path_factory.mktemp(transport)
    with undisturbed.serving(load, transport, folder, "tests.support.rows_apart_serve") as running:
        yield running


class Requests:
    """One batch of an engine, and what its requests get undisturbed."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.batch = engine, undisturbed.batch()
        self.expected = self.finish(self.add())
        engine.call("strike")
        assert self.finish(self.add()) == self.expected
        self.number = engine.call("strike")

    def limit(self, seconds: float) -> None:
        """What a step may take from now on; kernels that wait by themselves are told by `set_budget`."""
        tell = f"getattr(getattr({FORWARD}.sites, 'links', None), 'set_budget', bool)()"
        told = f"setattr({FORWARD}.client, 'timeout_seconds', {seconds}), {tell}"
        self.engine.call("evaluate", expression=f"({told})[0]")

    def add(self) -> list[str]:
        return [self.engine.add(one.prompt, one.adapter, NEW_TOKENS) for one in self.batch]

    def finish(self, names: list[str]) -> list[dict]:
        answers = self.engine.call("step", count=0)
        return [answers[name] for name in names]


@pytest.fixture(scope="module")
def requests(load, server, transport, scratch):
    environment = {"LORA_SERVER_TRANSPORT": transport, "LORA_SERVER_TIMEOUT_SECONDS": str(HANG_SECONDS)}
    environment |= {"LORA_SERVER_TEST_ROWS_APART": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"LORA_SERVER_TEST_GPU": "1"} if transport == "gpu" else {}
    dtype = "bfloat16" if transport == "gpu" else "float32"
    log = scratch / f"undisturbed-{transport}.log"
    with Engine(load.base, server.address, log, environment, dtype=dtype) as engine:
        yield Requests(engine)


def test_a_row_does_not_depend_on_the_rows_beside_it(requests):
    """What the other tests suppose: alone, and computed anew from its own text, a request gets the same bits."""
    for one, together in zip(requests.batch, requests.expected, strict=True):
        (alone,) = requests.engine.generate([one], NEW_TOKENS)
        assert alone == together, one
    for seen in ("tokens", "logprobs"):
        answers = [tuple(answer[seen]) for answer in requests.expected]
        assert len(set(answers)) >= len(answers) - 1, "each adapter acts; one aLoRA has the same words after its text"


@pytest.mark.parametrize("disturbance", DISTURBANCES, ids=str)
def test_rows_are_those_of_an_undisturbed_run(requests, server, disturbance):
    engine = requests.engine
    if disturbance.seen:
        requests.limit(SHORT_SECONDS)
    names, earlier = requests.add(), len(engine.log.read_text())
    engine.call("step", count=4)
    with ThreadPoolExecutor(1) as pool:
        with disturbance.begin(server):
            finished = pool.submit(requests.finish, names)
            if disturbance.seen:
                until(lambda: "adapter rows failed" in engine.log.read_text()[earlier:], "it is seen", HANG_SECONDS)
            else:
                assert finished.result() == requests.expected
                assert requests.finish(requests.add()) == requests.expected
        assert finished.result() == requests.expected
    requests.limit(HANG_SECONDS)
    assert requests.finish(requests.add()) == requests.expected
    undisturbed.wait_complete(server)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_death_at_any_moment_of_a_step_changes_no_bit(requests, server, seed):
    death, engine = Death.of(seed, shards=2), requests.engine
    pid = shard_processes(server.address)[death.shard].pid
    engine.call("strike", call=int(death.moment * requests.number), pid=pid, seconds=death.seconds)
    answers = requests.finish(requests.add())
    codes = [parse_flag(one["stop_reason"])[1] for one in answers if one["finish_reason"] == "error"]
    print(death, codes)
    for one, answer, expected in zip(requests.batch, answers, requests.expected, strict=True):
        assert answer == expected or (one.adapter is not None and answer["finish_reason"] == "error"), one
    assert set(codes) <= set(TYPED)
    undisturbed.wait_complete(server)
    assert requests.finish(requests.add()) == requests.expected
