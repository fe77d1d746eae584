"""A fast slice of the zoo, and that the sweep notices what does not hold."""

import json
import sys
import warnings

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    # Transformers scripts functions of DeBERTa when it is imported, which torch calls deprecated.
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
    from zoo import __main__ as sweep
    from zoo import checks, worker
    from zoo.checks import Case, PlainModelError, Violation, check
    from zoo.configs import shrink
    from zoo.huggingface import transformers_names
    from zoo.vision import timm_names, torchvision_names

import transformers

from bayesify import bayesify

SLICE = {
    "torchvision": [
        "classification/squeezenet1_1",
        "classification/mnasnet0_5",
        "segmentation/lraspp_mobilenet_v3_large",
    ],
    "timm": [
        "vision_transformer/test_vit",
        "nfnet/test_nfnet",
        "efficientnet/test_efficientnet",
        "efficientvit_msra/efficientvit",
    ],
    "transformers": ["bert", "gpt2", "t5", "vit", "wav2vec2", "mamba", "clip"],
}


@pytest.mark.filterwarnings("ignore")  # what the libraries say about their own code
@pytest.mark.parametrize(("library", "name"), [(library, name) for library in SLICE for name in SLICE[library]])
def test_a_slice_of_the_zoo_holds(library, name):
    row = worker.verdict(library, name)
    assert row["verdict"] == "ok", row["reason"]
    assert row["parameters"] > 0


def test_the_sweep_covers_the_libraries():
    assert len(torchvision_names()) > 100
    assert {"classification/vit_h_14", "detection/maskrcnn_resnet50_fpn", "segmentation/fcn_resnet50"} <= set(
        torchvision_names()
    )
    assert len(timm_names()) > 150
    assert len({name.partition("/")[0] for name in timm_names()}) > 80


@pytest.mark.filterwarnings("ignore")  # of modules that are imported on the way
def test_parts_of_models_are_no_model_types(monkeypatch):
    few = dict.fromkeys(("vit", "bert", "edgetam_prompt_encoder", "edgetam_mask_decoder"))
    monkeypatch.setitem(transformers_names.__globals__, "CONFIG_MAPPING_NAMES", few)
    assert transformers_names() == ["bert", "vit"]


@pytest.mark.parametrize("how", ["narrow", "images kept", "tiny", "uniform", "deep"])
def test_a_shrunken_config_still_fits_together(how):
    config = shrink(transformers.Qwen2Config(), how)
    assert config.num_hidden_layers == len(config.layer_types) == 2
    assert config.vocab_size == 512
    assert config.hidden_size % config.num_attention_heads == 0
    assert config.num_attention_heads % config.num_key_value_heads == 0


# -- checks -----------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Bypass(Small):
    """Reads a weight behind the parametrization's back."""

    def forward(self, x):
        kept = getattr(self.last, "parametrizations", None)
        return super().forward(x) * (self.last.weight if kept is None else kept.weight.original).sum()


class Forgetful(Small):
    """Computes with a random number that is not in its state."""

    def __init__(self):
        super().__init__()
        self.secret = float(torch.rand(()))

    def forward(self, x):
        return super().forward(x) * self.secret


class Restless(Small):
    """Gives another output each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + self.calls


class Aloof(Small):
    """Has no gradients."""

    def forward(self, x):
        return super().forward(x).detach()


def case(build):
    return Case("a model", build, lambda model, training: ((torch.ones(2, 3),), {}))


def test_a_model_that_holds():
    assert check(case(Small)) == 3 * 4 + 4 + 4 * 2 + 2


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (Bypass, Violation, "plain model with that draw as its weights is not the same"),
        (Forgetful, PlainModelError, "loads the state dict of another gives another output"),
        (Restless, PlainModelError, "two passes of the plain model in eval mode, with the same seed, differ"),
        (Aloof, PlainModelError, "no output has a gradient"),
        (lambda: nn.Linear(4, 2), PlainModelError, "RuntimeError: "),
    ],
)
def test_what_does_not_hold_is_noticed(build, error, message):
    with pytest.raises(error, match=message):
        check(case(build))


def test_what_is_not_loaded_is_noticed(monkeypatch):
    monkeypatch.setattr(checks, "load", lambda model, folder: bayesify(model))
    with pytest.raises(Violation, match="eval output after save and load is not the same"):
        check(case(Small))


# -- the sweep --------------------------------------------------------------------------------------------------------


def test_a_verdict_has_a_reason(monkeypatch):
    for build, expected in ((Bypass, "fails"), (Aloof, "not run"), (Small, "ok")):
        monkeypatch.setattr(worker, "case_of", lambda library, name, build=build: case(build))
        row = worker.verdict("timm", "x")
        assert row["verdict"] == expected
        assert bool(row["reason"]) == (expected != "ok")


def test_a_slow_model_is_given_up(monkeypatch):
    class Slow(Small):
        def forward(self, x):
            try:
                worker._out_of_time()
            except Exception:  # a handler of ordinary errors does not keep it
                return super().forward(x)

    monkeypatch.setattr(worker, "case_of", lambda library, name: case(Slow))
    row = worker.verdict("timm", "x")
    assert row["verdict"] == "not run"
    assert "too long" in row["reason"]


def test_an_unknown_name_is_not_run():
    assert worker.verdict("timm", "nothing/nothing")["verdict"] == "not run"


def test_the_table_and_resuming(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "results/zoo.json")
    monkeypatch.setattr(sweep, "TABLE", tmp_path / "zoo.md")
    monkeypatch.setattr(sweep, "names_of", lambda library: [f"{library}-{i}" for i in range(3)])
    tried = []

    def run(library, names, **limits):
        for name in names:
            tried.append(name)
            verdict, reason = ("fails", "it bites") if name == "timm-1" else ("ok", "")
            yield {
                "library": library,
                "name": name,
                "model": name,
                "parameters": 7,
                "verdict": verdict,
                "reason": reason,
            }

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr("sys.argv", ["zoo", "--library", "timm"])
    sweep.main()
    assert tried == ["timm-0", "timm-1", "timm-2"]
    assert "| timm | 3 | 3 | 2 | 1 | 0 |" in sweep.TABLE.read_text()
    assert "| timm | timm-1 | it bites |" in sweep.TABLE.read_text()
    sweep.main()
    assert len(tried) == 3, "what has a verdict is not tried again"
    monkeypatch.setattr("sys.argv", ["zoo", "--library", "timm", "--again", "fails"])
    sweep.main()
    assert tried[3:] == ["timm-1"]
    assert len(json.loads(sweep.RESULTS.read_text())["rows"]) == 3


def test_a_crash_and_a_hang_end_their_process_only(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys, time\n"
        "for name in sys.argv[4:]:\n"
        "    if name == 'crash': os._exit(7)\n"
        "    if name == 'hang': time.sleep(60)\n"
        "    print('noise'); print('ZOO ' + json.dumps({'name': name, 'verdict': 'ok'}), flush=True)\n"
    )
    monkeypatch.setattr(sweep, "command_of", lambda *arguments: [sys.executable, str(script), *arguments])
    rows = list(sweep.run("timm", ["a", "crash", "b", "hang", "c"], timeout=0.1, memory=4.0))
    assert [row["name"] for row in rows] == ["a", "crash", "b", "hang", "c"]
    assert [row["verdict"] for row in rows] == ["ok", "not run", "ok", "not run", "ok"]
    assert "code 7" in rows[1]["reason"]
    assert "no verdict within 2 s" in rows[3]["reason"]
