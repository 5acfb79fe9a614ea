"""What happens when things go wrong at random: is every fault noticed, how soon, and is anything left behind?

Command: ``python -m exps.faults --count 334 --seed 1``, and at the same time seeds 2 and 3: 1,000 faults.

Finding: seeds 4, 5 and 6 at once, beside the whole suite of tests on the same two cores (a load of 5 to 9): 977 faults, 734 on
local clusters, 146 under torchrun on one host and 97 on two. Each was noticed within its bound and with the right error,
nothing was left behind, and the next cluster was right. (It is not 1,000, as what loses a worker
ends its group; ``--count 30 --seed 7`` had 30 more, none wrong.) How many,
and the slowest in seconds: exceptions, `sys.exit` and values that cannot be read 412 and 0.23, in an optimizer 60 and
15 (the first one on a worker imports much of torch, and waits for a core), while stages are loaded 62 and 0.1; no memory,
descriptors or shared memory 179 and 1.0, of which 0.4 are waited for; Ctrl-C 124 and 0.21, anywhere 10 and 6.5; a
lid 55 and 0.4 beyond the time of the stop; killed 39 and 0.6; cut connections 13 and 0.9, a host that is cut off
1 and 4.2; a stopped worker 15 and 4.2, a stopped fork server 7, which goes unnoticed.

300 of each engine (seeds 9001 local, 9101 joined, 9201 ranks, 9301 hosts, 9401 ray, at a load of 5 to 15): on local clusters,
with joined workers and on ranks of one host none was wrong. On two hosts two groups hung: a rank that had no memory for a
thread when it was told to leave waited in RPC for ever; it ends now, and the group is right when it is repeated. On Ray two
workers that got no processor for 3 s, the timeout of the campaign, were lost.

The 771 faults before, of seeds 1 to 3, found a rank of another host that waited for ever, five times: it had no memory to be
told that its controller was gone. Earlier campaigns, of 1,900 faults, found Ctrl-C that torch or Python dropped, and file
descriptors that Ctrl-C left open.

On Ray, ``--places ray --count 300 --seed 11`` and ``--count 150 --seed 12``, at a load of 8 to 16: 450 faults, among them 10
of connections that were cut, 8 killed heads, 7 killed nodes and 5 stopped workers, noticed in 0.6, not at all (steps go on),
1.1 and 4.2 s at most; no actor was left. Two pings were unanswered for 3 s, when workers still had the lower priority that Ray
gives them; with that of other processes both groups were right, each time. One cut met workers without a neighbour on their
host, and cut nothing; since then it cuts connections to other hosts, too. Since actors start on threads of their own,
``--places ray --count 24 --deadly 0.4 --seed 31`` had 24 more, none wrong.

Of workers that join, ``--places joined --count 110 --seed 21`` and ``--count 60 --deadly 0.4 --seed 22``, at a load of 5 to 9:
170 faults, among them 13 of connections that were cut, 10 killed controllers, 7 stopped workers, 5 killed ones and 12 of Ctrl-C
anywhere, noticed in 0.6, not at all (all end), 4.2, 0.1 and 3.4 s at most; no process was left. One was wrong: a cut connection
for messages raised a ClusterError of no worker, since a ping went through the worker's other connection. With that mended,
none of the second group was.

With stages that never end, locks that are held and fork servers that are replaced, ``--places local --deadly 0.3 --seed 41`` at
a load of 8 to 14: 157 faults, none wrong; a stage that never ends was lost 3.2 s after the call that waited for it, a worker
that held Python's lock for 6 s was not.

A controller, in a process of its own, trains a model on 2 to 4 workers by a schedule chosen at random: on a local cluster,
on actors of a Ray with two nodes, on workers that join (one of which shares no memory with the others), under torchrun on one
host, or under torchrun on two (network namespaces). A fault is

- an exception or `sys.exit` in an instruction, in the optimizer or while stages are loaded; a value that cannot be pickled, or
  not be unpickled;
- Ctrl-C, or two, in a step, in three that are under way, in a recording, a count of memory, `pipeline` or `state_dict`;
- a worker that has no memory, no file descriptor or no shared memory for a moment: a step succeeds or raises;
- a stage that never ends, given up by Ctrl-C: the next call ends within the ``timeout``, and the worker is lost; one that
  computes with Python's lock for longer than that, which goes unnoticed;
- a lid: all processes are stopped for up to 5 s, and go on as if nothing had been;
- SIGKILL or SIGSTOP of a worker or of the fork server at a random moment of a step; SIGKILL of the controller. After a killed
  fork server the driver recovers, with another one, and a step must be right;
- a cut connection: all sockets of a worker to other workers are shut down in a step; `ss -K` of all connections of TCP among
  the ranks, or between two hosts; a host that is cut off without a word, or all of whose processes are killed;
- the raylet of a node of Ray is killed; the head is killed, and steps go on;
- Ctrl-C at any instant, of the start, of steps or of the end, under torchrun for all processes: the controller ends.

After each fault the controller must raise the right error within the bound of exps/injected/kinds.py, which grows with the load
of the machine. If the cluster survives, another step must give the plain model's gradients and loss; if not, another cluster
must: in the same process, or the next under torchrun. A controller that prints nothing for 60 s counts as hung. A process that
exists 5 s after the end of its controller counts as left behind (10 s if it is an actor, 45 s under torchrun, which kills what
is stopped after 30 s),
and so do descriptors, maps of shared memory and files. Clusters have ``timeout=3.0``. A worker that was stopped under torchrun
goes on after the report, and must end by itself.

The status is 1 if something was wrong. Then the options are printed that repeat the group of faults in which it was.
"""

import argparse
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

from exps.injected.controller import play
from exps.injected.kinds import ALL_DEADLY, ANYWHERE, DEADLY, GENTLE
from exps.injected.training import Report
from exps.injected.watch import watch
from exps.peers.hosts import NoHosts, hosts

PLACES = {"local": 0.6, "ray": 0.1, "joined": 0.1, "ranks": 0.15, "hosts": 0.15}  # the shares of the groups of faults


def rounds(
    count: int, seed: int, share: float, kinds: list[str], places: list[str]
) -> Iterator[tuple[str, int, list[str]]]:
    """Groups of faults, one for each controller: where, a seed, and the kinds. A deadly fault is the last of its group."""
    rng = random.Random(seed)
    number = 0
    while count > 0:
        place = rng.choices(places, [PLACES[each] for each in places])[0]
        last = rng.choice(DEADLY[place])
        size = 1 if last == ANYWHERE else min(count, 1 + round((1 - share) / share))
        yield place, seed * 10_000 + number, [rng.choice(kinds) for _ in range(size - 1)] + [last]
        count, number = count - size, number + 1


def table(reports: Iterable[tuple[str, Report]]) -> str:
    """A line for each place and kind."""
    rows = list(reports)
    text = [f"{'kind':<24}{'count':>6}{'slowest, s':>12}{'wrong':>7}"]
    for place in PLACES:
        for kind in [*GENTLE, *ALL_DEADLY]:
            own = [row for at, row in rows if at == place and row.kind == kind]
            if own:
                wrong = sum(bool(row.wrong) for row in own)
                slowest = max(row.seconds for row in own)
                text.append(f"{f'{place}: {kind}':<24}{len(own):>6}{slowest:>12.2f}{wrong:>7}")
    return "\n".join(text)


def possible(places: list[str]) -> list[str]:
    """Those of the places that can be had here."""
    if "ray" in places and find_spec("ray") is None:
        print("nothing on Ray, which is not installed", file=sys.stderr)
        places = [each for each in places if each != "ray"]
    try:
        with hosts(1):
            return places
    except NoHosts as error:
        if "hosts" in places:
            print(f"nothing on two hosts: {error}", file=sys.stderr)
        return [each for each in places if each != "hosts"]


def main() -> None:
    """Inject faults, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadly", type=float, default=0.08, help="the share of faults that end a process")
    parser.add_argument(
        "--kinds", nargs="+", choices=GENTLE, default=GENTLE, help="of the faults that a cluster survives"
    )
    parser.add_argument("--places", nargs="+", choices=PLACES, default=[*PLACES])
    parser.add_argument("--repeat", nargs="+", metavar=("PLACE", "KIND"), help="PLACE SEED KIND ...: one group again")
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        seed, place, *kinds = given.play
        play(int(seed), place, kinds)
        return
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell lets what it runs in the background ignore Ctrl-C
    if given.repeat:
        place, seed, *kinds = given.repeat
        groups: Iterable[tuple[str, int, list[str]]] = [(place, int(seed), kinds)]
    else:
        groups = rounds(given.count, given.seed, given.deadly, given.kinds, possible(given.places))
    reports, again = [], []
    for place, seed, kinds in groups:
        for report in watch(place, seed, kinds):
            reports.append((place, report))
            print(place, report, file=sys.stderr, flush=True)
            if report.wrong:
                words = " ".join(f'"{kind}"' if " " in kind else kind for kind in kinds)
                again.append(f"{place}: {report.kind}: {report.wrong[:600]}\n  --repeat {place} {seed} {words}")
    print("\n".join([table(reports), *again]), flush=True)
    sys.exit(bool(again))


if __name__ == "__main__":
    main()
