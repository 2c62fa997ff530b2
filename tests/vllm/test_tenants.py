"""docs/vllm.md#tenants: one vLLM for two; a name means each its own adapter, and whoever is nobody gets nothing."""

import pytest

from lora_server.access.identity import Role
from lora_server.demo.launch import running_server
from tests.support.serving import flags
from tests.support.tenants import make_tokens
from tests.support.workload import NEW_TOKENS
from tests.vllm.engines import ApiServer


class Caller:
    """What `ApiServer.request` is, with a token."""

    def __init__(self, api: ApiServer, token: str) -> None:
        self._api, self._token = api, token

    def __call__(self, method: str, path: str, body: dict | None = None):
        return self._api.request(method, path, body, self._token)

    def complete(self, model: str, prompt: list[int]):
        body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True}
        return self("POST", "/v1/completions", body | {"min_tokens": NEW_TOKENS})


@pytest.mark.timeout(900)
def test_one_engine_serves_tenants_apart(load, scratch, tmp_path):
    tokens = make_tokens(tmp_path, "acme", "rival")
    answers = [(one.adapter, one.prompt, its.tokens) for one, its in zip(load.batch, load.expected, strict=True)]
    expected = {name: (prompt, tokens) for name, prompt, tokens in answers if name}
    first, second = sorted(expected)[:2]
    more = ("--data-dir", str(tmp_path), "--layout", "ep2-pp1", "--adapter-root", "/")
    with running_server(scratch / "tenants.log", flags(load, *more)) as server:
        middleware = ("--middleware", "client_connector.vllm.tenants.Tenants")
        shown = {"LORA_SERVER_TOKEN": tokens["", Role.ENGINE]}
        with ApiServer(load.base, server.address, scratch / "api-tenants.log", *middleware, **shown) as api:
            assert api.complete("base", [1, 2], 2)[0] == 401
            for tenant in ("acme", "rival"):
                publisher = Caller(api, tokens[tenant, Role.PUBLISHER])
                body = {"lora_name": "bot", "lora_path": str(load.paths[first if tenant == "acme" else second])}
                code, said = publisher("POST", "/v1/load_lora_adapter", body)
                assert code == 400 and "leads elsewhere" in str(said), "not below its own part of the root"
                code, said = Caller(api, tokens[tenant, Role.ENGINE])("POST", "/v1/load_lora_adapter", body)
                assert code == 403
            admin = Caller(api, tokens["", Role.ADMIN])
            for tenant, name in (("acme", first), ("rival", second)):
                body = {"lora_name": f"{tenant}/bot", "lora_path": str(load.paths[name])}
                code, said = admin("POST", "/v1/load_lora_adapter", body)
                assert code == 200, said
            for tenant, name in (("acme", first), ("rival", second), ("acme", first)):
                prompt, wanted = expected[name]
                engine = Caller(api, tokens[tenant, Role.ENGINE])
                code, answer = engine.complete("bot", prompt)
                assert code == 200, answer
                assert answer["choices"][0]["token_ids"] == wanted and answer["model"] == "bot"
                code, answer = engine.complete(first, expected[first][0])
                assert (code, answer["choices"][0]["token_ids"]) == (200, expected[first][1]), "the operator's, for all"
                assert engine.complete("base", prompt)[0] == 200
                listed = {card["id"] for card in engine("GET", "/v1/models")[1]["data"]}
                assert listed == {"base", f"{tenant}/bot", *load.paths}
                other = "rival" if tenant == "acme" else "acme"
                code, answer = engine.complete(f"{other}/bot", prompt)
                assert code == 404 and f"{other}/bot" not in answer["error"]["message"].partition("known")[2]
