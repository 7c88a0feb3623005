"""Write the page of the proof, ``docs/inside/proof.md``, from the results that were kept."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from proof.controls import CONTROLS, RUN
from proof.servers import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from proof.results import Result

TEMPLATE = Path(__file__).with_suffix(".md")
DOCS = Path(__file__).parents[1] / "docs"
GUARANTEES = (DOCS / "guarantees.md", DOCS / "inside" / "guarantees.md")
SERVERS = {
    "redis": "one Redis",
    "lasting": "one Redis that keeps its data",
    "sentinel": "Sentinel",
    "cluster": "Cluster",
    "quorum": "five by majority",
}
FAULTS = "faults: "  # the counts that begin so
UNFENCED = ("overlaps after the server forgot", "overlaps after a clock was set")
FENCED = (
    "holds while the server keeps its data and its clock is right, and only with fencing otherwise"
)

# The promises of these pages, by their first words, and what the checker calls their parts.
PROMISES: dict[str, tuple[str, ...]] = {
    "**At most one live lease": ("exclusion", "token", "written"),
    "**No expiry to guess": ("kept",),
    "**No lock left behind": ("free", "clean", "end", "cancelled"),
    "**No task lost": ("nothing lost", "once"),
    "| more tasks of a key": ("order", "once"),
    "What holds with `lock_unique_until`": ("nothing lost", "free"),
    "| before `lock_at_least_for` is over": ("at least",),
    "| child killed, or out of memory (prefork)": ("crash",),
    "| whole worker killed while it waits in line": ("take-up",),
    "| it is refused one of several keys": ("all or none",),
    "| runs for longer than its cap": ("cap",),
    "What holds with a [rate]": ("rate",),
    "| the reply that a message is replaced is late": ("newest",),
    'What holds with [`lock_on_conflict="cancel"`]': ("takes over",),
    "| several beats run": ("tick",),
    "| the leader is killed | another": ("silent", "end"),
    "| the leader is killed while": ("again",),
    "| an entry became due while": ("missed",),
}
# What not all runs have, or had: a count that says that there was something to be judged.
SEEN = {
    **dict.fromkeys(("tick", "silent", "again", "missed"), "ticks"),
    "at least": "held on after the body",
    "crash": "locks of the dead that were free at once",
    "cap": "holds that reach their cap",
    "rate": "starts under a rate",
    "takes over": "tasks that cancel others",
    "all or none": "refusals of several locks",
}
PARTS = {
    "exclusion": "two trust leases at a time that the lock does not admit together",
    "token": "a fencing token is not larger than those before it",
    "written": "an acknowledged element is missing in a file that looks at the tokens",
    "kept": "a lease is lost although nothing was wrong",
    "free": "a lock or a key refuses somebody although nobody has it",
    "clean": "a key stays on the lock server",
    "end": "a process or a wait with a limit does not end",
    "cancelled": "a cancellation is hidden, late, or raised where nobody asked for it",
    "nothing lost": "a task does not end, fails, or makes room for one that does not run",
    "once": "a task begins again after its end, and its message has not come again",
    "order": "somebody who came later to a line has the lock first",
    "tick": "a tick of a beat has two ids",
    "silent": "no beat sends, a timeout and a second after a fault, though two of them run",
    "again": "a message of a beat goes out again, though its sender had the time to note it",
    "missed": "a beat sends others for a second, and not what is due",
    "at least": "a lock is given to another before `lock_at_least_for` is over, or held for longer",
    "take-up": "a hand-off lasts longer than the time in which it is taken up, or is shorter",
    "crash": "a lock refuses somebody though the pool process that had it has died",
    "rate": "more bodies begin in a window than the rate admits",
    "cap": "a lease is renewed beyond its cap, or ends before it",
    "all or none": "somebody who was refused one of several locks keeps another",
    "takes over": "a task begins after one that was sent later and cancels it, or is cancelled by "
    "none that was sent later",
    "newest": "an older message runs after a newer one that replaces it",
}


def render(results: Sequence[Result]) -> str:
    """Return the text of the page."""
    of = defaultdict(list)
    for result in results:
        of[result["what"]].append(result)
    runs = of["run"]
    return Template(TEMPLATE.read_text("utf-8")).substitute(
        runs=_runs(runs),
        where=_where(results),
        promises=_promises(runs, of["simulation"]),
        fencing=_by_server(runs, lambda name: "overlap" in name or "losses" in name),
        files=_by_server(runs, lambda name: name.startswith("element")),
        counts=_by_server(runs, lambda name: not re.match(r"fault|element|overlap|losses", name)),
        faults=_by_server(runs, _is_fault),
        controls=_controls(of["control"]),
        simulations=_simulations(of["simulation"]),
        peers=_peers(of["peers"]),
    )


def _is_fault(name: str) -> bool:
    return name.startswith(FAULTS) and name != f"{FAULTS}nothing"


def table(heads: Sequence[str], rows: Iterable[Sequence[str | float]]) -> str:
    """Return a table of Markdown; numbers have their thousands apart."""
    lines = [
        [c if isinstance(c, str) else f"{c:,}".removesuffix(".0") for c in row] for row in rows
    ]
    if not lines:
        return "No run has been kept yet."
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in ([*heads], ["---"] * len(heads), *lines))
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def _runs(runs: Sequence[Result]) -> str:
    def row(server: str, those: Sequence[Result]) -> list[str | float]:
        broken = _sum(those, "broken")
        return [
            SERVERS[server],
            ", ".join(str(run["seed"]) for run in those),
            f"{sum(run['minutes'] for run in those):g}",
            _sum(those, "counts")["holds"],
            _sum(those, "counts")["tasks"],
            sum(many for name, many in _sum(those, "counts").items() if _is_fault(name)),
            ", ".join(f"{many:,} x {name}" for name, many in broken.items()) or "nothing",
        ]

    heads = ("lock server", "seeds", "minutes", "holds", "tasks", "faults", "broken")
    return table(heads, (row(server, those) for server, those in _servers(runs).items()))


def _where(results: Sequence[Result]) -> str:
    """Say when, on what machine and with which versions; one line for all commits of ours."""
    of: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # the date of each commit
    for result in results:
        ours, _, others = result["with"].partition(", ")
        of[result["machine"], others][ours.removeprefix("celery-dislock ")] = result["date"]
    return "\n".join(
        f"- {' to '.join(sorted({min(dates.values()), max(dates.values())}))}, on {machine}: "
        f"{others}, and celery-dislock at {', '.join(dates)}."
        for (machine, others), dates in of.items()
    )


def _promises(runs: Sequence[Result], simulations: Sequence[Result]) -> str:
    return "\n\n".join(
        f"> {quoted(start)}\n\n{_verdict(runs, simulations, parts)}"
        for start, parts in PROMISES.items()
    )


def _verdict(runs: Sequence[Result], simulations: Sequence[Result], parts: Sequence[str]) -> str:
    """Say for each lock server whether the parts of a promise hold."""
    said = defaultdict(list)
    for count in {SEEN[part] for part in parts if part in SEEN}:
        runs = [run for run in runs if run["counts"].get(count)]
    if "take-up" in parts:  # in no run: leases of a second are shorter than what it is about
        runs = []
    judged = [one for one in simulations if set(parts) & {*one.get("judges", ())}]
    if judged:
        holds = all(one["broken"] == "nothing" for one in judged)
        said["holds" if holds else "does not hold"].append("the simulation")
    for server, those in _servers(runs).items():
        broken, counts = _sum(those, "broken"), _sum(those, "counts")
        if any(broken[part] for part in parts):
            said["does not hold"].append(SERVERS[server])
        elif "exclusion" in parts and any(counts[name] for name in UNFENCED):
            said[FENCED].append(SERVERS[server])
        else:
            said["holds"].append(SERVERS[server])
    verdicts = "; ".join(f"**{how}**: {', '.join(where)}" for how, where in said.items())
    broken_if = "; or ".join(PARTS[part] for part in parts)
    return f"{verdicts or 'No run has been kept yet'}. It would be broken if {broken_if}."


def quoted(start: str) -> str:
    """Return the paragraph, or the row of a table, of the guarantees that begins so."""
    text = "".join(page.read_text("utf-8") for page in GUARANTEES)
    assert start in text, start
    paragraph = start + text.partition(start)[2].partition("\n\n")[0]
    if start.startswith("|"):
        _, what, becomes, *_ = re.split(r" *\| *", paragraph)
        return f"{what.capitalize()}: {becomes}."
    return " ".join(paragraph.split())


def _by_server(runs: Sequence[Result], matches: Callable[[str], bool]) -> str:
    counts = {server: _sum(those, "counts") for server, those in _servers(runs).items()}
    names = sorted({name for those in counts.values() for name in those if matches(name)})
    rows = (
        [name.removeprefix(FAULTS), *(those.get(name, "") for those in counts.values())]
        for name in names
    )
    return table(["", *(SERVERS[server] for server in counts)], rows)


def _controls(controls: Sequence[Result]) -> str:
    newest = {(one["control"], one.get("shown_in", RUN)): one for one in controls}
    rows = []
    for name, control in CONTROLS.items():
        for where in control.shown_in:
            one = newest.get((name, where), {})
            caught = {True: "yes", False: "**no**", None: "not tried"}[one.get("caught")]
            took = f"{one['seconds']:.0f} s" if one else ""
            what = name.replace("_", " ")
            rows.append([what, PARTS[control.promise], where, caught, took])
    return table(("what is broken", "so that", "in", "caught", "after"), rows)


def _simulations(simulations: Sequence[Result]) -> str:
    heads = ("seed", "steps", "histories", "seconds", "stopped", "broken")
    rows = (
        [{"stopped": 0, **one, "seed": str(one["seed"])}[name] for name in heads]
        for one in simulations
    )
    return table(["given up" if name == "stopped" else name for name in heads], rows)


def _peers(peers: Sequence[Result]) -> str:
    """The newest tables that were kept, as they are, and how each library was used."""
    newest = {one["of"]: one for one in peers}
    return (
        "\n\n".join(
            f"Faults for {60 * one['minutes']:g} s with each, from seed {one['seed']} on.\n\n"
            f"{table(one['heads'], one['rows'])}\n\n"
            + "\n".join(f"- {library}: {how}" for library, how in one["used"].items())
            for one in newest.values()
        )
        or "Not measured yet."
    )


def _servers(runs: Sequence[Result]) -> dict[str, list[Result]]:
    return {
        server: those
        for server in KINDS
        if (those := [run for run in runs if run["server"] == server])
    }


def _sum(runs: Iterable[Result], what: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run[what])
    return counts
