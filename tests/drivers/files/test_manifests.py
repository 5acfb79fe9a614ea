"""A `checkpoint.json` that is not as it was written is refused, whatever is in its place, and nothing else is loaded for it."""

import os
import random
import shutil
import socket
import warnings
from functools import partial

import pytest
import torch

from exps.manifests import OLDER, OTHER, REFUSED, SAME, as_version_1, flipped, same, saved_run
from pippy import PippyWarning, load_checkpoint
from pippy.drivers.files import synced_files
from pippy.drivers.files.contents import checkpoints_in
from pippy.drivers.files.manifest import read_manifest
from pippy.errors import CheckpointError
from tests.drivers.model.state.saved_runs import assert_equal, content_of, many, rewrite, text_of

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.timeout(60)]  # nothing may wait for what never comes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoints of steps 10 and 20."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved") / "run"
    saved_run(str(folder))
    return folder


@pytest.fixture
def newest(saved, tmp_path):
    """The newest checkpoint of a copy of the run."""
    return shutil.copytree(saved, tmp_path / "run") / "step-20"


def some_bits(path, count):
    return random.Random(7).sample(range(8 * (path / "checkpoint.json").stat().st_size), count)


def test_each_flipped_bit_is_refused(newest):
    """Of the bits of a manifest without a hash, one in a hundred loaded an older checkpoint or something else."""
    assert flipped(newest, some_bits(newest, 300)).keys() == {REFUSED}


def test_a_flipped_bit_of_an_earlier_version_is_no_error_of_python(newest):
    as_version_1(newest)
    assert flipped(newest, some_bits(newest, 300)).keys() <= {REFUSED, SAME, OLDER, OTHER}


def test_the_hash_is_that_of_the_file_without_its_last_entry(newest):
    text = (newest / "checkpoint.json").read_bytes()
    assert text == text_of(content_of(newest)) and len(text.splitlines()[-2]) == len(' "hash": ""') + 64


def test_checkpoints_of_an_earlier_version_are_loaded(threads, newest):
    expected = load_checkpoint(newest)
    as_version_1(newest)
    assert same(load_checkpoint(newest.parent), expected)
    _, driver, optimizer = many(threads)
    assert driver.load(newest.parent, optimizer=optimizer) == {"step": 20}
    assert_equal(
        {name: driver.state_dict()[name] for name in ("first.weight", "seen")},
        {name: expected["model"][name] for name in ("first.weight", "seen")},
    )
    driver.save(newest.parent, optimizer=optimizer, step=30)
    assert [os.path.basename(path) for path in checkpoints_in(newest.parent)] == ["step-10", "step-20", "step-30"]


def put(text):
    """These bytes in place of a manifest."""
    return lambda path: (path / "checkpoint.json").write_bytes(text)


def replaced(old, new):
    """A manifest in which the first occurrence of these bytes is changed, with the right hash."""
    return lambda path, version: put(text_of(content_of(path), version, lambda text: text.replace(old, new, 1)))(path)


def says(change):
    """A manifest that says something else, with the right hash."""
    return lambda path, version: rewrite(path, change, version)


def entry(*keys, value):
    """A manifest with another value at these keys, or without a value there for `...`."""

    def change(content):
        for key in keys[:-1]:
            content = content[key]
        if value is ...:
            del content[keys[-1]]
        else:
            content[keys[-1]] = value

    return says(change)


def renamed(name):
    """A manifest with another name of its first file."""

    def change(content):
        old = content["model"][0]
        content["model"][0], content["files"][name] = name, content["files"].pop(old)

    return says(change)


def without_optimizers(content):
    for name in content["optimizers"].pop("optimizer"):
        del content["files"][name]


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


FILE = "model-00001-of-00003.safetensors"
SAYS = {
    "the format of something else": (entry("format", value="pipqy checkpoint"), "does not say"),
    "no format": (entry("format", value=...), "does not say"),
    "no number": (entry("number", value=...), "manifest lacks 'number'"),
    "a number that is a text": (entry("number", value="2"), r"\['number'\] is '2', and must be a whole number"),
    "a number that is true": (entry("number", value=True), "is True, and must be"),
    "a number below 0": (entry("number", value=-1), "is -1, and must be"),
    "a number that is no number": (entry("number", value=float("nan")), "is nan, and must be"),
    "a number that is too large": (entry("number", value=10**4000), "is 1000.*…, and must be"),
    "a number without end": (replaced(b'"number": 2', b'"number": 2' + b"2" * 5000), "Exceeds the limit"),
    "an entry more": (entry("more", value=1), "has, and must not have, 'more'"),
    "an entry twice": (replaced(b'"number": 2', b'"number": 2,\n "number": 2'), "a key stands twice"),
    "files that are a list": (entry("files", value=[1]), "is a list, and must be an object"),
    "other bytes": (entry("files", FILE, "bytes", value=3), r"has \d+ bytes, and 3 were written"),
    "no hashes": (entry("files", FILE, "hashes", value=...), "lacks 'hashes'"),
    "no hash of the values": (entry("files", "values.pt", "hashes", value={}), "values.pt is damaged"),
    "a model of numbers": (entry("model", value=[1]), "is 1, and must be a string"),
    "a file of the model that is not listed": (entry("model", value=["x.safetensors"]), "differ at"),
    "no values": (entry("files", "values.pt", value=...), "differ at 'values.pt'"),
    "tied to nothing": (entry("tied", value={"last.weight": "nothing"}), "tied has 'last.weight'"),
    "tied to something by a name of another": (entry("tied", value={"first.bias": "first.weight"}), "tied has 'first.bias'"),
    "tied to a list": (entry("tied", value={"last.weight": nested(500)}), "is a list, and must be a string"),
    "no optimizers": (entry("optimizers", value={}), "differ at 'optimizer-"),
    "no optimizers and none of their files": (says(without_optimizers), r"states of optimizers \[\], and values.pt options"),
    "an optimizer without files": (entry("optimizers", "optimizer", value=[]), "differ at 'optimizer-"),
    "an optimizer that was not saved": (entry("optimizers", "more", value=[]), r"'more'\], and values.pt options"),
    "the model's file as the optimizer's": (says(lambda content: content["optimizers"]["optimizer"].append(FILE)), "differ"),
    "a file elsewhere": (renamed("../../x.safetensors"), "differ at '../../x"),
    "no name": (renamed(""), "is a folder, and not a file"),
    "the folder": (renamed("."), "is a folder, and not a file"),
    "a name that cannot be": (renamed("x\0y"), "null byte"),
    "a name that is no text": (renamed("\ud800"), "surrogates not allowed"),
}  # fmt: skip
VERSIONS = {repr(each)[:9]: each for each in ("x", 0, 3, -1, True, 1.0, None, [2], nested(500), 10**4000)}
TEXTS = {
    "nothing": b"",
    "a null": b"null",
    "a list": b"[1]",
    "lists without end": b"[" * 100_000,
    "lists in lists": b"[" * 100_000 + b"]" * 100_000,
    "objects in objects": b'{"format":' * 100_000 + b"1" + b"}" * 100_000,
    "another encoding": '{"format": "pippy checkpoint"}'.encode("utf-16"),
    "no text": b'{"format": "pippy\xff checkpoint"}',
}


def assert_refused(path, words):
    """By its own path, and as the newest of its run; the message says where, and what can be loaded."""
    for load in (partial(load_checkpoint, path), partial(load_checkpoint, path.parent)):
        with pytest.raises(CheckpointError, match=f"(?s){path}.*{words}") as caught:
            load()
        assert "load another checkpoint" in str(caught.value) or "give a folder of safetensors" in str(caught.value)
        assert len(str(caught.value)) < 1000 + len(str(path))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("what", SAYS)
def test_a_manifest_that_says_something_else_is_refused(newest, what, version):
    change, words = SAYS[what]
    change(newest, version)
    assert_refused(newest, words)


@pytest.mark.parametrize("what", VERSIONS)
def test_a_version_that_is_not_known_is_refused(newest, what):
    rewrite(newest, lambda content: content.update(version=VERSIONS[what]), version=None)
    # Two are equal to 1 in Python.
    assert_refused(newest, "version is " if VERSIONS[what] != 1 else "must not have, 'hash'")


@pytest.mark.parametrize("what", TEXTS)
def test_what_is_no_manifest_is_refused(newest, what):
    put(TEXTS[what])(newest)
    assert_refused(newest, "checkpoint.json is damaged, or was not written by pippy: it ")


def test_a_hash_is_neither_left_out_nor_added(newest):
    text = text_of(content_of(newest), 1)
    put(text.replace(b'"version": 1', b'"version": 2'))(newest)
    assert_refused(newest, "the hash of its bytes is not the hash of what was written")
    put(text_of(content_of(newest)).replace(b'"version": 2', b'"version": 1'))(newest)
    assert_refused(newest, "has, and must not have, 'hash'")


def cut_everywhere(path):
    data = (path / "checkpoint.json").read_bytes()
    return [data[:length] for length in range(0, len(data), 97)]


def test_a_manifest_that_is_cut_anywhere_is_refused(newest):
    for text in cut_everywhere(newest):
        put(text)(newest)
        assert_refused(newest, "")


def listening(path):
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(os.path.relpath(path))  # a socket's path has at most 107 bytes


PLACES = {
    "a pipe": (os.mkfifo, "is a pipe, and not a file"),
    "a folder": (os.mkdir, "is a folder, and not a file"),
    "a socket": (listening, "is a socket, and not a file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, and not a file"),
    "a link to itself": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), ""),
    "nothing": (lambda path: None, ""),
}


@pytest.mark.parametrize("name", ["checkpoint.json", "values.pt", FILE, "model.safetensors.index.json"])
@pytest.mark.parametrize("what", PLACES)
def test_what_is_no_file_is_not_opened(newest, monkeypatch, what, name):
    monkeypatch.chdir(newest)
    put_there, words = PLACES[what]
    (newest / name).unlink()
    put_there(newest / name)
    assert_refused(newest, words)


def test_a_pipe_that_is_named_itself_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError, match="is a pipe, and not a file"):
            load_checkpoint(path)


def test_a_manifest_that_is_too_large_is_not_read(newest):
    os.truncate(newest / "checkpoint.json", 1 << 40)
    assert_refused(newest, "has more than 134217728 bytes")


def test_what_the_error_advises_loads_the_other_checkpoint(newest):
    put(b"{}")(newest)
    with pytest.raises(CheckpointError, match="its own path, or move step-20 out of the run"):
        load_checkpoint(newest.parent)
    assert load_checkpoint(newest.parent / "step-10")["step"] == 10
    newest.rename(newest.parent.parent / "step-20")
    assert load_checkpoint(newest.parent)["step"] == 10


def test_a_save_beside_a_damaged_checkpoint_warns_and_is_whole(threads, newest):
    put(b"{}")(newest)
    _, driver, optimizer = many(threads)
    with pytest.warns(PippyWarning, match=r"step-20/checkpoint\.json is damaged"):
        path = driver.save(newest.parent, optimizer=optimizer, step=30, keep=1)
    assert sorted(os.listdir(newest.parent)) == [".lock", "step-20", "step-30"]
    assert load_checkpoint(path)["step"] == 30
    with pytest.raises(CheckpointError, match=r"step-20/checkpoint\.json is damaged"):
        load_checkpoint(newest.parent)
    shutil.rmtree(newest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        driver.save(newest.parent, optimizer=optimizer, step=40)


def test_folders_that_are_no_checkpoints_may_be_in_a_run(newest):
    (newest.parent / "logs").mkdir()
    shutil.copy(newest / FILE, newest.parent / "logs" / "model.safetensors")
    assert read_manifest(str(newest.parent / "logs")) is None
    assert load_checkpoint(newest.parent)["step"] == 20


def test_a_pipe_that_comes_after_it_was_looked_at_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(synced_files, "regular_size", lambda path: 3)
    with pytest.raises(OSError, match="Illegal seek"):
        synced_files.read_file(str(tmp_path / "pipe"))
