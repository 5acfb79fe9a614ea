"""Runs a notebook in a kernel of its own, and compares what its cells show with what the notebook holds.

A cell may have tags:

    raises-exception   it must raise; else it must not. The error that it shows is its last line, without the traceback
    interrupt          Ctrl-C is sent when it has printed as many lines as the notebook has; later ones do not count

`python -m tests.notebooks docs/notebook.ipynb` writes what the cells show into the notebook. Read the difference that it makes.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

Output = dict[str, Any]
LIMIT = 60  # seconds for a cell, and for all else that is waited for


class NotebookError(AssertionError):
    """A cell does not show the output that its notebook has."""


@dataclass
class Kernel:
    """A running kernel; made by `kernel`."""

    manager: KernelManager
    client: Any

    def run(self, code: str, interrupt_after: int | None = None) -> list[Output]:
        """What a cell shows. It is interrupted once, when it has printed so many lines."""
        outputs: list[Output] = []
        sent: list[bool] = []

        def take(message: dict[str, Any]) -> None:
            _add(outputs, message["msg_type"], message["content"])
            if interrupt_after is not None and not sent and printed(outputs).count("\n") >= interrupt_after:
                sent.append(True)
                self.manager.interrupt_kernel()

        self.client.execute_interactive(code, output_hook=take, timeout=LIMIT, allow_stdin=False)
        return outputs

    def value(self, expression: str) -> Any:
        """The value of an expression of literals, in the kernel."""
        shown = self.run(f"print(__import__('json').dumps({expression}))")
        return json.loads(printed(shown))

    def streamed(self) -> Iterator[str]:
        """The output that processes write outside of the kernel's own streams. It belongs to no cell."""
        while True:
            message = self.client.get_iopub_msg(timeout=LIMIT)
            if message["msg_type"] == "stream":
                yield message["content"]["text"]


@contextmanager
def kernel() -> Iterator[Kernel]:
    """Start a kernel of this Python; in the end, shut it down."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        manager = KernelManager(transport="ipc", connection_file=f"{folder}/kernel.json")
        manager.start_kernel(
            env=environment | {"IPYTHONDIR": folder, "OMP_NUM_THREADS": "1"},
            extra_arguments=["--HistoryManager.enabled=False"],
        )
        client = manager.client()
        try:
            client.start_channels()
            client.wait_for_ready(timeout=LIMIT)
            yield Kernel(manager, client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def _add(outputs: list[Output], kind: str, content: dict[str, Any]) -> None:
    """A message of the kernel as an output of the cell, if it is one; a stream goes on where it stopped."""
    if kind == "stream":
        same = [each for each in outputs if each.get("name") == content["name"]]
        if same:
            same[0]["text"] += content["text"]
        else:
            outputs.append({"output_type": kind, "name": content["name"], "text": content["text"]})
    elif kind in ("execute_result", "display_data"):
        text = {"text/plain": content["data"]["text/plain"]}
        count = {"execution_count": content["execution_count"]} if kind == "execute_result" else {}
        outputs.append({"output_type": kind, "data": text, "metadata": {}, **count})
    elif kind == "error":
        line = f"{content['ename']}: {content['evalue']}".rstrip(": ")
        outputs.append(
            {"output_type": kind, "ename": content["ename"], "evalue": content["evalue"], "traceback": [line]}
        )


def _text(lines: str | list[str]) -> str:
    """A text of a notebook: one string, or a list of lines."""
    return lines if isinstance(lines, str) else "".join(lines)


def printed(outputs: list[Output]) -> str:
    """What a cell has printed."""
    return "".join(_text(each["text"]) for each in outputs if each["output_type"] == "stream")


def shown(outputs: list[Output]) -> list[str]:
    """What a cell shows, as text: streams, then the value, then the error."""
    rest = [each for each in outputs if each["output_type"] != "stream"]
    texts = [_text(each["data"]["text/plain"]) if "data" in each else each["traceback"][0] for each in rest]
    return [printed(outputs), *texts]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def tags(cell: dict[str, Any]) -> list[str]:
    """A cell's tags."""
    return cell["metadata"].get("tags", [])


def run_cell(running: Kernel, cell: dict[str, Any]) -> list[Output]:
    """The outputs of a cell now. If the cell is interrupted, its printed lines are cut to as many as the notebook has."""
    if "interrupt" not in tags(cell):
        return running.run(_text(cell["source"]))
    lines = printed(cell["outputs"]).count("\n")
    outputs = running.run(_text(cell["source"]), interrupt_after=lines)
    for each in outputs:
        if each["output_type"] == "stream":
            each["text"] = "".join(each["text"].splitlines(keepends=True)[:lines])
    return outputs


def check_notebook(running: Kernel, notebook: dict[str, Any]) -> int:
    """Run a notebook and return the number of its cells. Raises a `NotebookError` if a cell shows another output."""
    for number, cell in enumerate(code_cells(notebook), start=1):
        outputs = run_cell(running, cell)
        raised = [each["traceback"][0] for each in outputs if each["output_type"] == "error"]
        if bool(raised) != ("raises-exception" in tags(cell)):
            raise NotebookError(f"cell {number} raises {raised or 'nothing'}:\n{_text(cell['source'])}")
        if shown(outputs) != shown(cell["outputs"]):
            raise NotebookError(f"cell {number} shows\n{shown(outputs)}\nand not\n{shown(cell['outputs'])}")
    return len(code_cells(notebook))


def write(path: Path) -> None:
    """Write the outputs of its cells into a notebook."""
    notebook = json.loads(path.read_text())
    with kernel() as running:
        for number, cell in enumerate(code_cells(notebook), start=1):
            cell["outputs"] = run_cell(running, cell)
            cell["execution_count"] = number
            for each in cell["outputs"]:
                if "execution_count" in each:
                    each["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name))
