"""Estimators with scikit-learn's conventions, for people with arrays: a Bayesian network between fit and predict.

Inputs are standardized, and so are the targets of a regression; the network computes in float64. The default is a small
network whose last layer gets a Laplace posterior with a prior by evidence, which needs neither samples nor a validation
set. "sgld" takes plain gradient steps: it wants another `lr` than Adam, and more `steps`.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bayesify as library
from bayesify.core.checkpoint import load, save
from bayesify.core.method import Method
from bayesify.core.penalty import penalty
from bayesify.core.scopes import param_groups, scopes_of
from bayesify.core.wrap import bayesify
from bayesify.methods.laplace.fit import fit_laplace
from bayesify.prediction.likelihoods import Regression
from bayesify.prediction.novelty import fit_novelty
from bayesify.prediction.predict import predict
from bayesify.prediction.predictive import Predictive
from bayesify.prediction.regression import RegressionPredictive
from bayesify.quality.regression import fit_noise

from .extras import extra

with extra("scikit-learn", "sklearn"):
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

__all__ = ["BayesClassifier", "BayesRegressor"]

Array = npt.NDArray[Any]
Build = Callable[[int, int], nn.Module]
SCRATCH: dict[str, Any] = {"prior_mean": "zero", "nst": 30}  # of a network that starts at random
LEAST_NOISE = 1e-6  # of the variance of the targets
SIGS = (1.0, 0.3)  # of the prior, where nobody says which; a classifier takes the first
STAGES = (500, 500, 1000, 2000)  # steps of training, where nobody says how many
BETTER = 0.98  # of the held-out error, below which another stage is worth its steps
LEAST_ROWS = 50  # from how many rows on a fifth of them is held out
CONSTANT = 1e-12  # relative spread of a column that rounding alone explains


class _BayesEstimator(BaseEstimator):  # type: ignore[misc]
    """What classification and regression share: the network, its training, and how it is pickled."""

    _task: str
    _hidden: tuple[int, ...]

    def __init__(
        self,
        method: str | Method = "la",
        *,
        hidden: Sequence[int] | None = None,
        module: Build | None = None,
        options: Mapping[str, Any] | None = None,
        steps: int | None = None,
        batch_size: int = 64,
        lr: float = 0.01,
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.hidden = hidden
        self.module = module
        self.options = options
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr
        self.random_state = random_state

    def _fit(self, x: Array, target: Tensor, outputs: int) -> None:
        """Train a network on standardized inputs."""
        for name, value in (("steps", self.steps or (1 if self.steps is None else 0)), ("batch_size", self.batch_size)):
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.x_mean_, self.x_scale_ = _scales(x)
        self.outputs_ = outputs
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        data = TensorDataset(self._inputs(x), target)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed_)
            self.steps_, self.prior_sig_, noise = self._settings(data)
            torch.manual_seed(self.seed_)
            self.model_ = self._bayesian(self.prior_sig_)
            learned = self._train(self.model_, data, self.steps_)
            self.noise_var_ = learned if noise is None else noise
            if scopes_of(self.model_)[0].method.name == "la":
                self._fit_laplace(self.model_, data, self._task if noise is None else Regression(noise.tolist()))
        self.model_.eval()

    def _bayesian(self, prior_sig: float) -> nn.Module:
        return bayesify(self._network(), self.method, **(SCRATCH | {"prior_sig": prior_sig} | dict(self.options or {})))

    def _settings(self, data: TensorDataset) -> tuple[int, float, Array | None]:
        """Return how many steps to train, the prior's scale, and the noise, by held-out rows of a regression.

        Each scale is trained in stages, until held-out rows are predicted no better. The best prediction's residuals
        there give the noise: a network's own training rows have smaller ones.
        """
        steps = STAGES[0] if self.steps is None else int(self.steps)
        if self._task != "regression" or len(data) < LEAST_ROWS:
            return steps, SIGS[0], None
        order = torch.randperm(len(data))
        held, fit = order[: len(data) // 5], order[len(data) // 5 :]
        (x, y), rows = data[held], TensorDataset(*data[fit])
        best: tuple[float, int, float, Array | None] = (float("inf"), steps, SIGS[0], None)
        for sig in SIGS[:1] if "prior_sig" in (self.options or {}) else SIGS:
            model, done, before = self._bayesian(sig), 0, float("inf")
            for stage in STAGES if self.steps is None else (steps,):
                self._train(model, rows, stage)
                done += stage
                with torch.no_grad(), library.mean(model.eval()):
                    error = float((model(x) - y).square().mean())
                if error < best[0]:
                    best = error, done, sig, self._noise(model, x, y)
                if error > BETTER * before:
                    break
                before = error
        return best[1:]

    def _noise(self, model: nn.Module, x: Tensor, y: Tensor) -> Array:
        """Return the variance of each output that explains held-out rows best, beside what samples spread."""
        count = None if any(p.moves for p in scopes_of(model)[0].posteriors) else 0  # "la" is fitted at the end
        outputs: Any = predict(model, x, samples=count, seed=self.seed_, task="regression").outputs
        found = np.reshape(np.asarray(fit_noise(outputs, y)), -1)
        return found.clip(LEAST_NOISE) * len(y) / (len(y) - 2)  # the mean of its posterior

    def _network(self) -> nn.Module:
        """Build the network, untrained."""
        if self.module is not None:
            return self.module(self.n_features_in_, self.outputs_).double()
        sizes = [self.n_features_in_, *(self._hidden if self.hidden is None else self.hidden)]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], self.outputs_)).double()

    def _train(self, model: nn.Module, data: TensorDataset, steps: int) -> Array:
        """Minimize loss and penalty; return the variance of each output's noise, which a regression learns."""
        count = len(data)
        needed = scopes_of(model)[0].method.optimizer
        if needed:
            optimizer = getattr(library, needed)(model, self.lr, num_data=count)
        else:
            optimizer = torch.optim.Adam(param_groups(model, self.lr))
        schedule = None if needed else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        log_var = torch.zeros(self.outputs_, dtype=torch.float64, requires_grad=True)
        noise = torch.optim.Adam([log_var], 0.02)
        model.train()
        for x, y in _batches(data, self.batch_size, steps):
            optimizer.zero_grad()
            noise.zero_grad()
            (self._loss(model(x), y, log_var) + penalty(model, num_data=count)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if log_var.grad is not None:
                noise.step()
            if schedule is not None:
                schedule.step()
        return np.asarray(log_var.detach().exp().clamp_min(LEAST_NOISE).numpy())

    def _loss(self, output: Tensor, target: Tensor, log_var: Tensor) -> Tensor:
        raise NotImplementedError

    def _fit_laplace(self, model: nn.Module, data: TensorDataset, likelihood: Any) -> None:
        """Give the last linear layer its spread; where there is none, every weight."""
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        fit_laplace(
            model,
            DataLoader(data, max(self.batch_size, 256)),
            structure="kron",
            likelihood=likelihood,
            tune="wide" if self._task == "regression" else "marglik",
            include=f"{linear[-1]}.*" if linear and linear[-1] else None,
        )

    def fit_novelty(self, X: Any, y: Any = None, *, held_out: Any, false_alarms: float = 0.05) -> Self:
        """Learn what known rows look like: then `alarm` says which rows are too strange, and `predictive` how strange.

        Args:
            X: Rows that the estimator was trained on.
            y: Their labels, for a classifier; every class then has a mean of its own.
            held_out: Rows of the same source that it was not trained on.
            false_alarms: The share of such rows that `alarm` may flag.

        Returns:
            The estimator.
        """
        ((x,),), known = self._checked(X), None
        if y is not None and hasattr(self, "classes_"):
            known = torch.from_numpy(np.searchsorted(self.classes_, column_or_1d(y)))
        held = self._checked(held_out)
        fit_novelty(self.model_, [(x, known)], at="mean", held_out=held, false_alarms=false_alarms)
        return self

    def alarm(self, X: Any) -> Array:
        """Return which rows are too strange, Booleans (N,), after `fit_novelty`."""
        return np.asarray(self.predictive(X).alarm())

    def predictive(self, X: Any) -> Any:
        """Return the whole prediction."""
        raise NotImplementedError

    def _inputs(self, x: Array) -> Tensor:
        return torch.from_numpy((x - self.x_mean_) / self.x_scale_)

    def _checked(self, x: Any) -> list[tuple[Tensor]]:
        """Return new inputs as a batch."""
        check_is_fitted(self)
        return [(self._inputs(validate_data(self, x, reset=False, dtype=np.float64)),)]

    def __getstate__(self) -> dict[str, Any]:
        """Replace the network by the file that `bayesify.save` writes."""
        state: dict[str, Any] = dict(super().__getstate__())
        if "model_" in state:
            with tempfile.TemporaryDirectory() as folder:
                save(state.pop("model_"), folder)
                state["_posterior"] = (Path(folder) / "posterior.safetensors").read_bytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        posterior = state.pop("_posterior", None)
        super().__setstate__(state)
        if posterior is not None:
            with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
                (Path(folder) / "posterior.safetensors").write_bytes(posterior)
                self.model_ = load(self._network(), folder).eval()


class BayesClassifier(ClassifierMixin, _BayesEstimator):  # type: ignore[misc]
    """A Bayesian network that classifies the rows of an array.

    Args:
        method: A method of bayesify, by name or as an object.
        hidden: The sizes of the hidden layers; None is (50,) for a classifier and (50, 50) for a regressor.
        module: Builds another network, from the numbers of features and of classes; a function that can be pickled.
        options: What `bayesify` gets beside the method, such as {"prior_sig": 0.3}.
        steps: How many minibatches are trained on; None is 500, and in a regression as many as predict a held-out
            fifth of the rows best, which choose the prior's scale too. All rows are then trained on.
        batch_size: Rows in one.
        lr: The learning rate of Adam, or of the method's own optimizer.
        random_state: A number or RandomState for weights, batches and samples.

    Attributes:
        classes_: The labels.
        model_: The bayesified network, on standardized inputs.

    Example:
        >>> import numpy as np
        >>> x = np.array([[-1.0], [-0.9], [0.9], [1.0]] * 5)
        >>> classifier = BayesClassifier(steps=50, random_state=0).fit(x, ["no", "no", "yes", "yes"] * 5)
        >>> classifier.predict([[-1.0], [1.0]]).tolist()
        ['no', 'yes']
    """

    _task = "classification"
    _hidden = (50,)

    def fit(self, X: Any, y: Any) -> Self:
        """Train on the rows of X and their labels.

        Args:
            X: (N, features), finite numbers.
            y: (N,), labels of two classes or more.

        Returns:
            The estimator.

        Raises:
            ValueError: They do not fit, or there is only one class.
        """
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs two classes or more, got one class {self.classes_[0]!r}")
        self._fit(x, torch.from_numpy(codes), len(self.classes_))
        return self

    def _loss(self, output: Tensor, target: Tensor, log_var: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def predictive(self, X: Any) -> Predictive:
        """Return the whole prediction: probabilities, entropy, mutual information."""
        batches = self._checked(X)
        return predict(self.model_, batches, seed=self.seed_)

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, (N, classes)."""
        probs = self.predictive(X).probs.numpy()
        return np.asarray(probs / probs.sum(1, keepdims=True))

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row."""
        best = self.predictive(X).prediction.numpy()
        return np.asarray(self.classes_[best])


class BayesRegressor(RegressorMixin, _BayesEstimator):  # type: ignore[misc]
    """A Bayesian network that predicts numbers, each with its standard deviation.

    Args:
        method: A method of bayesify, by name or as an object.
        hidden: The sizes of the hidden layers; None is (50,) for a classifier and (50, 50) for a regressor.
        module: Builds another network, from the numbers of features and of targets; a function that can be pickled.
        options: What `bayesify` gets beside the method, such as {"prior_sig": 0.3}.
        steps: How many minibatches are trained on; None is 500, and in a regression as many as predict a held-out
            fifth of the rows best, which choose the prior's scale too. All rows are then trained on.
        batch_size: Rows in one.
        lr: The learning rate of Adam, or of the method's own optimizer.
        random_state: A number or RandomState for weights, batches and samples.

    Attributes:
        model_: The bayesified network, from standardized inputs to standardized targets.
        noise_var_: The variance of each output's noise, of standardized targets: by held-out rows, or of fewer than 50
            rows by training.
        steps_: How many minibatches were trained on.
        prior_sig_: The standard deviation of the prior over weights, where `options` gives none.

    Example:
        >>> import numpy as np
        >>> x = np.linspace(-1, 1, 40)[:, None]
        >>> regressor = BayesRegressor(steps=200, random_state=0).fit(x, 2 * x[:, 0])
        >>> near, far = regressor.predict_std([[0.0], [9.0]])
        >>> bool(near < far)
        True
    """

    _task = "regression"
    _hidden = (50, 50)

    def fit(self, X: Any, y: Any) -> Self:
        """Train on the rows of X and their targets.

        Args:
            X: (N, features), finite numbers.
            y: (N,) or (N, targets), finite numbers.

        Returns:
            The estimator.

        Raises:
            ValueError: They do not fit.
        """
        x, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        self.y_mean_, self.y_scale_ = _scales(y)
        scaled = torch.from_numpy(((y - self.y_mean_) / self.y_scale_).reshape(len(y), -1))
        self.y_shape_ = y.shape[1:]
        self._fit(x, scaled, scaled.shape[1])
        return self

    def _loss(self, output: Tensor, target: Tensor, log_var: Tensor) -> Tensor:
        """Mean of -log N(y; f, exp(log_var)), without its constant: sum (log_var + (y - f)^2 exp(-log_var))/2."""
        return (log_var + (output - target).square() * (-log_var).exp()).sum(1).mean() / 2

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def predictive(self, X: Any) -> RegressionPredictive:
        """Return the whole prediction, of standardized targets: both kinds of doubt, intervals."""
        batches = self._checked(X)
        out = predict(self.model_, batches, seed=self.seed_, task="regression")
        return out if bool(out.aleatoric.any()) else out.with_noise(torch.from_numpy(self.noise_var_))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each target, (N,) or (N, targets); with `return_std` the pair (mean, std)."""
        out = self.predictive(X)
        mean, std = (v.numpy().reshape(-1, *self.y_shape_) * self.y_scale_ for v in (out.mean, out.std))
        return (mean + self.y_mean_, std) if return_std else mean + self.y_mean_

    def predict_std(self, X: Any) -> Array:
        """Return the standard deviation of each target: what the model does not know and the noise together."""
        return np.asarray(self.predict(X, return_std=True)[1])


def _scales(values: Array) -> tuple[Array, Array]:
    """Return mean and standard deviation of each column; 1 for a column that is constant."""
    mean, std = values.mean(0), values.std(0)
    return mean, np.where(std > CONSTANT * np.abs(mean), std, 1.0)


def _batches(data: TensorDataset, size: int, steps: int) -> Any:
    """Yield so many shuffled minibatches, epoch after epoch."""
    done = 0
    while done < steps:
        for batch in torch.split(torch.randperm(len(data)), size):
            if done < steps:
                yield data[batch]
                done += 1
