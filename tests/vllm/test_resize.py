"""vLLM while its server is resized: its worker goes over between two steps, and no request notices."""

import json
from concurrent.futures import ThreadPoolExecutor

from tests.support.serving import cli, status
from tests.vllm.engines import ApiServer, serve, tokens

LONG = 100


def test_requests_go_on_while_the_server_is_resized_to_and_fro(load, kind, scratch):
    prompt = load.batch[0].prompt
    with serve(load, f"{kind}-resize", scratch) as server:
        with ApiServer(load.base, server.address, scratch / "resize.log") as api:
            calm = tokens(api.complete("fused", prompt, LONG)[1])
            for layout in ("ep1-pp1", "ep2-pp2"):
                with ThreadPoolExecutor(1) as pool:
                    asked = pool.submit(cli, "resize", "--layout", layout, "--server", server.address, "--json")
                    answered = []
                    while not asked.done():
                        answered.append(api.complete("fused", prompt, LONG))
                done = asked.result()
                assert done.returncode == 0, done.stderr
                reply = json.loads(done.stdout)
                assert (reply["moved"], reply["ended"]) == (2, 0), "the worker, and the scheduler, which pushes no step"
                assert status(server.address).layout == layout
                answered.append(api.complete("fused", prompt, LONG))
                assert all((code, tokens(answer)) == (200, calm) for code, answer in answered)
