"""`pippy validate`: proves that programs can run, or says what is wrong with them."""

from typing import TYPE_CHECKING

import click

from pippy.cli.schedule import head

if TYPE_CHECKING:
    from pippy.drivers.plan import Program

SHOWN_FAULTS = 10


@click.command("validate", no_args_is_help=True, short_help="Prove that programs can run.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--buffer", type=click.IntRange(1), help="Validate for channels that hold this many values.")
@click.option("--mark", is_flag=True, help="Also print the program, with its faults marked.")
def validate_files(files: tuple[str, ...], buffer: int | None, mark: bool) -> None:
    """Prove that the programs in FILES can run: nothing is missing, no workers wait for one another in a circle, and the
    memory limit holds.

    `pippy schedule --program` and `Program.save` write such files; - is the standard input. The exit status is 1 if a
    program cannot run.

    \b
    Examples:
      pippy schedule 1f1b -p 4 -m 8 --program mine.txt && pippy validate mine.txt
      pippy validate lowered.txt --buffer 2
    """
    wrong = [name for name in files if not _is_right(name, buffer, mark)]
    if wrong:
        raise click.exceptions.Exit(1)


def _is_right(name: str, buffer: int | None, mark: bool) -> bool:
    from pippy.drivers.plan import parse_program
    from pippy.drivers.plan import validate as prove
    from pippy.drivers.plan.language.errors import ParseError, ProgramError, ScheduleError

    shown = "standard input" if name == "-" else name
    try:
        program = parse_program(_text(name))
        prove(program, buffer)
    except ParseError as error:
        place = f"{shown}:{error.line}:{error.column}"
        click.echo(f"{place}: {str(error).partition(': ')[2]}", err=True)
        return False
    except ProgramError as error:
        click.echo(f"{shown}: {error if mark else _first_faults(error)}", err=True)
        return False
    except (ScheduleError, OSError, UnicodeDecodeError) as error:
        click.echo(f"{shown}: {error}", err=True)
        return False
    click.echo(f"{shown}: OK: {_described(program)}")
    return True


def _text(name: str) -> str:
    with click.open_file(name, encoding="utf-8") as file:
        return str(file.read())


def _first_faults(error: Exception) -> str:
    faults = getattr(error, "faults", ())
    lines = [str(error).partition("\n")[0], *(f"- {fault}" for fault in faults[:SHOWN_FAULTS])]
    return "\n".join(lines + ([f"… and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []))


def _described(program: "Program") -> str:
    count = sum(map(len, program.orders))
    communication = "communication in it" if program.lowered else "communication implied"
    return f"{head(program)}, {count} instructions, {communication}"
