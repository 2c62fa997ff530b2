"""What hosts and kernels share lies at the same places for both."""

from __future__ import annotations

import numpy as np
import pytest

from lora_server.transport.gpu import layout
from tests.support.gpu import emulated, gpu_world

pytestmark = pytest.mark.skipif(bool(emulated.MISSING), reason=emulated.MISSING)
TYPES = {
    "Client": layout.CLIENT,
    "Link": layout.LINK,
    "Entry": layout.ENTRY,
    "Site": layout.SITE,
    "Command": layout.COMMAND,
    "Note": layout.NOTE,
    "Mailbox": layout.MAILBOX,
    "Serve": layout.SERVE,
}


def test_structs_are_the_kernels():
    library = gpu_world.load()
    names, i = [], 0
    while name := library.layout_name(i):
        names.append(name.decode())
        i += 1
    assert len(names) > 30
    for name in names:
        value = library.layout_of(name.encode())
        struct, _, field = name.partition(".")
        if name == "Order":
            assert value == layout.ORDER_BYTES
        elif name == "MAX_LINKS":
            assert value == layout.MAX_LINKS
        elif not field and name != "shared":
            assert value == TYPES[struct].itemsize, name
        elif field:
            assert value == TYPES[struct].fields[field][1], name


def test_handles():
    assert layout.handle_of(3, 7) == 3 | 7 << 16
    assert np.int32(layout.handle_of(65535, layout.MAX_GENERATION)) > 0
    for index, generation in ((1 << 16, 1), (0, 0), (0, 1 << 15)):
        with pytest.raises(ValueError, match=r"expected 16 and 15 bits"):
            layout.handle_of(index, generation)
