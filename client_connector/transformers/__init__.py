"""The transformers connector: `attach(model, server=...)`.

hook       the one module that imports transformers
batch      from names to rows
held       the adapters of one block
invocation activated LoRAs: where they begin to act
experts    an experts implementation that overlaps its GEMMs with the server's
dense      hooks on attention projections and dense MLPs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client_connector.transformers.hook import Attachment

__all__ = ["attach"]


def attach(
    model: Any,
    server: Any,
    *,
    transport: str = "auto",
    wire: str = "any",
    timeout_seconds: float = 30.0,
    tokenizer: Any = None,
    slo_class: str = "",
) -> Attachment:
    """Connect a transformers model to a LoRA server; see `hook.Attachment`."""
    from client_connector.transformers.hook import Attachment

    return Attachment(
        model,
        server,
        transport=transport,
        wire=wire,
        timeout_seconds=timeout_seconds,
        tokenizer=tokenizer,
        slo_class=slo_class,
    )
