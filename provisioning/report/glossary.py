"""The words of a plan, each in a sentence."""

from __future__ import annotations

POINTER = "What immediate admission, M*, Eq. 5, visible load and the other words mean: `provision glossary`."

TERMS = {
    "adapter slots, M": "What a cache holds at once: the LoRA Server's, which all instances share, or an instance's.",
    "band": "The same plan, were steps and outputs 20 % longer or shorter than assumed.",
    "binding constraint": "What asks for the GPUs: with fewer, this is the first thing to fail.",
    "coupled": "No LoRA Server: every instance holds adapters beside its weights and KV cache, as S-LoRA and vLLM do.",
    "Eq. 5": "Receive + compute + send of a layer's LoRA step fit beside the base layer (SLO_FFN): it is hidden.",
    "Eq. 6": "The slowest of these three (or of the transport's phases), for all instances and with their prompts, "
    "fits a layer's time (SLO_Layer): the server keeps up.",
    "epX-ppY": "The server's layout: experts over X GPUs, layers over Y stages.",
    "headroom": "By how much the load may grow before the plan fails, by the model.",
    "hot-merged": "The hottest adapters are merged into the weights of instances that serve nothing else.",
    "immediate admission": "The share of requests whose adapter has a slot, or gets one, when they come (IAR; --iar).",
    "merged base": "The hottest adapter is in the base weights of every instance; the LoRA Server has the others.",
    "LB": "Requests in flight in all: L instances of B each; with a rate, by Little's law.",
    "M*": "The fewest slots whose immediate admission reaches the target, by the model `offered`.",
    "peak": "The fullest window of a trace, which the plan is sized for.",
    "prefill": "Computing the prompt. Shared: by the instances that decode, so it is in TPOT, Eq. 5 and Eq. 6; apart: "
    "by others. In neither case is a request's own in its TTFT.",
    "SLO class": "Adapters that share an SLO and a target of their own (--classes).",
    "TPOT": "Time per output token: a decode step, on average, with its share of prompts.",
    "TTFT": "Time to first token: queueing, the load that shows, and the first decode step.",
    "transport": "Transport of rows, by its name in the product: it sets the link, its driver, and what overlaps.",
    "visible load": "What of an adapter's load no step hides: layer 0, or what all of it takes longer than a step.",
    "8-bit wire": "Rows to and from the server with 8 bits each in place of 16: half the bytes on the links.",
}
