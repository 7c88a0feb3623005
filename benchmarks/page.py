"""
Write docs/inside/benchmarks.md and its plots, from what the sections have measured.

The figures are kept in measured.json, with when and on what each section was measured: a section
can be measured again by itself, and the page be written again without measuring.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import beats, cancelling, coroutines, flow, flow_lines, idle, locks, tasks
from benchmarks.environments import ROOT
from benchmarks.many_leases import PEER_LOCKS
from benchmarks.measuring import NETWORKS, Figure
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SECTIONS: dict[
    str, Callable[[Path], list[Figure]]
] = {  # can be measured one by one: each takes minutes
    "locks": partial(locks.measure, network="0 ms"),
    "locks-delayed": partial(locks.measure, network="1 ms"),
    "asyncio": coroutines.measure,
    "tasks": partial(tasks.measure, network="0 ms"),
    "tasks-delayed": partial(tasks.measure, network="1 ms"),
    "idle": idle.measure,
    "flow": flow.measure,
    "cancelling": cancelling.measure,
    "beats": beats.measure,
}
KEPT = Path(__file__).with_name("measured.json")
TEXT = Path(__file__).with_name("page.md")
PAGE = ROOT / "docs" / "inside" / "benchmarks.md"
PLOTS = ROOT / "docs" / "_static" / "benchmarks"
OURS = locks.OURS
NAMES = {  # of the floors
    "PING": "*floor: two bare PINGs*",
    "EVALSHA": "*floor: bare EVALSHA*",
    "BLPOP": "*floor: bare BLPOP*",
    tasks.FLOOR: "*floor: plain Celery*",
    "by-hand": "SET NX and a script, by hand",
    flow.BY_HAND: "a sorted set and `retry`, by hand",
    f"{cancelling.BY_HAND}, prefork": "`revoke(id, terminate=True)` and `delay()`, prefork",
    flow.CELERYS: "Celery's `rate_limit`, per worker",
}
QUIET = 0.25  # of the cores: more is somebody else's work
THEMES = {
    "light": {"ground": "#ffffff", "ink": "#1f2328", "grid": "#d0d7de"},
    "dark": {"ground": "#131416", "ink": "#e6e9ed", "grid": "#3a3f45"},
}
COLOURS = {  # told apart by those who see no red, or no green; in the light and in the dark
    OURS: "#2f7fd6",
    "python-redis-lock": "#d98200",
    locks.POLLING: "#c4569b",
    "celery-once": "#d98200",
    "celery-singleton": "#c4569b",
    "by-hand": "#0c9a72",
}
FLOOR_COLOUR = "#8a9099"


@dataclass(frozen=True)
class Measured:
    """A section's figures, and when and on what they were measured."""

    when: str
    machine: str
    load: float  # average of the minute before the run of which it is a part, per core
    figures: Sequence[Figure]


def load_now() -> float:
    """Return how busy the machine has been in the last minute, per core."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)


def measure(section: str, folder: Path, load: float) -> None:
    """Measure a section, and keep its figures; *load* is that before the run."""
    figures = SECTIONS[section](folder)
    sections = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
    sections[section] = {
        "when": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(folder),
        "load": load,
        "figures": [
            figure._replace(values=[float(f"{value:.4g}") for value in figure.values])
            for figure in figures
        ],
    }
    lines = json.dumps({name: sections[name] for name in SECTIONS if name in sections}, indent=1)
    KEPT.write_text(lines + "\n", "utf-8")


def print_locks(url: str, waiters: int) -> None:
    """Measure the locks with somebody's server, and print the figures."""
    figures = locks.measure_at(url, "0 ms", waiters)
    for name in dict.fromkeys(figure.table for figure in figures):
        print(f"{name}\n\n{table(figures, name)}\n")


def machine(folder: Path) -> str:
    """Describe the machine in general: no name of a host, no path."""
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        system = platform.system()
    with RedisServer(folder / "version") as server, server.client() as client:
        redis = client.info("server")["redis_version"]
    return (
        f"{os.cpu_count()} cores, {system}, Python {platform.python_version()}, Redis {redis}, "
        f"Celery {version('celery')}, redis-py {version('redis')}"
    )


def write() -> None:
    """Write the page and its plots."""
    measured = kept()
    PLOTS.mkdir(parents=True, exist_ok=True)
    plot([figure for of in measured.values() for figure in of.figures])
    PAGE.write_text(text(measured), "utf-8")


def kept() -> dict[str, Measured]:
    """Return what has been measured, by section."""
    sections: dict[str, Any] = json.loads(KEPT.read_text("utf-8"))
    return {
        name: Measured(**{**of, "figures": [Figure(*figure) for figure in of["figures"]]})
        for name, of in sections.items()
    }


def text(measured: dict[str, Measured]) -> str:
    """Return the text of the page."""
    figures = [figure for of in measured.values() for figure in of.figures]
    return TEXT.read_text("utf-8").format(
        conditions="\n".join(conditions(measured)),
        plot_pairs=picture("pairs", "Pairs of acquire and release per second, at 0 and at 1 ms"),
        plot_hand_off=picture("hand-off", "Hand-off p50 and p99 by the number of waiters"),
        plot_tasks=picture("tasks", "Tasks per second, at 0 and at 1 ms"),
        table_uncontended=table(figures, locks.UNCONTENDED),
        tables_hand_off="\n\n".join(
            f"**{waiters:,} waiting**\n\n{table(figures, locks.HAND_OFF.format(waiters))}"
            for waiters in locks.WAITERS
        ),
        table_coroutines=table(figures, coroutines.UNCONTENDED),
        table_together=table(figures, coroutines.TOGETHER),
        tables_coroutines="\n\n".join(
            f"**{waiters} waiting**\n\n{table(figures, coroutines.HAND_OFF.format(waiters))}"
            for waiters in coroutines.WAITERS
        ),
        table_cancelled=table(figures, coroutines.CANCELLED),
        table_kept=table(figures, coroutines.KEPT),
        table_tasks=table(figures, tasks.TABLE),
        table_waiter=table(figures, idle.WAITER),
        table_worker=table(figures, idle.WORKER),
        table_parked=table(figures, idle.TICKETS),
        table_leases=table(figures, idle.LEASES),
        table_rated=table(figures, flow.RATED),
        table_paced=table(figures, flow.PACED),
        table_keys=table(figures, flow.KEYS),
        table_idle_line=table(figures, flow_lines.IDLE),
        table_blocked=table(figures, flow_lines.BLOCKED),
        table_start=table(figures, flow_lines.COUNTED),
        table_remembered=table(figures, flow_lines.REMEMBERED),
        table_cancels=table(figures, cancelling.TABLE),
        table_kills=table(figures, beats.KILLED),
        table_halts=table(figures, beats.HALTED),
        peer_locks=PEER_LOCKS,
        timeout=beats.TIMEOUT,
        halt=beats.HALT,
    )


def conditions(measured: dict[str, Measured]) -> Iterator[str]:
    """Say when each section was measured, on what, and whether others used the machine."""
    whens = {of.when for of in measured.values()}
    if len(whens) == 1:
        yield f"Measured on {whens.pop()}."
    else:
        listed = ", ".join(f"{name} {of.when}" for name, of in measured.items())
        yield f"Measured on different days: {listed}."
    yield "; ".join(sorted({of.machine for of in measured.values()})) + "."
    if busy := {name: of.load for name, of in measured.items() if of.load > QUIET}:
        yield (
            f"\n**The machine was busy with other work** before these: {', '.join(busy)}, with a "
            f"load average of up to {max(busy.values()):.1f} per core. So their ranges are wide, "
            "times are longer than they would be, and figures that are close to one another are "
            "equal."
        )


def table(figures: Sequence[Figure], name: str) -> str:
    """Make a table of Markdown: a row for each variant, a column for each figure and network."""
    of = [figure for figure in figures if figure.table == name]
    if not of:
        return "*Not measured yet.*"
    columns = list(dict.fromkeys((figure.network, figure.measured) for figure in of))
    columns.sort(key=lambda column: list(NETWORKS).index(column[0]))
    networks = {network for network, _ in columns}
    cells = {(one.variant, one.network, one.measured): shown(one.values) for one in of}
    lines = [
        ["", *(f"{what}, network {net}" if len(networks) > 1 else what for net, what in columns)],
        ["---", *("---:" for _ in columns)],
    ]
    for variant in dict.fromkeys(figure.variant for figure in of):
        title = f"**{variant}**" if variant.startswith(OURS) else NAMES.get(variant, variant)
        lines.append([title, *(cells.get((variant, *column), "") for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(values: Sequence[float]) -> str:
    """Show the median, and the range if there are rounds."""
    if len(values) == 1:
        return number(values[0])
    return f"{number(median(values))} ({number(min(values))} to {number(max(values))})"


def number(value: float) -> str:
    """Show three digits of a number, and no more than it has."""
    if abs(value) >= 100 or value == int(value):  # noqa: PLR2004
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"  # noqa: PLR2004


def picture(name: str, alt: str) -> str:
    """Show a plot, light or dark as the reader's system is."""
    source = f"../_static/benchmarks/{name}"
    return (
        "<picture>\n"
        f'<source media="(prefers-color-scheme: dark)" srcset="{source}-dark.svg">\n'
        f'<img src="{source}-light.svg" alt="{alt}; the table below has the figures">\n'
        "</picture>"
    )


def plot(figures: Sequence[Figure]) -> None:
    """Draw the plots, each once on white and once on black."""
    import matplotlib as mpl  # noqa: PLC0415  # in the extra `bench` only

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # after the backend

    for theme, colours in THEMES.items():
        inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
        style: Any = dict.fromkeys(inked, colours["ink"])
        style |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), colours["ground"])
        style |= dict.fromkeys(("axes.edgecolor", "grid.color"), colours["grid"])
        style |= {"svg.fonttype": "none", "svg.hashsalt": "dislock", "font.size": 11}
        style |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
        style |= {"font.family": "sans-serif", "axes.titlesize": 11}
        with plt.rc_context(style):
            for name, drawn in (
                ("pairs", bars(plt, figures, locks.UNCONTENDED, "pairs/s")),
                ("tasks", bars(plt, figures, tasks.TABLE, "tasks/s")),
                ("hand-off", lines(plt, figures)),
            ):
                path = PLOTS / f"{name}-{theme}.svg"
                drawn.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
                plt.close(drawn)


def bars(plt: Any, figures: Sequence[Figure], table: str, unit: str) -> Any:
    """Draw a bar for each variant, with its range, and a panel for each network."""
    drawn, panels = plt.subplots(1, len(NETWORKS), figsize=(9, 2.6), sharey=True)
    for panel, network in zip(panels, NETWORKS, strict=True):
        for one in figures:
            if (one.table, one.measured, one.network) != (table, unit, network):
                continue
            middle = median(one.values)
            panel.barh(
                NAMES.get(one.variant, one.variant).strip("*"),
                middle,
                xerr=[[middle - min(one.values)], [max(one.values) - middle]],
                color=COLOURS.get(one.variant, FLOOR_COLOUR),
                ecolor=plt.rcParams["text.color"],
                height=0.65,
            )
        panel.set(title=f"{unit}, network {network}", xlim=(0, None))
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.grid(axis="x", alpha=0.6)
        panel.set_axisbelow(True)
    panels[0].invert_yaxis()
    drawn.tight_layout()
    return drawn


def lines(plt: Any, figures: Sequence[Figure]) -> Any:
    """Draw hand-offs by the number of waiters: p50 drawn through, p99 dashed."""
    drawn, panels = plt.subplots(1, len(NETWORKS), figsize=(9, 3.6), sharey=True)
    for panel, network in zip(panels, NETWORKS, strict=True):
        for kind in locks.LOCKS:
            for share, dashes in (("p50", "-"), ("p99", "--")):
                rounds = {
                    waiters: one.values
                    for waiters in locks.WAITERS
                    for one in figures
                    if one[:4] == (locks.HAND_OFF.format(waiters), f"{share} ms", kind, network)
                }
                middles = list(map(median, rounds.values()))
                lowest, highest = map(min, rounds.values()), map(max, rounds.values())
                panel.errorbar(
                    list(rounds),
                    middles,
                    yerr=[
                        [mid - low for mid, low in zip(middles, lowest, strict=True)],
                        [high - mid for mid, high in zip(middles, highest, strict=True)],
                    ],
                    label=f"{NAMES.get(kind, kind).strip('*')}, {share}",
                    color=COLOURS.get(kind, FLOOR_COLOUR),
                    linestyle=dashes,
                    marker="o",
                    markersize=4,
                    linewidth=1.6,
                    elinewidth=0.8,
                )
        panel.set(xscale="log", yscale="log", xlabel="waiters")
        panel.set(title=f"hand-off, ms, network {network}", xticks=locks.WAITERS)
        panel.set_xticklabels([f"{waiters:,}" for waiters in locks.WAITERS])
        panel.yaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.grid(alpha=0.6)
    drawn.tight_layout()
    entries = panels[0].get_legend_handles_labels()
    drawn.legend(*entries, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4, fontsize=9)
    return drawn
