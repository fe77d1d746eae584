"""A folder holds one whole checkpoint, whatever happened to those who wrote into it."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bayesify import bayesify, load, named_posteriors, save
from bayesify.core import fileformat

FILES = ["model.safetensors", "posterior.safetensors"]


def linear(value=0.0):
    model = nn.Linear(300, 300)
    nn.init.constant_(model.weight, value)
    return bayesify(model)


KILLED = """
import os, signal, sys, torch
from bayesify import bayesify, save
from bayesify.core import fileformat
def begin(tensors, path, metadata):
    # As safetensors does, which writes beside the file under a name of its own.
    (path.parent / ".tmpAbCdEf").write_bytes(b"a part")
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "rename":
    os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "write":
    fileformat.save_file = begin
else:
    os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
save(bayesify(torch.nn.Linear(3, 2)), sys.argv[1])
"""


@pytest.mark.parametrize("when", ["rename", "sync", "write"])
def test_a_later_save_cleans_up_after_a_killed_one(when, tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path, when], check=False)
    assert killed.returncode == -9
    left = os.listdir(tmp_path)
    assert left and all(name.startswith(".bayesify-") for name in left)
    for name in left:
        os.utime(tmp_path / name, (0, 0))
    save(linear(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == FILES


def test_a_full_disk_at_the_second_file_leaves_nothing(tmp_path, monkeypatch):
    save(linear(1.0), tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    real = fileformat.save_file

    def full(tensors, path, metadata):
        if "model.safetensors" in os.fspath(path):
            path.write_bytes(b"a part")
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(fileformat, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save(linear(2.0), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_concurrent_saves_end_with_whole_files(tmp_path):
    models = [linear(float(i)) for i in range(4)]
    failed = []

    def work(model):
        try:
            for _ in range(6):
                save(model, tmp_path)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(os.listdir(tmp_path)) == FILES
    restored = dict(named_posteriors(load(nn.Linear(300, 300), tmp_path)))["weight"].mean
    for weight in (restored, load_file(tmp_path / "model.safetensors")["weight"]):
        assert any(torch.equal(weight, torch.full_like(weight, i)) for i in range(4)), "a file of two models"


def test_only_old_temporaries_are_removed(tmp_path):
    kept = [".bayesify-at-work", "another"]
    for name in [*kept, ".bayesify-killed"]:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".bayesify-killed", (0, time.time() - fileformat.STALE - 1))
    os.utime(tmp_path / "another", (0, 0))
    save(linear(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, *FILES])


def test_files_and_then_the_folder_reach_the_disk(tmp_path, monkeypatch):
    seen = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (seen.append(os.path.isdir(f"/proc/self/fd/{file}")), real(file)))
    save(linear(), tmp_path)
    assert seen == [False, False, True]


def test_the_checksum_covers_names_types_shapes_bytes_and_metadata():
    x = torch.arange(4.0)
    variants = [
        ({"x": x}, {"a": "1"}),
        ({"y": x}, {"a": "1"}),
        ({"x": x.view(torch.int32)}, {"a": "1"}),
        ({"x": x.view(2, 2)}, {"a": "1"}),
        ({"x": x + torch.tensor([0, 0, 0, 1e-6])}, {"a": "1"}),
        ({"x": x}, {"a": "2"}),
        ({"x": x, "empty": torch.ones(0)}, {"a": "1"}),
    ]
    sums = [fileformat.checksum(*variant) for variant in variants]
    assert len(set(sums)) == len(sums)
    assert fileformat.checksum({"x": x}, {"a": "1", "checksum": "anything"}) == sums[0]
    for dtype in (torch.bfloat16, torch.bool, torch.int64):
        assert fileformat.checksum({"x": torch.ones((), dtype=dtype)}, {})
