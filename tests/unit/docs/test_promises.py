"""What pages promise to an operator is held by tests; figures that they repeat are the code's and the benches'."""

import re

import pytest

from lora_server.spec import PRESETS
from tests.support.sources import ROOT, TEXTS, names_in

# a page and a sentence of it, and below it the test that would fail if it were not so
PROMISES = re.findall(
    r"^(\S+): (.+)\n  (\S+):(\w+)$",
    """
memory.md: With `--data-dir` or `--registry` it outlives the server
  tests/served/test_registry_served.py:test_what_was_added_is_there_after_any_death_pins_and_handles_too
install.md: Nodes need no directory in common
  tests/served/test_nodes.py:test_all_that_node_0_has_is_served_and_fetched_once
adapters.md: Nodes need no directory in common
  tests/served/test_nodes.py:test_all_that_node_0_has_is_served_and_fetched_once
vllm.md: New content under a name: [`lora-server adapters update`]
  tests/served/test_registry_served.py:test_an_update_is_switched_while_requests_go_on_and_can_be_taken_back
vllm.md: in which dtype vLLM computes
  tests/vllm/test_serve_vllm.py:test_what_it_prints_works_and_nothing_is_left
vllm.md: it ends, and its last line says what is wrong
  tests/vllm/test_failures.py:test_a_start_without_a_server_ends_with_one_line
tuning.md: after a start, a shard's restart or an eviction
  tests/unit/memory/test_memory.py:test_policies_evict_what_they_value_least_and_no_more_than_needed
security.md: lora-server tokens create --role admin --data-dir
  tests/unit/access/test_access.py:test_the_first_token_is_made_beside_the_database
operations.md: `/readyz`, whose 503 says why
  tests/unit/access/test_access_table.py:test_an_unauthenticated_caller_learns_only_whether_it_serves
operations.md: A call that is refused leaves one line
  tests/unit/access/test_access_database.py:test_changes_and_refusals_are_audited_and_each_tenant_reads_its_own
operations.md: an older one says that it does not
  tests/unit/control/test_control.py:test_other_files_and_newer_schemas_are_left_alone_and_nothing_stays_open
operations.md: Start the same command on another host
  tests/served/test_nodes.py:test_another_host_takes_the_rank_of_a_dead_node
operations.md: Shards of other nodes served on meanwhile, and find it again
  tests/served/test_outages.py:test_a_node_0_that_is_started_anew_finds_the_shards_of_the_others
operations.md: Callers see slower answers and no error
  tests/served/test_nodes.py:test_a_drained_node_is_restarted_under_load_and_no_request_fails
operations.md: or name it in `--data-dir`
  tests/served/test_upgrade.py:test_engines_move_to_a_second_server_and_no_request_fails
operations.md: Callers see nothing.
  tests/served/test_upgrade.py:test_engines_move_to_a_second_server_and_no_request_fails
""",
    re.MULTILINE,
)


@pytest.mark.parametrize(("page", "sentence", "path", "test"), PROMISES)
def test_a_promise_stands_and_a_test_holds_it(page, sentence, path, test):
    assert sentence in " ".join(TEXTS[f"docs/{page}"].split())
    assert test in names_in(path)


def test_no_page_installs_from_an_index_that_does_not_have_it():
    assert [page for page, text in TEXTS.items() if re.search(r"\blora-server\[|pip install lora-server", text)] == []


def test_the_size_of_an_adapter_is_that_of_provision_models():
    models = [one for one in PRESETS.values() if one.name != "small-mixtral"]
    sizes = [one.adapter_bytes(64, shared_a=shared) / 2**30 for one in models for shared in (True, False)]
    for page in ("README.md", "docs/decide.md"):
        assert f"{min(sizes):.1f} to {max(sizes):.1f} GiB" in TEXTS[page], page
        assert not re.search(r"\b1 ?(-|to) ?[26] GB", TEXTS[page])


def test_a_token_s_latency_by_transport_is_what_the_benches_found():
    """A round trip at each of 128 sites, of the one way that the table above has for 16 KB."""
    page = TEXTS["docs/tuning.md"].partition("## The way to the shards")[2].partition("\n### Encryption")[0]
    idle, busy, tls = ((ROOT / f"bench/results/{name}cpu-2026-11.md").read_text() for name in ("", "pull-", "tls-"))
    one_way = re.findall(r"^\| ([\d,]+) \| ([\d.]+) \| ([\d.,]+), ([\d.,]+) \|$", page, re.MULTILINE)
    assert [size for size, *_ in one_way] == ["16,384", "262,144", "4,194,304"]
    for size, shm, *tcp in one_way:
        assert re.search(rf"^\| {size} \| [\d.]+ \| {shm} \(", idle, re.MULTILINE)
        assert re.search(rf"^\| {size} \| .* \| {', '.join(tcp)} \| [^|]+ \|$", busy, re.MULTILINE)
    _, shm, *tcp = one_way[0]
    slower = float(re.search(r"^\| 16,384 \| .* \| ([\d.]+)x \|", tls, re.MULTILINE)[1])
    mean = sum(map(float, tcp)) / 2
    expected = [128 * 2 * us / 1000 for us in (float(shm), mean, mean * slower)]
    written = re.findall(r"^\| [^|]+ \| ([\d.]+) ms \|$", page, re.MULTILINE)
    assert [float(one) for one in written] == [round(expected[0], 1), *map(round, expected[1:])]
    assert f"{written[0]} ms by shared memory, {written[1]} ms by TCP for 128 sites" in TEXTS["docs/faq.md"]
