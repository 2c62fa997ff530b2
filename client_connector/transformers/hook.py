"""attach(): the one module that imports transformers.

Nothing of the user's model changes but its experts implementation (transformers' own switch) and
forward hooks, all undone by `detach`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import structlog
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from client_connector.client import Client
from client_connector.exchange import GemmTimes, StepTimes
from client_connector.forward_pass import ForwardPass
from client_connector.geometry import check_geometry
from client_connector.merged import MergedHold, row_segments
from client_connector.packing import DTYPE_CODES
from client_connector.remote import RemoteServer
from client_connector.routing import Batch, Run
from client_connector.transformers.batch import expand
from client_connector.transformers.dense import DenseSite
from client_connector.transformers.experts import experts_forward
from client_connector.transformers.held import BlockAdapters
from client_connector.transformers.invocation import Invocations, tokenizer_of
from lora_server import telemetry
from lora_server.errors import ConfigError
from lora_server.merged import find_merged
from lora_server.spec import Site
from lora_server.wire.credentials import Credentials
from lora_server.wire.terms import Held

IMPLEMENTATION = "remote_lora"
ADMITTED, LOADED = WAITS = "admitted", "loaded"
log = structlog.get_logger()
_DENSE_MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# experts module -> (forward, layer, the implementation that was there before)
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, tuple[ForwardPass, int, Callable[..., torch.Tensor]]]
_ATTACHED = weakref.WeakKeyDictionary()


def _dispatch(module: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run an experts module of an attached model; transformers calls this."""
    attached = _ATTACHED.get(module)
    if attached is None:  # a copy of an attached model, say: not ours
        original: Callable[..., torch.Tensor] = type(module).forward.__wrapped__
        return original(module, hidden_states, *args, **kwargs)
    forward, layer, previous = attached
    if forward.batch is None:
        return previous(module, hidden_states, *args, **kwargs)
    top_k_index, top_k_weights = (*args, *kwargs.values())
    return experts_forward(forward, layer, module, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _dispatch)


class Attachment:
    """A model connected to a server, until `detach` or the end of the `with` block.

        with attach(model, server="127.0.0.1:7400") as lora:
            with lora.adapters(["law", None, "code"]):      # one name per sequence; None = base model
                model.generate(input_ids, ...)

    server: HOST:PORT, or anything with `join()` (client_connector.session.Server). `wire`: any, or the one
    that it must have. `token`: what the server is shown; without it, what
    LORA_SERVER_TOKEN or LORA_SERVER_TOKEN_FILE says.
    Outside `adapters` the model is the plain base model, also one with an adapter merged into its weights
    (lora_server.merged), which then needs the server. Beams and num_return_sequences repeat
    their sequence's adapter. An activated LoRA acts from its invocation in the prompt on; one with a
    legacy invocation string needs `tokenizer`. Raises GeometryMismatchError, ConfigError, ServerUnavailableError.
    """

    def __init__(
        self,
        model: Any,
        server: Any,
        *,
        transport: str = "auto",
        wire: str = "any",
        timeout_seconds: float = 30.0,
        tokenizer: Any = None,
        token: str = "",
        slo_class: str = "",
    ) -> None:
        if "generate" in vars(model) or getattr(model.config, "_experts_implementation", None) == IMPLEMENTATION:
            raise ConfigError("attach: this model is attached already; detach it first")
        _check_tensors(model)
        self._undo = contextlib.ExitStack()
        self._detached = False
        self._block: BlockAdapters | None = None  # of the `adapters` block under way
        self._merged: MergedHold | None = None
        self._copies = 1
        self._invocations = Invocations(tokenizer_of(tokenizer))
        self._model = model
        device = str(next(model.parameters()).device)
        shown = Credentials.of(os.environ, token)
        record = find_merged(model.name_or_path) if model.name_or_path else None
        joinable = server
        if isinstance(server, str):
            joinable = RemoteServer(
                server,
                transport,
                device=device,
                wire=wire,
                credentials=shown,
                slo_class=slo_class,
                merged="" if record is None else record.version,
            )
        self.client = Client(joinable, timeout_seconds)
        self._undo.callback(self.client.close)
        try:
            self._forward = ForwardPass(self.client)
            check_geometry(model.config.to_dict(), self.client.terms.spec)
            if record is not None:
                self._merged = MergedHold(self.client, record)
            self._install()
        except BaseException:
            self._undo.close()
            raise
        log.info("attached to the LoRA server", **self.client.described())

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """Return itself: copies of an attached model keep its hooks, which then see that they are not on the model."""
        return self

    def detach(self) -> None:
        """Undo everything and leave the server; idempotent."""
        self._detached = True
        self._undo.close()

    def observe(
        self,
        steps: Callable[[StepTimes], None] | None,
        gemms: Callable[[GemmTimes], None] | None = None,
    ) -> None:
        """Call back with the times of every message, and of the engine's own GEMMs."""
        self.client.observe, self._forward.observe_gemm = steps, gemms

    @contextlib.contextmanager
    def adapters(self, names: Sequence[str | None], wait: str = ADMITTED) -> Iterator[None]:
        """Set the adapters of batches that run inside: one name per sequence, or None for the base model.

        `wait`: the block begins when the adapters are `admitted`, and its first pass computes each layer as its weights
        come; or when they are `loaded`. Raises UnknownAdapterError at once for a name that the server does not have.
        """
        if wait not in WAITS:
            raise ConfigError(f"lora.adapters: got wait={wait!r}, expected one of {', '.join(WAITS)}")
        if isinstance(names, str) or not all(name is None or isinstance(name, str) for name in names):
            raise ConfigError(f"lora.adapters: got {names!r}, expected a list with a name or None per sequence")
        if self._block is not None:
            raise ConfigError("lora.adapters: already inside another lora.adapters(...) block of this model")
        if self._detached:
            raise ConfigError("lora.adapters: this model was detached from the server; attach it again")
        with telemetry.span("lora.generation", sequences=len(names)):
            block = BlockAdapters(self.client, names, wait == LOADED, self._merged)
            block.hold()
            self._block = block
            try:
                yield
            finally:
                self._block = None
                block.release()

    # -- hooks

    def _install(self) -> None:
        model, forward = self._model, self._forward
        base = model.base_model
        self._undo.callback(base.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
        self._undo.callback(base.register_forward_hook(self._after_forward, always_call=True).remove)
        for layer, block in enumerate(base.layers):
            self._install_layer(forward, layer, block)
        if self.client.terms.spec.moe_layers:
            previous = model.get_experts_implementation()
            model.set_experts_implementation(IMPLEMENTATION)
            self._undo.callback(model.set_experts_implementation, previous)
        model.generate = functools.partial(self._generate, type(model).generate.__get__(model))
        self._undo.callback(vars(model).pop, "generate", None)

    def _install_layer(self, forward: ForwardPass, layer: int, block: nn.Module) -> None:
        spec = self.client.terms.spec
        for projection, names in _DENSE_MODULES.items():
            site = Site(layer, projection)
            if spec.is_dense(site):
                modules = [block.get_submodule(name) for name in names]
                dense = DenseSite(forward, site, modules, spec.sections(site))
                for handle in dense.install():
                    self._undo.callback(handle.remove)
        if layer in spec.moe_layers:
            experts = block.get_submodule("mlp.experts")
            original = type(experts).forward.__wrapped__  # type: ignore[attr-defined]
            implementation = self._model.config._experts_implementation
            _ATTACHED[experts] = (forward, layer, ALL_EXPERTS_FUNCTIONS.get_interface(implementation, original))
            self._undo.callback(_ATTACHED.pop, experts, None)

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        positional = args[1] if len(args) > 1 else None
        config = kwargs.get("generation_config") or positional or self._model.generation_config

        def setting(name: str) -> int:
            value = kwargs.get(name)
            return int(value if value is not None else getattr(config, name, None) or 1)

        self._copies = max(setting("num_beams"), setting("num_return_sequences"))
        try:
            return generate(*args, **kwargs)
        finally:
            self._copies = 1

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not self._model.base_model:
            return  # a copy of the attached model is a plain base model
        self._forward.batch = None
        block = self._block
        if block is None and self._merged is None:
            return
        if self._model.training:
            raise ConfigError(
                "lora.adapters: the model is in training mode; deltas have no gradients: call model.eval()"
            )
        ids = kwargs.get("input_ids")
        ids = args[0] if ids is None and args else ids
        inputs = ids if ids is not None else kwargs["inputs_embeds"]
        rows, seq_len = inputs.shape[:2]
        if block is None:
            block = BlockAdapters(self.client, [None] * rows)
        per_name = expand(block.names, rows, seq_len, self._copies if self._block is not None else 1) // seq_len
        by_name = block.hold()
        held_B = [by_name[name] if name is not None else None for name in block.names for _ in range(per_name)]
        starts = self._invocations.starts(held_B, kwargs, ids, seq_len)
        self._forward.batch = Batch.of(
            self._runs(held_B, starts, seq_len), seq_len == 1, _not_padding(kwargs.get("attention_mask"), seq_len)
        )

    def _runs(self, held_B: Sequence[Held | None], starts: Sequence[int], seq_len: int) -> list[Run]:
        """Return the rows that need the server: of adapters, from where these act on, and of what is merged."""
        merged = self._merged
        subtracted = None
        if merged is not None:
            is_hot = all(held is merged.in_weights for held in held_B)
            subtracted = merged.in_weights if is_hot else merged.held(self.client.deadline())
        runs = []
        for row, (held, start) in enumerate(zip(held_B, starts, strict=True)):
            runs.append(Run(row_segments(None, subtracted), row * seq_len, start))
            runs.append(Run(row_segments(held, subtracted), row * seq_len + start, seq_len - start))
        return [run for run in runs if run.segments]

    def _after_forward(self, module: nn.Module, *ignored: Any) -> None:
        if module is self._model.base_model:
            self._forward.batch = None


def _not_padding(mask: Any, seq_len: int) -> torch.Tensor | None:
    """Return [B * S] bool from a 2-D padding mask; None without one, or with a custom 4-D mask."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return None
    return mask[:, -seq_len:].reshape(-1).bool().cpu()


def _check_tensors(model: Any) -> None:
    parameter = next(model.parameters())
    if parameter.device.type not in ("cpu", "cuda") or parameter.dtype not in DTYPE_CODES:
        raise ConfigError(
            f"attach: got a {parameter.dtype} model on {parameter.device}, expected float32, bfloat16 or float16 "
            "on the CPU or a GPU"
        )
