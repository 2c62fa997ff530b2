"""The Prometheus metrics of `provision watch --serve`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from provisioning.inputs import InputError
from provisioning.watch.autoscale import Look


class LookMetrics:
    """The metrics of the last look, at /metrics of a port."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        text = "GPUs of the LoRA server: `serving`, `needed` now, `peak` of what was needed in a day, `wanted`"
        self._gpus = Gauge("provision_gpus", text, ["what"], registry=self.registry)
        self._immediate = Gauge(
            "provision_immediate_admission", "Share of requests admitted at once", registry=self.registry
        )
        self._margin = Gauge(
            "provision_margin", "GPUs beyond those needed, as a part of these; < 0: too few", registry=self.registry
        )
        self._looks = Counter(
            "provision_looks", "Looks at the server, by how they ended", ["outcome"], registry=self.registry
        )
        self._resizes = Counter("provision_resizes", "Resizes, by how they ended", ["outcome"], registry=self.registry)
        for outcome in ("done", "failed"):
            self._looks.labels(outcome)
            self._resizes.labels(outcome)

    def serve(self, port: int) -> None:
        """Listen; raises InputError."""
        try:
            start_http_server(port, registry=self.registry)
        except OSError as error:
            raise InputError(
                f"--serve {port}: cannot listen there ({error.strerror}); give a port that is free"
            ) from None

    def note(self, look: Look | None) -> None:
        """Show a look; None: the server could not be read, and what was seen last stays."""
        self._looks.labels("failed" if look is None else "done").inc()
        if look is not None:
            for what in ("serving", "needed", "peak", "wanted"):
                self._gpus.labels(what).set(getattr(look, what))
            self._immediate.set(look.immediate)
            self._margin.set(look.margin)

    def note_resize(self, failure: str) -> None:
        """Count a resize."""
        self._resizes.labels("failed" if failure else "done").inc()
