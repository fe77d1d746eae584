"""From a posterior to files that need no bayesify: plain weights, an exported program with uncertainty, and a check.

    python examples/deploy.py [--heads 8] [--out deploy]

Trains the demonstration's network, gives its last layer a posterior, and writes: `model.safetensors` (the mean),
`posterior.safetensors` (everything), `served.pt2` (torch.export: probabilities and mutual information of some draws,
for which the body runs once), `mean.ts` (TorchScript) and, where onnxscript is installed, `mean.onnx`. Then another
process, which never imports bayesify, loads them.
"""

import argparse
import copy
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from bayesify import bayesify, fit_laplace, predict, sample, save, unbayesify
from bayesify.cli.demo import digits, trained

CHECK = """
import sys, torch
folder = sys.argv[1]
x = torch.load(folder + "/inputs.pt")
probs, information = torch.export.load(folder + "/served.pt2").module()(x)
logits = torch.jit.load(folder + "/mean.ts")(x)
print(f"without bayesify: {len(x)} images, mean confidence {probs.amax(1).mean():.3f}, of the mean alone "
      f"{logits.softmax(1).amax(1).mean():.3f}, mutual information {information.mean():.3f}")
assert "bayesify" not in sys.modules
"""


class Served(nn.Module):
    """The body once, several heads: averaged probabilities, and what the heads disagree about."""

    def __init__(self, body, heads):
        super().__init__()
        self.body = body
        self.weights, self.biases = (nn.Parameter(torch.stack(parts)) for parts in zip(*heads, strict=True))

    def forward(self, x):
        """Return probabilities (N, K) and mutual information (N,)."""
        logits = torch.einsum("nd,skd->snk", self.body(x), self.weights) + self.biases.unsqueeze(1)
        logs = logits.log_softmax(-1)
        probs = logs.exp().mean(0)
        entropy = -(probs * probs.clamp_min(1e-30).log()).sum(-1)
        return probs, entropy + (logs.exp() * logs).sum(-1).mean(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8, help="how many draws are served")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("deploy"))
    args = parser.parse_args()
    train, validation, test = digits(args.seed)
    model = bayesify(trained(train, args.seed), "la", include="4.*")
    fit_laplace(model, DataLoader(train, 100), structure="kron", tune=DataLoader(validation, 100))
    x = test.tensors[0][:200]
    save(model, args.out)
    torch.save(x, args.out / "inputs.pt")

    heads = []
    for i in range(args.heads):
        with sample(model, seed=args.seed + i):
            heads.append((model[4].weight.detach().clone(), model[4].bias.detach().clone()))
    plain = unbayesify(copy.deepcopy(model)).eval()
    served = Served(plain[:4], heads).eval()
    batch = {0: torch.export.Dim("batch", min=2)}
    torch.export.save(torch.export.export(served, (x,), dynamic_shapes=(batch,)), args.out / "served.pt2")
    torch.jit.trace(plain, x).save(str(args.out / "mean.ts"))
    try:
        torch.onnx.export(plain, (x,), dynamo=True, dynamic_shapes=(batch,), verbose=False).save(args.out / "mean.onnx")
    except ImportError as error:
        print(f"no mean.onnx: {error}")
    closed = predict(model, x)
    same = (served(x)[0].argmax(1) == closed.prediction).float().mean()
    print(f"{args.heads} heads and the closed form agree on {same:.1%} of the classes")
    for path in sorted(args.out.iterdir()):
        print(f"  {path.name:24}{path.stat().st_size / 1024:8.1f} KiB")
    subprocess.run([sys.executable, "-c", CHECK, str(args.out)], check=True)


if __name__ == "__main__":
    main()
