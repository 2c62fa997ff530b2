"""docs/paper.md says what its CSVs say."""

import pytest

from bench import paper_measured, paper_more, paper_page
from bench.provision_setups import CLUSTER
from lora_server.placement import Layout
from tests.support.sources import ROOT


def test_the_page_is_that_of_the_committed_figures():
    assert (ROOT / "docs/paper.md").read_text() == paper_page.page(ROOT / "docs/img"), "run make paper"


def test_an_ablated_step_is_the_sum_of_its_parts_and_the_full_one_is_the_servers():
    full = paper_more.AblatedSetup(model="mixtral-8x7b", instances=1, layout=Layout(2, 1), adapters=256, slots=104)
    ablated = paper_more.replace(full, overlaps=False, by_layer=False, kernel=2.0)
    plain = paper_more.Setup(model="mixtral-8x7b", instances=1, layout=Layout(2, 1), adapters=256, slots=104)
    assert full.system().step_s == pytest.approx(plain.system().step_s)
    assert ablated.system().step_s[8] > full.system().step_s[8]
    assert ablated.system().load_s > full.system().load_s > 0
    assert ablated.cluster == CLUSTER


def test_the_interval_of_a_measured_share_is_wilsons():
    assert paper_measured.wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    low, high = paper_measured.wilson(1.0, 16)
    assert low == pytest.approx(0.806, abs=1e-3) and high == 1.0
