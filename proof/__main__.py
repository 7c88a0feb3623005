"""
Prove it: run the workloads under faults, and judge what their history shows.

    python -m proof [--minutes 2] [--seed 7] [--server cluster] [--keep FOLDER]
    python -m proof --simulate [--minutes 2] [--seed 7] [--keep FOLDER]
    python -m proof --controls [--simulate] [--only NAME] [--minutes 2]
    python -m proof --replay FILE
    python -m proof --peers [--minutes 2] [--seed 7] [--keep FOLDER]
    python -m proof --page docs/inside/proof.md

With --record what comes of it is added to the results that the page is made of.
"""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import click

from proof import results
from proof.controls import CONTROLS, RUN, SIMULATION
from proof.leases import PROMISES as LEASES
from proof.page import render
from proof.peers import compare
from proof.run import run
from proof.servers import KINDS
from proof.simulation import Script, catch, simulate
from tests.acceptance.rabbitmq import find_rabbitmq
from tests.redis_server import ServerMissing, find_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from proof.checker import Verdict

    Noted = Callable[..., None]  # keeps a result, or does not

SHOWN = 5  # violations of each promise
NO_BROKER = (
    "This needs RabbitMQ: install rabbitmq-server, which brings epmd. Without one, `make proof` "
    "tries the locks alone; --simulate needs no server."
)


def _write_page(_context: click.Context, _option: click.Parameter, page: Path | None) -> None:
    if page is not None:
        page.write_text(render(results.read()), "utf-8")
        raise SystemExit(0)


def _replay(_context: click.Context, _option: click.Parameter, file: Path | None) -> None:
    if file is not None:
        broken = Script.read(file).replay(click.echo)
        click.echo(broken or "No promise was broken.")
        raise SystemExit(bool(broken))


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.1), default=2.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Decides the faults.")
@click.option("--server", type=click.Choice(list(KINDS)), default="redis", show_default=True)
@click.option("--controls", is_flag=True, help="Break the lock on purpose, in each way.")
@click.option("--only", type=click.Choice(list(CONTROLS)), help="One of the controls.")
@click.option("--peers", is_flag=True, help="Compare with other libraries.")
@click.option("--previous", default="", help="Deploy this revision, and undo it.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the history in this folder.")
@click.option("--simulate", "simulates", is_flag=True, help="Run scripts and clients in here.")
@click.option("--record", is_flag=True, help="Add the result to those of the page.")
@click.option(
    "--page",
    type=click.Path(path_type=Path),
    expose_value=False,
    callback=_write_page,
    help="Write the page of all results.",
)
@click.option(
    "--replay",
    type=click.Path(exists=True, path_type=Path),
    expose_value=False,
    callback=_replay,
    help="Replay a simulated history.",
)
def main(  # noqa: PLR0913 -- one for each option
    minutes: float,
    seed: int,
    server: str,
    previous: str,
    only: str | None,
    keep: Path | None,
    *,
    controls: bool,
    peers: bool,
    record: bool,
    simulates: bool,
) -> None:
    """
    Run the workloads under faults; the exit code is 1 if a promise was broken.

    With --controls it is 1 if a lock that was broken on purpose was not caught; with --simulate,
    too, those that a simulation shows are tried in it.  With --simulate alone a history that breaks
    a promise is made small and printed; --keep keeps it in a file.
    """
    noted = results.add if record else results.forget
    chosen = [one for one in CONTROLS if only in (None, one)]
    if simulates and controls:
        tried = [one for one in chosen if SIMULATION in CONTROLS[one].shown_in]
        caught = [
            is_caught_simulated(one, minutes=minutes, seed=seed, noted=noted) for one in tried
        ]
        raise SystemExit(not all(caught))
    if simulates:
        raise SystemExit(not _is_simulated(minutes, seed, keep, noted))
    _check_programs(all_of_it=controls or peers or record or bool(previous))
    # What ends a run from outside ends its servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="dislock-proof-") as name:
        folder = Path(name)
        if controls:
            caught = [
                _is_caught(name, keep or folder, seconds=60 * minutes, seed=seed, noted=noted)
                for name in chosen
                if RUN in CONTROLS[name].shown_in
            ]
            raise SystemExit(0 if all(caught) else 1)
        if peers:
            for table in compare(keep or folder, seconds=60 * minutes, seed=seed, say=click.echo):
                noted("peers", seed=seed, minutes=minutes, **table._asdict())
            return
        verdict = run(
            _new((keep or folder) / f"seed-{seed}"),
            seconds=60 * minutes,
            seed=seed,
            kind=server,
            previous=previous,
            say=click.echo,
        )
    broken = Counter(violation.promise for violation in verdict.violations)
    outcome = {"counts": verdict.counts, "broken": broken}
    noted("run", seed=seed, server=server, minutes=minutes, **outcome)
    _show(verdict)
    for promise, times in broken.items():
        click.echo(f"{times:>10,}  broken: {promise}")
    said = "Promises were broken" if broken else "No promise was broken"
    click.echo(f"{said}. Server {server}, seed {seed}, {minutes:g} minutes.")
    raise SystemExit(bool(broken))


def _show(verdict: Verdict) -> None:
    for name, count in sorted(verdict.counts.items()):
        click.echo(f"{count:>10,}  {name}")
    shown: Counter[str] = Counter()
    for violation in verdict.violations:
        shown[violation.promise] += 1
        if shown[violation.promise] <= SHOWN:
            for one in verdict.evidence(violation):
                more = {} if one.kind == "sent" else one.more  # which the violation has in words
                click.echo(f"  {one.at:.3f} {one.process} {one.what} {one.about} {one.kind} {more}")
            click.echo(f"BROKEN {violation.promise} at {violation.at:.3f}: {violation.text}")


def _check_programs(*, all_of_it: bool) -> None:
    try:
        find_server()
    except ServerMissing as exc:
        raise click.ClickException(f"The proof needs a Redis: {exc}.") from None
    if all_of_it and find_rabbitmq() is None:
        raise click.ClickException(NO_BROKER)


def _new(folder: Path) -> Path:
    if folder.exists():
        raise click.ClickException(f"{folder} is there already; keep this history elsewhere.")
    return folder


def _is_simulated(minutes: float, seed: int, keep: Path | None, noted: Noted) -> bool:
    """Simulate; returns whether all promises were kept."""
    logging.disable()  # simulated outages fill the log
    counts: Counter[str] = Counter()
    found = simulate(seed, seconds=60 * minutes, say=click.echo, counts=counts)
    broken = found.seed if found else "nothing"
    outcome = {"judges": [*LEASES, "takes over"], "broken": broken}
    noted("simulation", seed=seed, seconds=60 * minutes, **counts, **outcome)
    if found and keep:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{found.seed}.json").write_text(str(found), "utf-8")
    click.echo(found or "No promise was broken.")
    return found is None


def is_caught_simulated(
    name: str, *, minutes: float, seed: int, noted: Noted = results.forget
) -> bool:
    """Simulate with a lock that is broken in this way, in a process of its own; say what comes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        caught, took = process.submit(catch, name, seed, 60 * minutes).result()
    promise = CONTROLS[name].promise
    what = f"caught ({promise})" if caught else f"NOT CAUGHT: no {promise}"
    click.echo(f"{name.replace('_', ' ')}, simulated: {what}, {took:.0f} s")
    outcome = {"caught": caught, "seconds": took, "broken": {promise: int(caught)}}
    noted("control", control=name, seed=seed, shown_in=SIMULATION, **outcome)
    return caught


def _is_caught(name: str, folder: Path, *, seconds: float, seed: int, noted: Noted) -> bool:
    """Run with a lock that is broken in this way; returns whether the checker says so."""
    promise = CONTROLS[name].promise

    def is_caught(verdict: Verdict) -> bool:
        # Before the end, a task that has not ended is not lost.
        return promise != "nothing lost" and any(
            one.promise == promise for one in verdict.violations
        )

    began = time.monotonic()
    verdict = run(_new(folder / name), seconds=seconds, seed=seed, control=name, enough=is_caught)
    took = time.monotonic() - began
    broken = Counter(violation.promise for violation in verdict.violations)
    what = ", ".join(f"{times} x {one}" for one, times in broken.items()) or "nothing"
    caught = "caught" if broken[promise] else f"NOT CAUGHT: no {promise}"
    click.echo(f"{name.replace('_', ' ')}: {caught} ({what}), {took:.0f} s")
    outcome = {"caught": promise in broken, "seconds": took, "broken": broken}
    noted("control", control=name, seed=seed, shown_in=RUN, **outcome)
    return bool(broken[promise])


if __name__ == "__main__":
    main()
