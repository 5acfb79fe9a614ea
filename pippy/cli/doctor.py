"""`pippy doctor`: what works on this host, what does not, and what to do."""

import json
from dataclasses import asdict

import click

from pippy.cli.checks import CHECKS, CheckResult, checked

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "fails": ("FAILS", "red")}


@click.command(short_help="Check what works on this host.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
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
    findings: list[CheckResult] = []
    for name, check in CHECKS.items():
        if quick and name == "workers":
            continue
        finding = checked(name, check, findings)
        findings.append(finding)
        if not as_json:
            say(finding)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        click.echo(f"\n{conclusion(findings)}")
    if any(each.state == "fails" for each in findings):
        raise click.exceptions.Exit(1)


def say(finding: CheckResult) -> None:
    """A line or more on a check."""
    word, colour = _MARKS[finding.state]
    click.echo(f"{click.style(word.ljust(8), fg=colour)} {finding.name.ljust(16)} {finding.said}")
    if finding.remedy:
        click.echo(f"{'':26}→ {finding.remedy}")


def conclusion(findings: list[CheckResult]) -> str:
    """The sum of it.

    >>> conclusion([CheckResult("torch", "ok", "2.13.0"), CheckResult("limits", "warning", "few", "more")])
    'pippy works here; 1 warning'
    """
    failing = [each.name for each in findings if each.state == "fails"]
    warned = sum(each.state == "warning" for each in findings)
    also = f"; {warned} warning{'s' if warned > 1 else ''}" if warned else ""
    if failing:
        return f"pippy does not work here: {', '.join(failing)}{also}"
    return f"pippy works here{also}"
