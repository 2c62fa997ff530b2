"""The names in use follow the holds, as if they were collected anew."""

import random
from collections import Counter

from lora_server.control.admission.names import NamesInUse

NAMES = {1: "acme/law", 2: "acme/law", 3: "acme/code", 4: "law", 5: "rival/law"}  # two versions of one


def test_a_tenants_names_in_use_are_those_of_versions_that_are_held():
    dice, held = random.Random(7), Counter()
    names = NamesInUse(NAMES.get)
    for _ in range(2000):
        handle = dice.choice(list(NAMES))
        more = dice.choice([1, 2, -1]) if held[handle] else 1
        held[handle] = max(0, held[handle] + more)
        names.changed(handle, more)
        for tenant in ("acme", "rival"):
            own = {name for one, name in NAMES.items() if held[one] and name.startswith(f"{tenant}/")}
            assert names.of(tenant) == own
    assert names.of("nobody") == set()
