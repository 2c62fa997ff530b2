"""docs/sglang.md#tenants: one SGLang for two tenants; a name means each its own adapter, and without a token there is
nothing."""

from lora_server.access.identity import Role
from lora_server.demo.launch import running_server
from tests.sglang.engines import SglangServer
from tests.support.serving import flags
from tests.support.tenants import make_tokens
from tests.support.workload import NEW_TOKENS

OTHER = {"acme": "rival", "rival": "acme"}


def test_one_engine_serves_tenants_apart(load, tmp_path):
    answers = {one.adapter: (one.prompt, its.tokens) for one, its in zip(load.batch, load.expected, strict=True)}
    first, second = sorted(name for name in answers if name)[:2]
    tokens = make_tokens(tmp_path, *OTHER)
    more = ("--data-dir", str(tmp_path), "--layout", "ep2-pp1", "--adapter-root", "/")
    shown = {"LORA_SERVER_TOKEN": tokens["", Role.ENGINE], "LORA_SERVER_TENANTS": "true"}
    with (
        running_server(tmp_path / "server.log", flags(load, *more)) as server,
        SglangServer(load.base, server.address, tmp_path / "engine.log", **shown) as engine,
    ):

        def post(token: str, path: str, **body: object):
            return engine.request("POST", path, body, token)

        def complete(token: str, model: str, prompt: list[int], **body: object):
            body |= {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            return post(token, "/v1/completions", model=model, prompt=prompt, **body)

        assert complete("", "base", [1, 2])[0] == complete("ls_wrong", "base", [1, 2])[0] == 401
        for role in (Role.ADMIN, Role.ENGINE):
            assert complete(tokens["", role], "base", [1, 2], rid="mine")[0] == 200, "the operator's own router"
        admin = tokens["", Role.ADMIN]
        for tenant, name in zip(OTHER, (first, second), strict=True):
            path = str(load.paths[name])
            code, said = post(tokens[tenant, Role.PUBLISHER], "/load_lora_adapter", lora_name="bot", lora_path=path)
            assert code == 400 and "leads elsewhere" in str(said), "not below its own part of the root"
            assert post(tokens[tenant, Role.ENGINE], "/load_lora_adapter", lora_name="bot", lora_path=path)[0] == 403
            code, said = post(admin, "/load_lora_adapter", lora_name=f"{tenant}/bot", lora_path=path)
            assert code == 200, said
        for tenant, name in (("acme", first), ("rival", second), ("acme", first)):
            prompt, wanted = answers[name]
            token, other = tokens[tenant, Role.ENGINE], OTHER[tenant]
            same = generated(engine, admin, prompt, name)
            assert same["output_ids"] == wanted
            for said in ({"model": "bot"}, {"model": "base", "lora_path": "bot"}):
                code, answer = complete(token, prompt=prompt, **said)
                assert code == 200, answer
                assert answer["model"] == said["model"]
                assert answer["choices"][0]["text"] == same["text"], "its own"
            code, answer = complete(token, first, answers[first][0])
            assert code == 200, "the operator's, for all"
            assert complete(token, "base", prompt)[0] == 200
            listed = {card["id"] for card in engine.request("GET", "/v1/models", token=token)[1]["data"]}
            assert listed == {"base", f"{tenant}/bot", *load.paths}
            for stolen, status in ((f"{other}/bot", 404), (f"{other}|bot", 400)):
                for said in ({"model": stolen}, {"model": "base", "lora_path": stolen}):
                    code, answer = complete(token, prompt=prompt, **said)
                    assert code == status and f"{other}/bot" not in str(answer).partition("known")[2], answer
            for more in ({"rid": "a"}, {"priority": 1}, {"stop_regex": "(.+)+x"}):
                code, answer = complete(token, "bot", prompt, **more)
                assert code == 403 and f"{next(iter(more))}: not for tenants" in str(answer)
            for path in ("/generate", "/abort_request", "/v1/responses", "/freeze_gc"):
                code, answer = post(token, path, rid="", text="hello", lora_path=f"{other}|bot")
                assert code == 403 and "not for tenants" in str(answer)
        code, answer = post(tokens["acme", Role.PUBLISHER], "/unload_lora_adapter", lora_name="bot")
        assert code == 200, answer
        assert complete(tokens["acme", Role.ENGINE], "bot", answers[first][0])[0] == 404
        assert complete(tokens["rival", Role.ENGINE], "bot", answers[second][0])[0] == 200


def generated(engine, admin: str, prompt: list[int], name: str) -> dict:
    """What the operator gets from its adapter of the same weights."""
    body = {"input_ids": prompt, "lora_path": name}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    code, answer = engine.request("POST", "/generate", body, admin)
    assert code == 200, answer
    return answer
