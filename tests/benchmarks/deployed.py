"""What uncertainty costs at run time, as docs/deploy.md says: deployed networks, novelty, and a server under load.

python -m tests.benchmarks.deployed            # some minutes; writes the page's section
python -m tests.benchmarks.deployed --pages    # the section alone, from the results
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from urllib.request import Request, urlopen

import torch

from bayesify import bayesify, deploy, fit_laplace, fit_novelty, predict
from bayesify.cli.demo import digits, trained
from examples.sections import write_section
from tests.benchmarks.timing import interleave

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs/results/deployed.json", ROOT / "docs/deploy.md"
NETWORKS = ("resnet18", "vit_tiny_patch16_224")
BATCH, BATCHES, ROUNDS, CLIENTS, REQUESTS = 4, 4, 20, 64, 640


def made(name):
    """Return a network of timm with 10 classes, not trained, and the name of its head."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    return model, model.default_cfg["classifier"]


def session(module, x, folder):
    """Return a function that runs a module in onnxruntime."""
    import onnxruntime

    path = Path(folder, "model.onnx")
    torch.onnx.export(module, (x,), path, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    found = onnxruntime.InferenceSession(path, options)
    given = {found.get_inputs()[0].name: x.numpy()}
    return lambda: found.run(None, given)


def network(name):
    """Return the ratios of one network: a deployed closed form to the plain network, novelty to no novelty."""
    plain, head = made(name)
    model, size = made(name)[0], plain.default_cfg["input_size"]
    batches = [(torch.randn(BATCH, *size), torch.arange(BATCH)) for _ in range(BATCHES)]
    fit_laplace(bayesify(model, "la", include=f"{head}.*"), batches)
    x, deployed = batches[0][0], deploy(model)
    # A body that has moved, so that the prior mean is another network.
    moved = bayesify(made(name)[0], "vanilla")
    with torch.no_grad():
        next(moved.parameters()).mul_(1.1)
    known = {at: bayesify(made(name)[0], "vanilla") for at in ("mean", "prior")}
    for at, other in known.items():
        other.load_state_dict(moved.state_dict())
        fit_novelty(other, batches, held_out=batches, at=at, false_alarms=0.5)
    inputs = [x for x, _ in batches]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        times = interleave({"eager, plain": lambda: plain(x), "eager": lambda: deployed(x)}, ROUNDS)
        sessions = {"onnxruntime, plain": session(plain, x, folder), "onnxruntime": session(deployed, x, folder)}
        times |= interleave(sessions, ROUNDS)
        turns = {
            "predict": lambda: predict(moved, inputs),
            "predict, at the mean": lambda: predict(known["mean"], inputs),
            "predict, at the prior": lambda: predict(known["prior"], inputs),
            "fit at the mean": lambda: fit_novelty(moved, batches, held_out=batches[:1], at="mean", false_alarms=0.5),
        }
        times |= interleave(turns, ROUNDS // 2)
    moved.__dict__.pop("novelty")
    base = {"eager": "eager, plain", "onnxruntime": "onnxruntime, plain"}
    kinds = ("eager", "onnxruntime", "predict, at the mean", "predict, at the prior", "fit at the mean")
    found = {kind: times[kind].cpu / times[base.get(kind, "predict")].cpu for kind in kinds}
    found["fit at the mean"] *= BATCHES / (BATCHES + 1)  # the held-out batch is no part of the pass
    numbers = sum(p.numel() for p in model.parameters()), sum(t.numel() for t in deployed.voices[0].buffers())
    return found | {"plain, ms": 1000 * times["eager, plain"].cpu, "numbers more": numbers[1] / numbers[0]}


def served():
    """Return percentiles of the milliseconds that clients wait, who all ask at once, and the requests per second."""
    from examples.serve import Server

    train, validation, test = digits(seed=0)
    model = bayesify(trained(train, seed=0), "la", include="4.*")
    fit_laplace(model, [train.tensors], structure="kron")
    fit_novelty(model, [train.tensors], held_out=[validation.tensors])
    rows = test.tensors[0]
    server = Server(deploy(model).exported(rows[:8]), 0, held_out=len(model.novelty.held_out))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/predict"

    def ask(i):
        body = json.dumps({"inputs": rows[i % len(rows)].unsqueeze(0).tolist()}).encode()
        begin = time.perf_counter()
        with urlopen(Request(address, body), timeout=60) as reply:
            json.load(reply)
        return 1000 * (time.perf_counter() - begin)

    begin = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        waits = list(pool.map(ask, range(REQUESTS)))
    rate = REQUESTS / (time.perf_counter() - begin)
    server.shutdown()
    places = statistics.quantiles(waits, n=100)
    return {"50": places[49], "95": places[94], "99": places[98], "per second": rate}


def section(found):
    """Return the page's section."""
    lines = [
        f"One thread's CPU time over that without uncertainty, batches of {BATCH}, taken in turns ({found['date']}):",
        "",
        "| network | plain, eager | deployed, eager | deployed, onnxruntime | `predict` with novelty, at the mean | "
        "at the prior | `fit_novelty`, over `predict` |",
        "|---" * 7 + "|",
    ]
    for name, row in found["networks"].items():
        kinds = ("eager", "onnxruntime", "predict, at the mean", "predict, at the prior", "fit at the mean")
        lines.append(f"| {name} | {row['plain, ms']:.0f} ms | " + " | ".join(f"{row[k]:.2f}" for k in kinds) + " |")
    wait = found["served"]
    lines += [
        "",
        f"The server, with {CLIENTS} clients at once and the digits' network: half of the answers within "
        f"{wait['50']:.0f} ms, 95 % within {wait['95']:.0f} ms, 99 % within {wait['99']:.0f} ms; "
        f"{wait['per second']:.0f} requests per second.",
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", action="store_true", help="measure nothing")
    if not parser.parse_args().pages:
        torch.set_num_threads(1)
        found = {"date": str(date.today()), "networks": {name: network(name) for name in NETWORKS}}
        found["served"] = served()
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    write_section(PAGE, "latency", section(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
