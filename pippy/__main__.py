"""`python -m pippy` is the command line."""

from pippy.cli import main

if __name__ == "__main__":
    main(prog_name="python -m pippy")
