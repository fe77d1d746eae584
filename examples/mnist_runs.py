"""The rows of the MNIST tables: a command line each, with what the BayesDLL paper reports for it."""

from dataclasses import dataclass, field

BUDGET = "--epochs 100 --lr 1e-2 --batch_size 128 --momentum 0.5 --val_heldout 0.5 --patience 10 --eval_every 2"
HEADLINE_SEEDS = 3


@dataclass(frozen=True)
class Run:
    """One row of the tables: a command line, and what the paper reports for it.

    Attributes:
        name: Names the result files.
        label: What the tables call it.
        flags: Of examples/mnist.py, without the seed and the folders.
        paper: By "nst0" and "nst5": error, pooled ECE and pooled MCE in percent, NLL times 100, as far as reported.
        seeds: How many seeds.
    """

    name: str
    label: str
    flags: str
    paper: dict[str, tuple[float, ...]] = field(default_factory=dict)
    seeds: int = 1


def paper_run(name, label, method, hparams, paper=None, seeds=1, flags=""):
    return Run(name, label, f"--method {method} --hparams {hparams} {BUDGET} {flags}".strip(), paper or {}, seeds)


VI = "prior_sig={},kld=1e-3,bias={},nst=5"
DROPOUT = "prior_sig={},p_drop=0.1,kld=1e-3,bias={},nst=5"
SGLD = "prior_sig={},Ninflate=1e3,burnin=5,thin=10,bias={},nst=5"
LAPLACE = "prior_sig={},Ninflate=1e3,bias={},nst=5"

HEADLINE = [
    paper_run(
        "vi", "VI", "vi", VI.format("1.0", "informative"),
        {"nst0": (2.25, 0.12, 14.64, 8.11), "nst5": (2.75, 0.11, 11.71, 8.57)}, HEADLINE_SEEDS,
    ),
    paper_run("vanilla", "vanilla, wd=0", "vanilla", "wd=0", {"nst0": (2.52, 0.22, 22.04, 9.54)}, HEADLINE_SEEDS),
    paper_run(
        "la", "Laplace, sigma=0.01", "la", LAPLACE.format("0.01", "informative"),
        {"nst0": (2.41, 0.24, 17.82, 9.45), "nst5": (1.51, 0.12, 8.04, 9.36)}, HEADLINE_SEEDS,
    ),
    paper_run(
        "mc_dropout", "MC-dropout, biases as weights", "mc_dropout", DROPOUT.format("1.0", "spikymix"),
        {"nst0": (2.47, 0.32, 21.83, 11.28), "nst5": (2.43, 0.18, 11.19, 8.75)}, HEADLINE_SEEDS,
    ),
    paper_run(
        "sgld", "SGLD", "sgld", SGLD.format("1.0", "informative"),
        {"nst0": (2.74, 0.23, 13.76, 10.00), "nst5": (2.75, 0.21, 13.56, 9.27)}, HEADLINE_SEEDS,
    ),
]  # fmt: skip
BIASES = [
    paper_run(
        "vanilla-wd", "vanilla, wd=1e-4", "vanilla", "wd=1e-4,bias=penalty", {"nst0": (2.55, 0.20, 17.33, 9.38)}
    ),
    paper_run(
        "vanilla-wd-ignore", "vanilla, wd=1e-4, not on biases", "vanilla", "wd=1e-4,bias=ignore", {"nst0": (2.50,)}
    ),
    paper_run(
        "vi-uninformative", "VI, flat prior on biases", "vi", VI.format("1.0", "uninformative"), {"nst0": (2.43,)}
    ),
    paper_run(
        "mc_dropout-gaussian", "MC-dropout, Gaussian biases", "mc_dropout", DROPOUT.format("1.0", "gaussian"),
        {"nst0": (2.47,)},
    ),
    paper_run(
        "mc_dropout-ignore", "MC-dropout, free biases", "mc_dropout", DROPOUT.format("1.0", "ignore"),
        {"nst0": (2.48,)},
    ),
    paper_run(
        "sgld-uninformative", "SGLD, flat prior on biases", "sgld", SGLD.format("1.0", "uninformative"),
        {"nst0": (2.73,)},
    ),
    paper_run(
        "la-uninformative", "Laplace, sigma=0.01, flat prior on biases", "la", LAPLACE.format("0.01", "uninformative"),
        {"nst0": (2.53,)},
    ),
]  # fmt: skip
NARROW = [
    paper_run(
        "vi-narrow", "VI, sigma=0.01", "vi", VI.format("0.01", "informative"),
        {"nst0": (2.26, 0.12, 11.50, 7.75), "nst5": (2.63, 0.10, 10.50, 8.44)},
    ),
    paper_run(
        "mc_dropout-narrow", "MC-dropout, sigma=0.01", "mc_dropout", DROPOUT.format("0.01", "spikymix"),
        {"nst0": (2.42, 0.32, 21.72, 11.24), "nst5": (2.52, 0.17, 22.27, 8.50)},
    ),
    paper_run(
        "sgld-narrow", "SGLD, sigma=0.01", "sgld", SGLD.format("0.01", "informative"),
        {"nst0": (2.70, 0.18, 11.95, 9.49), "nst5": (2.70, 0.16, 12.56, 9.42)},
    ),
]  # fmt: skip
WIDE_LAPLACE = [
    paper_run("la-wide", "Laplace, sigma=1", "la", LAPLACE.format("1.0", "informative"), flags="--tune val")
]


def our_run(name, label, prior_sig, p_drop, epochs, patience=10, nst=20, seeds=1):
    hparams = f"prior_sig={prior_sig},p_drop={p_drop},mean=expected,nst={nst}"
    flags = f"--epochs {epochs} --lr 0.1 --schedule cosine --batch_size 128 --momentum 0.9 --val_heldout 0.5"
    flags = f"--method mc_dropout --hparams {hparams} {flags} --patience {patience} --eval_every 2"
    return Run(name, label, flags, seeds=seeds)


OURS = [
    our_run(
        "ours-mc_dropout", "MC-dropout, sigma=0.2, p=0.3, 50 epochs", 0.2, 0.3, 50, patience=20, seeds=HEADLINE_SEEDS
    )
]
TRIALS = [
    our_run("trial-wide", "MC-dropout, sigma=0.3, p=0.3, 25 epochs", 0.3, 0.3, 25, nst=5),
    our_run("trial-dropped", "MC-dropout, sigma=0.3, p=0.5, 25 epochs", 0.3, 0.5, 25, nst=5),
    our_run("trial-tight", "MC-dropout, sigma=0.15, p=0.3, 30 epochs", 0.15, 0.3, 30),
]
RUNS = [*HEADLINE, *OURS, *WIDE_LAPLACE, *NARROW, *BIASES, *TRIALS]
