"""Mistakes in mixtures, in what is collected along a path, and in what tells whether chains are any good."""

from .rows import of

MUTANTS = [
    *of(
        "methods/swag.py",
        "test_swag.py",
        ("the low rank is a layer's own", "_replace(key=SHARED, shape", "_replace(shape", "across_layers"),
        ("both parts in full", "(self.scatter / (2 * (", "(self.scatter / (1 * (", "covariance"),
        ("divided by K", "math.sqrt(2 * (len(self.iterates) - 1))", "math.sqrt(2 * len(self.iterates))", "covariance"),
        (
            "the newest is overwritten",
            "self.iterates[(self.collected - 1) % self.most]",
            "self.iterates[-1]",
            "covariance",
        ),
        ("one iterate is enough", "return self.collected > 1", "return self.collected > 0", "nothing_to_sample"),
        ("noise on the padding row", "noise[self.fixed_row] = 0", "pass", "padding"),
    ),
    *of(
        "methods/cycles.py",
        "test_cycles.py",
        ("a constant rate in a cycle", "(1 + math.cos(math.pi * r)) / 2", "1.0", "cosine"),
        ("the rate of the last step before", "max(float(base), lr)", "lr", "quarter"),
        ("an end one step early", "place.step + 1 == place.length", "place.step + 2 == place.length", "quarter"),
        ("a resumed schedule keeps the first rates", "self._last_lr, strict", "self.base_lrs, strict", "goes_on"),
    ),
    *of(
        "methods/ensemble.py",
        "test_ensemble.py",
        (
            "members go on where the last one ended",
            "own.original.copy_(own.mean_theta",
            "id(own.mean_theta",
            "prior_mean or every",
        ),
        ("statistics go on", "norm_statistics.write_start(scope.root)", "pass", "belong_to_members"),
    ),
    *of(
        "methods/ensemble.py",
        "test_ensemble.py",
        ("always the first member", "number % len(self.members)", "0", "equally_often"),
        ("the soup of some", "members.mean(0, dtype", "members[1:].mean(0, dtype", "soup"),
    ),
    *of(
        "methods/stages.py",
        "test_ensemble.py",
        (
            "one head for all",
            "noises.mix(noises.mix(self.seed, number), place)",
            "self.seed",
            "bit_for_bit or training",
        ),
        ("momentum of the member before", "self.run.optimizer.state.clear()", "pass", "training_of_its_own"),
    ),
    *of(
        "methods/stages.py",
        "test_cycles_members.py",
        ("copies go on where the last one ended", "posterior.original.copy_(posterior.prior_mean)", "pass", "start"),
        (
            "spreads go on",
            "        for posterior in posteriors:\n            posterior.forget()",
            "        pass",
            "start",
        ),
        ("a resumed run has other members", "member.load_state_dict(tensors)", "pass", "bit_for_bit"),
    ),
    *of(
        "methods/norm_statistics.py",
        "test_ensemble.py",
        ("one layer's statistics for all members", "return every[number % len(every)]", "return every[0]", "belong_to"),
        ("the layer keeps a member's", "norm._buffers.update(self.own.pop())", "self.own.pop()", "error"),
    ),
    *of(
        "prediction/view.py",
        "test_swag.py",
        (
            "the last batch counts most",
            "norm.momentum, norm.training = None, True",
            "norm.training = True",
            "every_sample",
        ),
        (
            "the model loses its own statistics",
            "finally:\n        _put_back(norms, kept)",
            "finally:\n        pass",
            "every_sample",
        ),
    ),
    *of(
        "methods/sgld.py",
        "test_cycles_sgld.py",
        ("noise all the time", "float(not explores)", "1.0", "below_beta"),
        ("the chain collects too", "float(not explores), False", "float(not explores), True", "below_beta"),
        ("moments of all cycles together", "posterior.forget()", "pass", "member"),
    ),
    *of(
        "prediction/predictive.py",
        "test_mixtures.py",
        ("a sum, not an average", "(total - math.log(count))", "total", "five or closed"),
    ),
    *of(
        "prediction/averages.py",
        "test_mixtures.py",
        ("no spread between members", "within + (means - mean).square().mean(0)", "within", "regression"),
        (
            "member after member",
            "for turn in range(most) for piece in kept",
            "for piece in kept for turn in range(most)",
            "draws",
        ),
    ),
    *of(
        "core/mixture.py",
        "test_mixtures.py",
        (
            "members share their statistics",
            "(name in fleeting or not buffer.is_floating_point())",
            "True",
            "statistics",
        ),
        ("unequal weights are shared", "or torch.equal(first, second)", "or True", "stay_apart"),
        ("always the first member", "self.member(block.mode.member)", "self.member(0)", "draw"),
    ),
    *of(
        "quality/diagnostics.py",
        "test_diagnostics.py",
        ("chains in one piece", "torch.cat([x[:, :n], x[:, -n:]])", "x", "drifts"),
        ("no variance between chains", "within + halves.mean(1).var(0)", "within", "sums"),
        ("without Geyer's monotony", "pairs.cummin(0).values", "pairs", "sums"),
        ("ranks of the values alone", "_ratio(_scores(folded))", "_ratio(_scores(halves))", "scales or vehtari"),
        ("ranks without their correction", "(ranks - 0.375) /", "(ranks - 0.5) /", "vehtari"),
        ("one tail", "torch.minimum(low, high)", "low", "vehtari"),
        ("circular autocovariances", "n=2 * n, dim=1)\n    auto", "n=n, dim=1)\n    auto", "sums"),
    ),
]
