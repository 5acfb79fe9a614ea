"""The command line. Each file is a command, or what several commands share. Torch is imported only where it is needed."""

import click

from pippy.cli.doctor import doctor
from pippy.cli.fit import fit
from pippy.cli.problems import CommandGroup
from pippy.cli.run import check, run, worker
from pippy.cli.schedule import compare, schedule, validate_files
from pippy.cli.show import show


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "--version", package_name="pippy-compiler", prog_name="pippy")
def main() -> None:
    """Look at pipelines and run them: the parts of a model, the order of the work, scripts on workers.

    \b
      pippy show model.py:Net             where a model is cut, who sends what to whom
      pippy fit model.py:Net -p 4 ...     what fits into the memory of the workers
      pippy schedule 1F1B -p 4 -m 8       when each worker does what
      pippy run train.py -n 4             a script with four workers on this host
      pippy worker --join node1:29400     a worker of a script on another host
      pippy check train.py -n 4           its first step beside that of plain PyTorch
      pippy doctor                        what works here, and what does not

    The exit status is 0 if all is well, 1 if something is wrong with what was given, and 2 if the command was not
    understood. `pippy COMMAND --help` has examples of each command.
    """


for _command in (show, fit, schedule, compare, validate_files, run, worker, check, doctor):
    main.add_command(_command)
