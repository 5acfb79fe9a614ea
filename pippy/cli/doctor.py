"""`pippy doctor`: what works on this host, what does not, and what to do."""

import json
from dataclasses import asdict

import click

from pippy.cli.checks import DOCTOR_CHECKS, CheckResult, run_check
from pippy.ir.base.readable import count_with_noun

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "fails": ("FAILS", "red")}


@click.command(short_help="Check what works on this host.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--quick", is_flag=True, help="Do not start workers.")
def doctor(as_json: bool, quick: bool) -> None:
    """Check what pippy needs on this host: Python, torch, memory, limits, devices, and two workers for a step.

    Each line is ok, a warning (pippy works, but perhaps not as you want), or FAILS, with what to do. The exit status is 1
    if anything fails.

    \b
    Examples:
      pippy doctor
      pippy doctor --json > host.json
    """
    results: list[CheckResult] = []
    for name, check in DOCTOR_CHECKS.items():
        if quick and name == "workers":
            continue
        result = run_check(name, check, results)
        results.append(result)
        if not as_json:
            print_result(result)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in results], indent=2))
    else:
        click.echo(f"\n{conclusion(results)}")
    if any(each.state == "fails" for each in results):
        raise click.exceptions.Exit(1)


def print_result(result: CheckResult) -> None:
    """Print a result: a line, and another for its remedy."""
    word, colour = _MARKS[result.state]
    click.echo(f"{click.style(word.ljust(8), fg=colour)} {result.name.ljust(16)} {result.said}")
    if result.remedy:
        click.echo(f"{'':26}→ {result.remedy}")


def conclusion(results: list[CheckResult]) -> str:
    """The last line: whether pippy works here.

    >>> conclusion([CheckResult("torch", "ok", "2.13.0"), CheckResult("limits", "warning", "few", "more")])
    'pippy works here; 1 warning'
    """
    failing = [each.name for each in results if each.state == "fails"]
    warned = sum(each.state == "warning" for each in results)
    also = f"; {count_with_noun(warned, 'warning')}" if warned else ""
    if failing:
        return f"pippy does not work here: {', '.join(failing)}{also}"
    return f"pippy works here{also}"
