"""Mistakes in the Laplace approximation, and in the likelihoods whose curvature it takes."""

from .rows import of

MUTANTS = [
    # -- Laplace -------------------------------------------------------------------------------------------------
    *of(
        "methods/laplace/method.py",
        "exactness",
        ("sigma for sigma squared", "flat else 1 / sig / sig", "flat else 1 / sig", "ggn and linear"),
        ("the variance for the std", ".rsqrt_()", ".reciprocal_()", "ggn and linear"),
    ),
    *of(
        "methods/laplace/method.py",
        "test_laplace_exact.py",
        (
            "damping is not used",
            "self.flat else 1 / sig / sig + self.damping",
            "self.flat else 1 / sig / sig",
            "fit_equals",
        ),
    ),
    *of(
        "methods/laplace/method.py",
        "test_laplace.py",
        ("a flat prior has the prior's precision", "prior = self.damping if self.flat else", "prior =", "flat_prior"),
    ),
    *of(
        "methods/laplace/passes.py",
        "test_laplace.py",
        ("num_data is not used", "num_data / self.count", "1.0", "num_data"),
        ("train mode", "with evaluation(self.model), mean", "with torch.no_grad(), mean", "dropout_is_off"),
    ),
    *of(
        "methods/laplace/passes.py",
        "test_laplace_exact.py",
        (
            "Ninflate is not in the curvature",
            "scale * methods[p].inflation(size, kron=self.kron)",
            "scale",
            "gauss_newton or fit_equals",
        ),
    ),
    *of(
        "methods/laplace/fit.py",
        "test_laplace_failures.py test_laplace_kron.py",
        ("a failed fit leaves its traces", "posterior.put_back(old)", "pass", "failed_fit"),
    ),
    *of(
        "methods/laplace/kron.py",
        "test_laplace_kron.py",
        ("variances without the prior", "(self.curvature() + ridge)", "(self.curvature() + 1e-9)", "dense or factors"),
        (
            "the factors' sum",
            "torch.outer(self.left_values, self.right_values)",
            "torch.add(self.left_values.unsqueeze(1), self.right_values)",
            "dense or factors",
        ),
        ("a draw by the variance", "self.variances(ridge).sqrt_()", "self.variances(ridge)", "joint_gaussian"),
        ("std by vectors that are not squared", "else basis.square()", "else basis.abs()", "dense or factors"),
    ),
    *of(
        "methods/laplace/factors.py",
        "test_laplace_kron.py",
        ("B is the sum", "scales[name] / max(self.counts[name], 1)", "scales[name]", "dense or every_layer"),
        ("the bias has no input", "(0, 1), value=1.0)", "(0, 1), value=0.0)", "dense or every_layer"),
        ("the bias has another's row", "last = slice(-1, None)", "last = slice(0, 1)", "dense or every_layer"),
        ("A and B change places", "else Kron(*b, *a)", "else Kron(*a, *b)", "dense or every_layer"),
        ("A without its outer products", "else rows.T @ rows", "else (rows.T @ rows).diag().diag()", "dense"),
    ),
    *of(
        "methods/laplace/method.py",
        "test_laplace_kron.py",
        ("weight and bias have their own noise", "name_key(self.partner) if self.partner else", "", "joint_gaussian"),
        (
            "the factors' prior is sigma",
            "return 1 / sig / sig + self.damping",
            "return 1 / sig + self.damping",
            "dense",
        ),
        (
            "training after the fit is not seen",
            "found[0] == self._stamp[0] and found != self._stamp",
            "False",
            "training_after",
        ),
    ),
    *of(
        "methods/laplace/closed_form.py",
        "test_laplace_last_layer.py",
        ("outputs without the bias's spread", "z + own.right.squeeze(0)", "z", "closed_form"),
        ("diagonal outputs without the bias's", "q + whole(self.bias.std).square()", "q", "closed_form"),
        ("the std for the variance", "@ spread.square().T", "@ spread.T", "closed_form"),
        ("features in the wrong basis", "x if kron.right is None else x @ kron.right", "x", "closed_form"),
    ),
    *of(
        "methods/laplace/tuning.py",
        "test_laplace_tuning.py",
        ("the evidence without its determinant", ".log1p_().sum()) / 2", ".log1p_().sum()) * 0", "evidence"),
        ("the evidence without its half", "/ sig) ** 2) / 2", "/ sig) ** 2)", "evidence"),
        (
            "the arithmetic mean of scales",
            "math.exp(sum(sigs) / len(sigs))",
            "sum(map(math.exp, sigs)) / len(sigs)",
            "typical_scale",
        ),
        ("an untuned spread is not bounded", "cost(p) <= TOLERANCE)", "True)", "untuned"),
        ("the least spread that does no harm", "in reversed(_grid(BOUND_RANGE", "in (_grid(BOUND_RANGE", "untuned"),
        ("the cost of all inputs together", "float(value.sum()), len(value))", "float(value.sum()), 1)", "untuned"),
        (
            "other outputs are taken for logits",
            "not data or not isinstance(likelihood, Classification)",
            "not data",
            "untuned",
        ),
        ("given priors are bounded too", "all(f.posterior.relative for", "all(True for", "untuned"),
    ),
    *of(
        "prediction",
        "test_likelihoods.py",
        ("the root of p is p", "(p[..., k].sqrt() * counts", "(p[..., k] * counts", "roots_square"),
        (
            "draws of labels are not averaged",
            "counts.unsqueeze(-1) / DRAWS**0.5",
            "counts.unsqueeze(-1)",
            "roots_square",
        ),
        ("signs are not averaged", "scale * signs / DRAWS**0.5", "scale * signs", "roots_square"),
    ),
    *of(
        "prediction/roots.py",
        "test_laplace_failures.py",
        ("a loss that is not convex passes", "values < -1e-4 *", "values < -1e4 *", "convex"),
    ),
    *of(
        "prediction",
        "test_likelihoods.py",
        ("the mixture's NLL without 1/S", "math.log(len(each)) - torch", "-torch", "mixture"),
        (
            "the Gaussian's exponent by the std",
            ".square() / var + math.log",
            ".square() / var**0.5 + math.log",
            "distributions",
        ),
        ("the Gaussian without its constant", "math.log(2 * math.pi * var)", "math.log(var)", "distributions"),
        ("curvature of the std", "(self.noise_var or 1.0) ** -0.5", "(self.noise_var or 1.0) ** -1", "roots_square"),
        ("the noise of half the data", "self._squares / self._count", "self._squares / self._count / 2", "residuals"),
        ("both curvatures go with 1/v", '(-1 if curvature == "ggn" else -2)', "-1", ""),
        (
            "log variance with the other sign",
            "squares * torch.exp(-log_var)",
            "squares * torch.exp(log_var)",
            "distributions",
        ),
        ("Fisher of a log variance 1", "torch.full_like(mean, 0.5**0.5)", "torch.ones_like(mean)", "heteroscedastic"),
        ("Bernoulli curvature p", "(p * (1 - p)).sqrt()", "p.sqrt()", "roots_square"),
        ("ignored labels have a curvature", "(labels != IGNORED).to(logits)", "torch.ones_like(logits[..., 0])", ""),
    ),
    *of(
        "prediction",
        "test_prediction.py test_predictive.py test_likelihoods.py",
        ("classes last in images", "return outputs.movedim(1, -1) if", "return outputs if", "classes or segmentation"),
    ),
]
