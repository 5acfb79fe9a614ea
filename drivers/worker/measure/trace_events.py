"""The trace that torch.profiler has exported, made into a part of a trace of all workers.

All tracks of a worker become threads of one process: its instructions first, then the threads that ran operations, and the
streams of a GPU. Sends and receives get the ends of arrows. Events are written as lines, each with its time apart: by how much
times are shifted is known when all workers have told when they sent and received.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import IO, Any

from pippy.drivers.plan.language.instructions import Compute, Instruction, parse_instruction
from pippy.drivers.protocol.profiles import ProfileStopped
from pippy.drivers.worker.measure.named_work import NamedWork

Event = dict[str, Any]
_CHUNK = 1 << 20  # characters that are read at a time
_THREADS = 1000  # more than a worker has: so no two workers have threads of the same number
_INSTRUCTIONS, _ON_GPU = ("instructions", ""), ("instructions", "gpu")


def events_of(file: IO[str]) -> tuple[int, Iterator[Event]]:
    """The nanosecond from which the times of a trace file count, and its events, one at a time: the file may be large.

    >>> from io import StringIO
    >>> base, events = events_of(StringIO('{"baseTimeNanoseconds": 7, "traceEvents": [ {"ph": "M"}, {"ph": "X"} ]}'))
    >>> base, [each["ph"] for each in events]
    (7, ['M', 'X'])
    """
    text = ""
    while (begin := re.search(r'"traceEvents":\s*\[', text)) is None:
        more = file.read(_CHUNK)
        if not more:
            raise ValueError("torch.profiler has exported a file without traceEvents")
        text += more
    base = re.search(r'"baseTimeNanoseconds":\s*(\d+)', text[: begin.start()])
    return int(base[1]) if base else 0, _events(text[begin.end() :], file)


def _events(text: str, file: IO[str]) -> Iterator[Event]:
    decoder, between, at = json.JSONDecoder(), re.compile(r"[\s,]*"), 0
    while True:
        at = between.match(text, at).end()  # type: ignore[union-attr] # it matches nothing, too
        if text.startswith("]", at):
            return
        try:
            event, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:  # it goes on in what was not read
            more = file.read(_CHUNK)
            if not more:
                raise
            text, at = text[at:] + more, 0
        else:
            yield event


class WorkerEvents:
    """Takes the events of one worker, and writes the lines of its part of the trace. Its clock was ``began`` at the begin."""

    def __init__(self, worker: int, began: int, lines: IO[str]) -> None:
        self.worker, self.began, self.lines = worker, began, lines
        self.sends: list[tuple[str, float]] = []
        self.receives: list[tuple[str, float]] = []
        self._moved = Counter[str]()
        self._tracks = {_INSTRUCTIONS: 0, _ON_GPU: 1}
        self._names: dict[tuple[Any, Any], str] = {_INSTRUCTIONS: "instructions", _ON_GPU: "instructions on the GPU"}
        self._used = set[int]()

    def take(self, base: int, events: Iterator[Event]) -> ProfileStopped:
        """Write all of the events, of which times count from ``base``."""
        later = (base - self.began) / 1e3
        for event in events:
            self._take(event, later)
        for key, track in self._tracks.items():
            if track in self._used:
                of = {"pid": self.worker + 1, "tid": self._thread(track)}
                name = {"name": self._names.get(key, f"thread {key[1]}")}
                self._write(0.0, {"ph": "M", "name": "thread_name", **of, "args": name})
                self._write(0.0, {"ph": "M", "name": "thread_sort_index", **of, "args": {"sort_index": track}})
        return ProfileStopped(self.began / 1e9, self.sends, self.receives)

    def _take(self, event: Event, later: float) -> None:
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                self._names[event["pid"], event["tid"]] = event["args"]["name"]
            return
        if not isinstance(event["pid"], int):
            return  # spans of the profiler itself
        time, work = event.pop("ts") + later, NamedWork.read(event["name"])
        if work is not None:
            self._take_work(work, event, time)
            return
        if "id" in event:
            event["id"] = f"{self.worker}/{event['id']}"
        self._put((event["pid"], event["tid"]), event, time)

    def _take_work(self, work: NamedWork, event: Event, time: float) -> None:
        """Something of the worker's own: as it ran, or once more as the GPU did it."""
        instruction = _instruction(work.text)
        is_gpu = event["cat"].startswith("gpu")
        event |= {"name": work.text, "cat": "instruction" if instruction else "command", "args": {}}
        if isinstance(instruction, Compute):
            event["args"] = {"stage": instruction.stage, "microbatch": instruction.microbatch}
        self._put(_ON_GPU if is_gpu else _INSTRUCTIONS, event, time)
        if instruction is not None and work.peer is not None and not is_gpu:
            self._take_end(work, instruction, time, time + event["dur"])

    def _take_end(self, work: NamedWork, instruction: Instruction, start: float, end: float) -> None:
        """The end of an arrow. Of what goes the same way in one command, the first send is for the first receive."""
        sent = instruction.kind.takes if instruction.kind.sends_to else instruction.kind.gives
        assert sent is not None
        value, microbatch = sent(instruction)
        way = (self.worker, work.peer) if instruction.kind.sends_to else (work.peer, self.worker)
        what = f"{work.command}/{value}.{microbatch}/{way[0]}/{way[1]}"
        self._moved[what] += 1
        key = f"{what}/{self._moved[what]}"
        arrow = {"name": f"{value}.{microbatch}", "cat": "value", "id": key}
        if instruction.kind.sends_to:
            self.sends.append((key, self.began / 1e9 + start / 1e6))
            self._put(_INSTRUCTIONS, {"ph": "s", **arrow}, start)
        else:
            self.receives.append((key, self.began / 1e9 + end / 1e6))
            self._put(_INSTRUCTIONS, {"ph": "f", "bp": "e", **arrow}, max(start, end - 1e-3))

    def _put(self, track: tuple[Any, Any], event: Event, time: float) -> None:
        number = self._tracks.setdefault(track, len(self._tracks))
        self._used.add(number)
        self._write(time, event | {"pid": self.worker + 1, "tid": self._thread(number)})

    def _thread(self, track: int) -> int:
        return (self.worker + 1) * _THREADS + track

    def _write(self, time: float, event: Event) -> None:
        self.lines.write(f"{time:.3f}\t{json.dumps(event)[1:]}\n")


def shifted(line: str, microseconds: float) -> str:
    """The JSON of an event that was written as a line.

    >>> shifted('1.500\\t"ph": "s"}\\n', microseconds=2.0)
    '{"ts": 3.500, "ph": "s"}'
    """
    time, rest = line.split("\t", 1)
    return f'{{"ts": {float(time) + microseconds:.3f}, {rest.rstrip()}'


@cache
def _instruction(text: str) -> Instruction | None:
    """The instruction that has this text; None if it is a command's."""
    try:
        return parse_instruction(text)
    except ValueError:
        return None
