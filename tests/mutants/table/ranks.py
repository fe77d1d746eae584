"""Mistakes that only more than one process can make."""

from .rows import of

MUTANTS = [
    *of(
        "core/distributed.py",
        "test_fsdp.py",
        (
            "every part has the noise of the first",
            '"start": layout.start',
            '"start": 0',
            "train",
        ),
        ("the padding row is in every part", "layout.row(sharded.fixed_row)", "sharded.fixed_row", "train"),
        (
            "the penalty is that of a part",
            "torch.distributed.all_reduce(values,",
            "torch.distributed.barrier(",
            "train",
        ),
    ),
    *of(
        "core/ranks.py",
        "test_ddp.py",
        ("replicas keep their own priors", "    if around is None or", "    if True or around is None or", "train"),
    ),
    *of(
        "core/reading.py",
        "test_ddp.py",
        ("same_draw does nothing", "shared_seed() if self.method.same_draw", "shared_seed() if False", "same_draw"),
    ),
    *of(
        "prediction",
        "test_ddp.py",
        ("parts come in the order of ranks", "for place in sorted(rows)", "for place in rows", "in_order"),
        ("each process calibrates for itself", "sum(total for total, _ in found)", "found[0][0]", "every_rank_finds"),
    ),
]
