"""`provision watch`: a running server beside its plan."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from provisioning.cli.console import Json, one_line_errors, progress, say_json
from provisioning.cli.flags import given_by, plan_flags
from provisioning.inputs import InputError, count, positive

if TYPE_CHECKING:
    from provisioning.watch.measured import Measured
    from provisioning.watch.planned import Planned
    from provisioning.watch.scrape import Scrape


def watch(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="File of saved scrapes (default: ask --server).")] = None,
    server: Annotated[str, typer.Option(help="HOST:PORT of the server's --http.")] = "127.0.0.1:7401",
    seconds: Annotated[float, typer.Option(help="Seconds between two scrapes of the server.")] = 10.0,
    record: Annotated[
        Path | None, typer.Option(help="Append one scrape to this file, and use all of the file (default: none).")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="plan.yaml of the server (default: none).")] = None,
    seeds: Annotated[int, typer.Option(help="Simulated seeds for the GPUs needed now, at least 5.")] = 5,
    as_json: Json = False,
    serve: Annotated[
        int, typer.Option(help="Look every --seconds until SIGTERM, and serve Prometheus metrics on this port. 0: not.")
    ] = 0,
    act: Annotated[bool, typer.Option("--act", help="With --serve, run `lora-server resize` for --listen.")] = False,
    listen: Annotated[str, typer.Option(help="With --act, the server's --listen.")] = "127.0.0.1:7400",
    min_gpus: Annotated[int, typer.Option(help="Fewest GPUs to shrink to, of all replicas.")] = 1,
    max_gpus: Annotated[int, typer.Option(help="Most GPUs to grow to, of all replicas. 0: the plan's.")] = 0,
    calm: Annotated[
        float,
        typer.Option(help="Seconds: the server shrinks to the most that was needed in so long; it grows at once."),
    ] = 600.0,
    headroom: Annotated[float, typer.Option(help="Plan for so many times the measured load.")] = 1.1,
) -> None:
    """Compare a running server with its plan; size it for the measured load, now and per hour of a recorded day."""
    with one_line_errors():
        count(seeds, "--seeds", 5, 1000)
        if serve:
            limits = {"least": min_gpus, "most": max_gpus, "calm_s": calm, "headroom": headroom}
            _follow(server, _plan(plan, context.find_root().command), serve, seconds, listen if act else "", limits)
            return
        with progress(shown=not as_json) as say:
            scrapes = _scrapes(file, server, seconds, record, say)
            found = _found(scrapes, _plan(plan, context.find_root().command), seeds, say)
    if as_json:
        say_json(found)
    else:
        from provisioning.watch.said import print_watch

        print_watch(found)


def _follow(server: str, plan: Planned | None, port: int, seconds: float, listen: str, limits: dict[str, Any]) -> None:
    from provisioning.cli import follow
    from provisioning.watch.autoscale import Bounds

    if plan is None:
        raise InputError(
            "--serve: got no --plan, expected the server's plan.yaml; GPUs needed are those of its question"
        )
    count(port, "--serve", 1, 65_535)
    question = plan.candidate.scenario
    most = count(limits["most"] or question.max_gpus - question.spare_gpus, "--max-gpus", 1, 4096)
    least = count(limits["least"], "--min-gpus", 1, most)
    times = {name: positive(limits[name], f"--{name.removesuffix('_s')}") for name in ("calm_s", "headroom")}
    bounds = Bounds(least=least, most=most, **times)
    follow.follow(server, plan, bounds, port, positive(seconds, "--seconds", 3600), listen)


def _scrapes(file: Path | None, server: str, seconds: float, record: Path | None, say: Any) -> list[Scrape]:
    from provisioning.watch import scrape

    if file is not None and record is not None:
        raise InputError("--record: got a file of scrapes, too, expected a server alone; leave one of the two out")
    if file is not None:
        return scrape.read(file)
    say(f"asking {server}")
    first = scrape.fetched(server)
    scrape.parsed(first, f"--server: {server}")
    if record is not None:
        scrape.recorded(record, first)
        return scrape.read(record)
    pause = positive(seconds, "--seconds", 3600)
    say(f"{server} for {pause:g} s")
    time.sleep(pause)
    return scrape.parsed(first + scrape.fetched(server), f"--server: {server}")


def _plan(file: Path | None, command: Any) -> Planned | None:
    from provisioning.watch import planned

    return None if file is None else planned.read(file, lambda arguments: plan_flags(given_by(command, arguments)))


def _found(scrapes: list[Scrape], plan: Planned | None, seeds: int, say: Any) -> dict[str, Any]:
    from provisioning.watch import advice, measured

    seen = measured.between(scrapes)
    if plan is not None:
        plan.check_model(seen.server)
    candidate = None if plan is None else plan.candidate
    found: dict[str, Any] = {
        "scrapes": len(scrapes),
        "seconds": None if len(scrapes) == 1 else seen.seconds,
        "restarts": seen.resets,
        "requests": seen.requests,
        "measured": [asdict(row) | {"factor": row.factor} for row in advice.compared(seen, candidate)],
        "most_called": [{"adapter": name, "requests": seen.holds[name][0]} for name in seen.named[:5]],
        "plan": None if plan is None else {"layout": str(plan.candidate.layout), "command": plan.command},
        "now": None,
        "corrected": None,
        "by_hour": [],
        "next_hour": None,
        "advice": _why_none(scrapes, seen, plan),
    }
    if found["advice"] or candidate is None:
        return found
    say("GPUs now")
    now = advice.now(seen, candidate, seeds, say)
    found["now"] = _plain(now)
    slower = advice.corrected(seen, candidate)
    if slower is not None:
        found["corrected"] = {"compute_factor": slower[0], **_plain(slower[1])}
    hours = measured.by_hour(scrapes) if scrapes[-1].at - scrapes[0].at >= _HOUR else {}
    for hour, one in hours.items():
        say(f"GPUs at {hour:02}:00")
        found["by_hour"].append(
            {"hour": hour, "request_rate": one.rate, "in_flight": one.in_flight}
            | _plain(advice.now(one, candidate, seeds=0))
        )
    found["next_hour"] = _next_hour(scrapes, candidate.slots)
    found["advice"] = _advice(found, candidate.gpus)
    return found


_HOUR = 3600.0


def _next_hour(scrapes: list[Scrape], slots: int) -> dict[str, Any] | None:
    """Say what the next hour was like on other days, and which adapters to load before it; None if none was seen."""
    from provisioning.watch import measured

    hour = measured.next_hour(scrapes)
    usual = measured.usual(scrapes).get(hour)
    if usual is None:
        return None
    return {
        "hour": hour,
        "request_rate": usual.rate,
        "in_flight": usual.in_flight,
        "preload": usual.named[:slots],
    }


def _why_none(scrapes: list[Scrape], seen: Measured, plan: Planned | None) -> str:
    if plan is None:
        return "Give the server's plan (--plan plan.yaml) to see the GPUs that it needs now."
    if len(scrapes) == 1:
        return "A rate needs two scrapes. Run again with the same --record FILE, or ask the server itself."
    if not seen.requests:
        return "No request ended between the scrapes, so there is no load to size for."
    return ""


def _advice(found: dict[str, Any], has: int) -> str:
    hours = [one["gpus"] for one in found["by_hour"]]
    asked = [found["now"]["gpus"], *hours]
    if None in asked:
        return "No LoRA Server within --max-gpus meets the SLOs under what was measured; see binding."
    most = max(asked)
    change = "as planned" if most == has else f"{abs(most - has)} {'more' if most > has else 'fewer'} than planned"
    when = "at the fullest hour" if hours and max(hours) >= found["now"]["gpus"] else "now"
    return f"{most} LoRA Server GPU{'' if most == 1 else 's'} {when}: {change}."


def _plain(one: Any) -> dict[str, Any]:
    return asdict(one) | {"layout": None if one.layout is None else str(one.layout)}
