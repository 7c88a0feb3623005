"""
Prove it: run the workloads under faults, and judge what their history shows.

    python -m proof [--minutes 2] [--seed 7] [--keep FOLDER]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from proof.run import run


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.1), default=2.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Decides the faults.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the history in this folder.")
def main(minutes: float, seed: int, keep: Path | None) -> None:
    """Run the workloads under faults; the exit code is 1 if a promise was broken."""
    with tempfile.TemporaryDirectory(prefix="dislock-proof-") as folder:
        verdict = run((keep or Path(folder)) / f"seed-{seed}", seconds=60 * minutes, seed=seed)
    for name, count in sorted(verdict.counts.items()):
        click.echo(f"{count:>10,}  {name}")
    for violation in verdict.violations:
        click.echo(f"BROKEN {violation.promise} at {violation.at:.3f}: {violation.text}")
    if verdict.violations:
        raise SystemExit(1)
    click.echo(f"No promise was broken. Seed {seed}, {minutes:g} minutes.")


if __name__ == "__main__":
    main()
