"""What the planner says that a merged base costs, against messages that the connector makes for drawn rows."""

import pytest
import torch

from client_connector.merged import row_segments
from client_connector.routing import Batch, Run, route_experts
from lora_server.spec import Site, load
from lora_server.wire.terms import Held
from provisioning.plan.fronts import merge_cost

ROWS, OTHERS, MOST = 400, 4, 64
SPEC = load("mixtral-8x7b")
SITE = Site(0, "gate_up")
HOT, *COLD = (Held(f"a{handle}", handle, frozenset({SITE}), f"digest{handle}") for handle in range(1, 2 + OTHERS))


def counted(of_hot, of_base, merged):
    """Entries and bytes of ROWS rows at an expert site of one shard, in messages of MOST entries."""
    of_rows = [HOT] * of_hot + [None] * of_base
    of_rows += [COLD[row % OTHERS] for row in range(ROWS - len(of_rows))]
    dice = torch.Generator().manual_seed(1)
    order = torch.randperm(ROWS, generator=dice).tolist()
    segments = [row_segments(of_rows[row], HOT if merged else None) for row in order]
    batch = Batch.of([Run(one, row, 1) for row, one in enumerate(segments) if one], decode=False)
    experts_Tk = torch.rand(ROWS, SPEC.experts, generator=dice).topk(SPEC.top_k).indices
    messages = route_experts(batch, experts_Tk, torch.zeros(SPEC.experts, dtype=torch.int64), MOST)
    entries = sum(int(message.segments_S4[:, 3].sum()) for message in messages)
    wide = sum(len(one.rows_M) * SPEC.in_width(SITE) + len(one.pairs_P) * SPEC.out_width(SITE) for one in messages)
    return entries, 2 * wide


@pytest.mark.parametrize("of_base", [0, 40, 200])
@pytest.mark.parametrize("of_hot", [0, 96, 200])
def test_the_cost_of_a_merged_base_is_what_its_messages_carry(of_hot, of_base):
    before, after = (counted(of_hot, of_base, merged) for merged in (False, True))
    cost = merge_cost(of_hot / ROWS, of_base / ROWS)
    assert cost.compute == pytest.approx(after[0] / before[0])
    assert cost.wire == pytest.approx(after[1] / before[1])
    for factor, excess in ((cost.compute, of_hot - ROWS / 2), (cost.wire, of_hot - of_base)):
        assert factor == pytest.approx(1) if excess == 0 else (factor < 1) == (excess > 0)
