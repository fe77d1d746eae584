"""The Trainer for bayesified models: its optimizer, posterior averages, exact checkpoints, the fit of Laplace."""

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

import bayesify
from bayesify.core.checkpoint import load, mean_tensors, save_posterior
from bayesify.core.mixture import Mixture
from bayesify.core.posterior import Posterior
from bayesify.core.prior import RATE
from bayesify.core.ranks import is_whole
from bayesify.core.scopes import root_of, scopes_of
from bayesify.integrations.folders import is_adapter
from bayesify.prediction.batches import logits_of
from bayesify.prediction.last_layer import NotLastError

from .evaluation import Average, Evaluation
from .hub import write_mixture_card
from .loss import LossMixin, is_causal, random_state_kept
from .members import last_checkpoint, train_members

CYCLED = ("swag", "ensemble")  # methods without a posterior unless `bayesify.Cycles` collects it


class BayesTrainerMixin(LossMixin):
    """What a Trainer needs for bayesified models; put it before a Trainer class: `class Mine(BayesTrainerMixin, ...)`.

    Args:
        *args: The Trainer's.
        num_data: N of the penalty; by default what the loss averages over: the training examples, or their label
            tokens for language models.
        samples: Posterior samples of `evaluate` and `predict`; None is a closed form where the posterior has one (a
            last-layer Laplace), else the method's `nst`; 0 is the posterior mean.
        lr_head: Learning rate of the head.
        lr_sig: Learning rate of the posteriors' own parameters (VI's rho).
        head: The head, as a module of the model or its exact name, or several of them.
        momentum: Of method "sgld".
        burnin_epochs: Of method "sgld", in place of its option `burnin` (which is in optimizer steps).
        laplace: Options of `bayesify.fit_laplace`, which runs after training with method "la".
        members: How many models `train` trains one after another; above 1 the trainer's model is their mixture after
            that. Each has a seed of its own, and a folder `member-k` in the output folder. They start where the model
            does, or, better, where `model_init` starts with their seeds.
        **kwargs: The Trainer's.

    Raises:
        ValueError: The model is not bayesified, or an argument is out of range.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: Any

    def __init__(
        self,
        *args: Any,
        num_data: float | None = None,
        samples: int | None = None,
        lr_head: float | None = None,
        lr_sig: float | None = None,
        head: Any = None,
        momentum: float = 0.0,
        burnin_epochs: float | None = None,
        laplace: Mapping[str, Any] | None = None,
        members: int = 1,
        **kwargs: Any,
    ) -> None:
        if samples is not None and (not is_whole(samples) or samples < 0):
            raise ValueError(f"samples must be an integer >= 0, or None for the method's nst, got {samples!r}")
        if burnin_epochs is not None and not (math.isfinite(burnin_epochs) and burnin_epochs >= 0):
            raise ValueError(f"burnin_epochs must be a number >= 0, got {burnin_epochs!r}")
        if not is_whole(members) or members < 1:
            raise ValueError(f"members must be an integer >= 1, got {members!r}")
        mixture = args[0] if args else kwargs.get("model")
        if isinstance(mixture, Mixture):  # the Trainer looks at a model's class and signature: those of the members
            first = mixture.members[0]
            args, kwargs = ((first, *args[1:]), kwargs) if args else ((), {**kwargs, "model": first})
        super().__init__(*args, num_data=num_data, **kwargs)
        if members > 1 and self.optimizer is not None:
            raise ValueError("every member needs an optimizer of its own; leave optimizers= to BayesTrainer")
        methods = {scope.method.name for scope in scopes_of(self.model)}
        given = {"momentum": momentum != 0, "burnin_epochs": burnin_epochs is not None, "laplace": laplace is not None}
        for argument, method in {"momentum": "sgld", "burnin_epochs": "sgld", "laplace": "la"}.items():
            if given[argument] and method not in methods:
                raise ValueError(f"{argument} is for method {method!r}, this model is {', '.join(sorted(methods))}")
        known = set(inspect.signature(bayesify.fit_laplace).parameters) - {"model", "loader"}
        if not known.issuperset(laplace or {}):
            raise ValueError(f"laplace takes the options {sorted(known)} of fit_laplace, got {sorted(laplace or {})}")
        self.samples = samples
        self._rates = {"lr_head": lr_head, "lr_sig": lr_sig, "head": head}
        self._momentum = momentum
        self._burnin_epochs = burnin_epochs
        self._laplace = dict(laplace or {})
        self._evaluation: Evaluation | None = None
        self._scores: tuple[int, dict[str, float]] = 0, {}
        self._steps_per_epoch = 0
        self.members = members
        self.member: int | None = None
        if isinstance(mixture, Mixture):
            self._set_signature_columns_if_needed()
            self.take(mixture.to(self.args.device))

    def take(self, model: nn.Module) -> None:
        """Make a model the trainer's, and forget the optimizer of the one before."""
        self.model = self.model_wrapped = model
        self.optimizer = self.lr_scheduler = None
        self._scores = 0, {}

    # -- training ----------------------------------------------------------------------------------------------

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Note how many optimizer steps an epoch has."""
        values = super().set_initial_training_values(*args, **kwargs)
        self._steps_per_epoch = values[1]
        return values

    def create_optimizer(self, *args: Any) -> Any:
        """Create the optimizer of `args.optim` on `param_groups`, or that of method "sgld" or "ivon"."""
        model = args[0] if args and args[0] is not None else self.model
        sampled = [scope for scope in scopes_of(model) if scope.method.name == "sgld"]
        if self.optimizer is not None:
            if sampled and not isinstance(getattr(self.optimizer, "optimizer", self.optimizer), bayesify.SGLD):
                raise ValueError(
                    f"method 'sgld' needs the optimizer bayesify.SGLD, got {type(self.optimizer).__name__}; "
                    "leave optimizers= to BayesTrainer"
                )
        elif sampled:
            if self._burnin_epochs is not None:
                for scope in sampled:
                    steps = round(self._burnin_epochs * self._steps_per_epoch)
                    scope.method = replace(scope.method, burnin=steps)  # type: ignore[call-arg]
            groups = bayesify.param_groups(model, self.args.learning_rate, **self._rates)
            self.optimizer = bayesify.SGLD(model, groups, num_data=self.num_data, momentum=self._momentum)
        elif any(scope.method.name == "ivon" for scope in scopes_of(model)):
            groups = bayesify.param_groups(model, self.args.learning_rate, **self._rates)
            self.optimizer = bayesify.IVON(model, groups, num_data=self.num_data)
        else:
            with self._groups_for_optimizer(model):
                super().create_optimizer(*args)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler of `args`, and `bayesify.Cycles` around it where the method needs cycles."""
        given, optimizer = self.lr_scheduler, self.optimizer if optimizer is None else optimizer
        own = super().create_scheduler(num_training_steps, optimizer)
        if given is None and any(scope.method.name in CYCLED for scope in scopes_of(self.model)):
            self.lr_scheduler = bayesify.Cycles(optimizer, self.model, steps=num_training_steps, before=own)
        return self.lr_scheduler

    @contextmanager
    def _groups_for_optimizer(self, model: nn.Module) -> Iterator[None]:
        """Hand our groups to the Trainer's way of building any optimizer."""
        given = self.optimizer_cls_and_kwargs
        cls, kwargs = given or self.get_optimizer_cls_and_kwargs(self.args, model)
        takes_groups = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        if takes_groups and not {"params", "model", "optimizer_dict"} & set(kwargs):
            kwargs = {**kwargs, "params": self._groups(model, cls)}
        elif any(rate is not None for rate in self._rates.values()):
            raise ValueError(f"optimizer {self.args.optim} makes its own groups; leave out lr_head, lr_sig and head")
        self.optimizer_cls_and_kwargs = cls, kwargs
        try:
            yield
        finally:
            self.optimizer_cls_and_kwargs = given

    def _groups(self, model: nn.Module, cls: type) -> list[dict[str, Any]]:
        """Return `param_groups`, the rest (what is not Bayesian) with the Trainer's weight decay."""
        groups = bayesify.param_groups(model, self.args.learning_rate, **self._rates)
        known = inspect.signature(cls).parameters
        eps = known["eps"].default if "eps" in known else None
        if not isinstance(eps, float) and {"eps", "betas"} & set(known):
            # It divides by the size of gradients, and no eps makes its steps those of SGD (Lion, Adafactor).
            for group in (g for g in groups if g.pop("eps", None) is not None):
                group["lr"] = self._rates["lr_sig"] or RATE
        decayed = set(self.get_decay_parameter_names(model))
        names = {id(p): n for n, p in model.named_parameters()}
        out = [g for g in groups if g["name"] != "rest"]
        for rest in (g for g in groups if g["name"] == "rest"):
            for decay in (True, False):
                params = [p for p in rest["params"] if (names[id(p)] in decayed) == decay]
                if params:
                    out.append({**rest, "params": params, "weight_decay": self.args.weight_decay if decay else 0.0})
        return out

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return what weight decay applies to: nothing of a posterior, whose prior is its decay."""
        names: list[str] = super().get_decay_parameter_names(model)
        posteriors = [m for m in model.modules() if isinstance(m, Posterior)]
        of_posteriors = {id(p) for m in posteriors for p in (m.original, *m.learnable())}
        plain = {n for n, p in model.named_parameters(remove_duplicate=False) if id(p) not in of_posteriors}
        return [n for n in names if n in plain]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, then fit the curvature of method "la"; with `members=` several models, whose mixture is kept.

        Args:
            resume_from_checkpoint: A checkpoint's folder; True takes the last one that was written to its end. With
                `members=`, True goes on at the member that an earlier run has come to.
            *args: The Trainer's.
            **kwargs: The Trainer's.
        """
        if isinstance(self.model, Mixture) and self.model_init is None:
            raise ValueError(
                "a mixture is not trained as a whole; make a trainer of the model that its members start from"
            )
        if self.members > 1:
            return train_members(self, resume_from_checkpoint, *args, **kwargs)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
        return self.train_one(resume_from_checkpoint, *args, **kwargs)

    def train_one(self, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        """Train one model, from a checkpoint or its beginning, and fit it where its method wants that."""
        output = super().train(checkpoint, *args, **kwargs)
        if any(scope.method.name == "la" for scope in scopes_of(self.model)):
            self.fit_laplace()
        for scope in scopes_of(self.model):
            if scope.method.name == "sgld" and not all(getattr(p, "ready", True) for p in scope.posteriors):
                warnings.warn(
                    f"the chain of {self.state.global_step} steps collected no state, so there is nothing to sample: "
                    f"{scope.method}; train longer, or lower burnin (burnin_epochs=) and thin",
                    stacklevel=2,
                )
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the number of the member that is trained, where there are several."""
        super().log(logs if self.member is None else {"member": self.member, **logs}, *args, **kwargs)

    def fit_laplace(self) -> None:
        """Fit the Laplace approximation on the training data, whose likelihood is exp(-loss)."""
        options = {"loss": self._example_loss, "num_data": self._examples(), **self._laplace}
        if self.train_dataset is not None:
            options.setdefault("same_data", True)  # as `_plain_loader` gives it
        with random_state_kept():
            bayesify.fit_laplace(self.model, self._plain_loader(), **options)

    def _examples(self) -> float | None:
        """Return how many examples the fit stands for, where num_data= says that it is not those at hand."""
        if self._given_num_data is None or not hasattr(self.train_dataset, "__len__"):
            return None
        return len(self.train_dataset) * self.num_data / self._count_data()

    def _example_loss(self, output: Any, target: Tensor) -> Tensor:
        """Return each example's loss, summed over its items: cross-entropy, or squared error for real targets."""
        logits = logits_of(output)
        if target.is_floating_point():
            if getattr(getattr(self.model, "config", None), "problem_type", None) == "multi_label_classification":
                loss = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
            else:
                loss = (logits.reshape(target.shape) - target).square()
            return loss.reshape(len(target), -1).sum(1)
        if self.counting.shifts:
            logits, target = logits[:, :-1], target[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
        return loss.reshape(len(target), -1).sum(1)

    # -- evaluation --------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate the average of the posterior samples; the same draws at every evaluation."""
        shifts = self._counting.shifts if self._counting is not None else is_causal(self.model)
        self._evaluation = Evaluation(self.model, self.samples, seed=self.args.seed, shifts=shifts)
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
            )
            ours = self._evaluation.metrics()
        finally:
            self._evaluation = None
        named = {f"{metric_key_prefix}_{name}": value for name, value in ours.items()}
        rest = {name: value for name, value in output.metrics.items() if name not in named}
        output.metrics.clear()
        output.metrics.update({**named, **rest})  # what the samples say together comes first
        if metric_key_prefix == "eval":
            self._scores = self.state.global_step, ours
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Predict one batch: the mean loss of the samples, their averaged output (log-probabilities), the labels.

        Where a closed form takes their place, the loss is the posterior mean's.
        """
        evaluation = self._evaluation
        if evaluation is None:
            with bayesify.mean(model):
                step: tuple[Any, Any, Any] = super().prediction_step(
                    model, inputs, prediction_loss_only, ignore_keys, **kwargs
                )
            return step
        try:
            losses, average, labels = self._averaged(evaluation, model, inputs, ignore_keys, **kwargs)
        except NotLastError:
            evaluation.take_samples()
            losses, average, labels = self._averaged(evaluation, model, inputs, ignore_keys, **kwargs)
        row = evaluation.score(average, labels)
        if row is not None:
            row = self.accelerator.pad_across_processes(row, dim=1)
            evaluation.add(self.accelerator.gather_for_metrics(row))
        if evaluation.watch is not None:
            evaluation.add_pvalues(self.accelerator.gather_for_metrics(evaluation.watch.pvalues(inputs)))
        values = evaluation.values(average, labels)
        if values is not None:
            evaluation.add_values(self.accelerator.gather_for_metrics(values))
        loss = torch.stack(losses).mean() if losses else None
        return (loss, None, None) if prediction_loss_only else (loss, average.result(), labels)

    def _averaged(
        self, evaluation: Evaluation, model: nn.Module, inputs: dict[str, Any], ignore_keys: Any, **kwargs: Any
    ) -> tuple[list[Tensor], Average, Any]:
        """Return the losses of the samples on one batch, the average of their outputs, and the labels."""
        losses, average, labels = [], None, None
        for i in evaluation.each_sample:
            with evaluation.watching(i) as calls:
                loss, output, labels = super().prediction_step(model, dict(inputs), False, ignore_keys, **kwargs)
            losses += [] if loss is None else [loss]
            average = average or Average(evaluation.kind(output, labels))
            average.add(output, evaluation.spread(i, calls, output, average.kind))
        assert average is not None
        return losses, average, labels

    # -- checkpoints -------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the posterior mean in Hugging Face's layout and the posterior beside it; of a mixture, its own."""
        step, scores = self._scores
        known = scores if step == self.state.global_step else {}  # those of other weights say nothing
        for holder in [self.model] if isinstance(self.model, Mixture) else scopes_of(self.model):
            holder.scores = known
        if isinstance(mixture := self.model, Mixture):
            self.model = mixture.members[0]
            try:
                self._save(output_dir, state_dict)
            finally:
                self.model = mixture
            if self.args.should_save:
                frozen = not is_adapter(mixture.members[0])
                save_posterior(mixture, output_dir or self.args.output_dir, frozen=frozen)
                write_mixture_card(mixture, output_dir or self.args.output_dir)
            return
        root, scope = root_of(self.model)
        if root is not self.model:
            raise ValueError(
                f"only a part of the model ({type(root).__name__}) was bayesified, which a checkpoint cannot say; "
                "bayesify the whole model with include=..."
            )
        if isinstance(root, PreTrainedModel) or is_adapter(root):
            super()._save(output_dir, state_dict=state_dict)  # by the model's own save_pretrained
            return
        super()._save(output_dir, state_dict=mean_tensors(root, scope))
        if self.args.should_save:
            save_posterior(root, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the posterior of a checkpoint."""
        load(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Load the posterior of the best checkpoint."""
        load(self.model, self.state.best_model_checkpoint)


class BayesTrainer(BayesTrainerMixin, Trainer):
    """A `transformers.Trainer` for bayesified models; `BayesTrainerMixin` says what it adds.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> from bayesify import bayesify
        >>> from bayesify.integrations.huggingface import BayesTrainer
        >>> small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
        >>> model = bayesify(BertForSequenceClassification(BertConfig(**small)), "vi", prior_sig=0.1)
        >>> data = [{"input_ids": [1, 2, 3], "labels": i % 2} for i in range(8)]
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = TrainingArguments(folder, max_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
        ...     trainer = BayesTrainer(model, args, train_dataset=data, eval_dataset=data)
        ...     steps = trainer.train().global_step  # doctest: +ELLIPSIS
        {'train_runtime': ...
        >>> trainer.num_data
        8.0
    """
