"""From a posterior to files that need no bayesify: torch.export, TorchScript and ONNX with uncertainty, and a check.

    python examples/deploy.py [--out deploy]

Trains the demonstration's network, gives its last layer a posterior and its inputs a novelty, and writes `model.pt2`,
`model.ts` and, where onnxscript is installed, `model.onnx`. Then another process, which cannot import bayesify,
compares them with what `predict` gave.
"""

import argparse
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from bayesify import bayesify, deploy, fit_laplace, fit_novelty, metrics, predict
from bayesify.cli.demo import digits, trained

CHECK = """
import sys, torch
sys.modules["bayesify"] = None  # an import fails
from pathlib import Path
folder = Path(sys.argv[1])
x, probs, pvalues = torch.load(folder / "expected.pt")
found = {"torch.export": torch.export.load(folder / "model.pt2").module()(x)}
found["TorchScript"] = torch.jit.load(folder / "model.ts")(x)
if (folder / "model.onnx").exists():
    import onnxruntime
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    found["ONNX"] = dict(zip(names, map(torch.tensor, session.run(None, {session.get_inputs()[0].name: x.numpy()}))))
for name, answers in found.items():
    away = (answers["probs"] - probs).abs().max()
    print(f"without bayesify, {name}: probabilities of {len(x)} images within {away:.0e}, "
          f"p-values equal: {bool((answers['novelty_pvalue'] == pvalues).all())}")
"""


def write(out, seed):
    """Deploy the digits' network, write its files, and let another process read them."""
    train, validation, test = digits(seed)
    model = bayesify(trained(train, seed), "la", include="4.*")
    fit_laplace(model, DataLoader(train, 100), structure="kron", tune=DataLoader(validation, 100))
    fit_novelty(model, DataLoader(train, 100), held_out=DataLoader(validation, 100))
    held_out = predict(model, DataLoader(validation, 100))
    threshold = metrics.abstain_threshold(held_out.probs, held_out.labels, max_risk=0.1)
    deployed, x = deploy(model, threshold=threshold), test.tensors[0][:200]
    found = predict(model, x)
    answered = deployed(x)["answer"]
    same = torch.equal(answered, found.select(threshold) & ~found.alarm())
    print(f"answers {answered.float().mean():.1%} of {len(x)} images, as predict does: {same}")
    out.mkdir(parents=True, exist_ok=True)
    for ending in (".pt2", ".ts", ".onnx"):
        try:
            deployed.save(out / f"model{ending}", x)
        except ImportError as error:
            print(f"no model{ending}: {error}")
    torch.save((x, found.probs, found.novelty_pvalue), out / "expected.pt")
    subprocess.run([sys.executable, "-c", CHECK, str(out)], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("deploy"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # what torch's exporters deprecate
    write(args.out, args.seed)


if __name__ == "__main__":
    main()
