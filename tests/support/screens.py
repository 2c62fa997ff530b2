"""Commands' output, kept as files beside their tests: screens/NAME.txt. LORA_SERVER_SCREENS=write writes them anew;
read the difference before you commit it."""

from __future__ import annotations

import os
from pathlib import Path


def check_screen(test: str, name: str, shown: str) -> None:
    """`test` is the __file__ of the test; lines are compared as they are, blanks at their ends included."""
    file = Path(test).parent / "screens" / f"{name}.txt"
    if os.environ.get("LORA_SERVER_SCREENS") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(shown)
    assert shown == file.read_text(), f"{file}; LORA_SERVER_SCREENS=write writes what is shown now"
