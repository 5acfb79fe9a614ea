"""What is known of a kind of instruction: a row of the table in instructions.py."""

from dataclasses import dataclass

from pippy.drivers.plan.language.form import Form


@dataclass(frozen=True)
class Kind:
    """The row of one kind of instruction.

    ``form`` is its text. A computation has a ``meaning``, which legends show, and the ``colour`` of its boxes in drawings.

    >>> Kind(Form("free {value}.{microbatch}")).meaning
    ''
    """

    form: Form
    meaning: str = ""
    colour: str | None = None
