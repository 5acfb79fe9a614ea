"""What every engine does, tried on workers that run scripted commands (see scripted_worker.py).

Under torchrun all of it runs in the script of a job: so these are functions, and each takes a cluster of two such workers.
"""

import logging
import os
from contextlib import contextmanager

import pytest

from pippy.drivers.base.errors import ClusterError, WorkerLostError
from pippy.drivers.protocol.commands import Ping
from pippy.ir.base.logs import LOGGER
from tests.drivers.processes import until, within


def ask(session, worker, *message):
    """What the worker's main thread answers."""
    return session.answer(session.send(worker, message))


def the_workers_are_where_their_addresses_say(cluster):
    session = cluster.session
    assert [each.name for each in session.workers] == list(cluster.workers)
    assert [ask(session, worker, "pid") for worker in range(2)] == [each.pid for each in session.workers]


def messages_are_answered_in_their_order(cluster):
    session = cluster.session
    calls = [session.send(0, ("note", number)) for number in range(50)]
    assert len(list(session.completed(calls))) == 50
    assert ask(session, 0, "noted")[-50:] == list(range(50))


def a_message_shares_nothing_with_the_controller(cluster):
    import torch

    given = torch.ones(3)
    answer = ask(cluster.session, 1, "echo", given)
    given.zero_()
    assert answer.sum() == 3


def urgent_messages_are_answered_while_a_worker_computes(cluster):
    session = cluster.session
    busy = session.send(0, ("hold",))
    with within(10):
        assert session.answer(session.urgent(0, ("await_begun",)))
        session.answer(session.urgent(0, Ping()))
        assert not busy.done
        session.answer(session.urgent(0, ("release",)))
        assert session.answer(busy) == "released"


def one_worker_is_answered_while_another_computes(cluster):
    session = cluster.session
    busy = session.send(0, ("hold",))
    session.answer(session.urgent(0, ("await_begun",)))
    assert ask(session, 1, "echo", 4) == 4
    session.answer(session.urgent(0, ("release",)))
    session.answer(busy)


@contextmanager
def info_is_logged():
    """A script whose level was set before its workers start."""
    before = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.setLevel(before)


def what_workers_log_comes_to_the_script_with_their_names(cluster):
    """From the level on that the script's logger had as they started. Once, also where a worker is a thread of the script."""
    taken, handler, session = [], logging.Handler(), cluster.session
    handler.emit = taken.append
    LOGGER.addHandler(handler)
    try:
        for worker, name in enumerate(cluster.workers):
            for level in logging.INFO, logging.DEBUG, logging.WARNING:
                ask(session, worker, "tell", level, f"record of level {level}")
            session.heard(worker, session.answer(session.ping(worker)))
            found = [each for each in taken if each.name == "pippy.scripted"]
            taken.clear()
            assert [each.threadName for each in found] == [f"pippy {name}"] * 2
            assert {getattr(each, "worker", name) for each in found} == {name}
            assert [each.getMessage().removeprefix(f"{name}: ") for each in found] == [
                "record of level 20",
                "record of level 30",
            ]
    finally:
        LOGGER.removeHandler(handler)


def nobody_has_died(cluster):
    assert cluster.engine.deaths() == {}


def a_worker_is_replaced_or_the_reason_is_given(cluster):
    """After this, the workers are new, or as they were."""
    engine, session = cluster.engine, cluster.session
    if engine.fixed is not None:
        with pytest.raises(ClusterError) as refused:
            engine.replace([1])
        assert str(refused.value) == engine.fixed
        return
    before = session.workers
    with within(session.timeout + session.interval + 1), pytest.raises(WorkerLostError) as lost:
        session.answer(session.urgent(1, ("exit", 3)))
    assert lost.value.index == 1 and str(lost.value).endswith(engine.recovery_advice)
    assert list(engine.deaths(20.0)) == [1]
    session.renew(engine.replace([1]))
    assert session.workers[0] == before[0] and session.workers[1].pid != before[1].pid
    assert engine.deaths() == {} and ask(session, 1, "pid") == session.workers[1].pid


def a_worker_that_computes_is_replaced(cluster):
    """As one that has not given up in time what it did, but answers pings."""
    engine, session = cluster.engine, cluster.session
    if engine.fixed is not None:
        return
    before = session.workers
    session.send(1, ("hold",))
    assert session.answer(session.urgent(1, ("await_begun",)))
    assert session.mark_lost(1, "it goes on").index == 1
    with within(session.timeout):
        session.renew(engine.replace([1]))
    assert session.workers[0] == before[0] and session.workers[1].pid != before[1].pid
    assert engine.deaths() == {} and [ask(session, worker, "echo", 7) for worker in range(2)] == [7, 7]


def a_worker_is_ended_and_started_again_or_the_reason_is_given(cluster):
    engine, session = cluster.engine, cluster.session
    if engine.fixed is not None:
        with pytest.raises(ClusterError) as refused:
            engine.end([1])
        assert str(refused.value) == engine.fixed
        return
    pid = session.workers[1].pid
    for _ in range(2):
        engine.end([1])
    assert engine.deaths() == {}
    session.renew({}, [1])
    assert cluster.gone == {1} and ask(session, 0, "pid") == session.workers[0].pid
    session.renew(engine.replace([1]))
    assert not cluster.gone and ask(session, 1, "pid") == session.workers[1].pid != pid
    assert engine.deaths() == {}


def the_system_says_what_workers_do(cluster):
    session = cluster.session
    for worker, address in enumerate(session.workers):
        if address.pid != os.getpid():  # in another process
            assert until(lambda: session.sign(worker) is not None)  # noqa: B023
            assert session.sign(worker).state in "RSD"


def all_end_and_once_is_enough(cluster):
    """The last one: after this nothing can be sent."""
    with within(10):
        cluster.close()
        cluster.close()
        cluster.engine.close()
    with pytest.raises(ClusterError, match="this cluster is closed"):
        cluster.session.send(0, ("echo", 1))


CONTRACT = [
    the_workers_are_where_their_addresses_say,
    messages_are_answered_in_their_order,
    a_message_shares_nothing_with_the_controller,
    urgent_messages_are_answered_while_a_worker_computes,
    one_worker_is_answered_while_another_computes,
    what_workers_log_comes_to_the_script_with_their_names,
    nobody_has_died,
    the_system_says_what_workers_do,
    a_worker_is_replaced_or_the_reason_is_given,
    a_worker_that_computes_is_replaced,
    a_worker_is_ended_and_started_again_or_the_reason_is_given,
    messages_are_answered_in_their_order,
    the_system_says_what_workers_do,
    all_end_and_once_is_enough,
]


def keep(cluster):
    """Try all of it on one cluster, in this order."""
    for each in CONTRACT:
        each(cluster)
