"""Train the members of a mixture one after another, with seeds and folders of their own.

Member k is trained with the seed args.seed + k in `member-k` of the output folder, which holds its posterior when it is
done, and until then its checkpoints: a killed run goes on at the member, and the step, where it was.
"""

import copy
import os
import re
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers import set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from bayesify.core.checkpoint import POSTERIOR_FILE, load, save_posterior
from bayesify.core.mixture import mix, shared_copy
from bayesify.integrations.folders import is_adapter

STATE_FILE = "trainer_state.json"  # which the Trainer writes last into a checkpoint


def train_members(trainer: Any, resume: Any, *args: Any, **kwargs: Any) -> TrainOutput:
    """Train all members and leave their mixture as the trainer's model.

    Args:
        trainer: A BayesTrainer with `members` > 1.
        resume: True goes on after a stop; None or False begins anew, with the first member.
        *args: Of the Trainer's `train`.
        **kwargs: Likewise.

    Returns:
        The steps of all members, their mean loss, and the last one's metrics.
    """
    if not isinstance(resume, bool) and resume is not None:
        raise ValueError(f"with members= resume_from_checkpoint is True or False, got {resume!r}")
    given = trainer.args
    folders = [Path(given.output_dir) / f"member-{k}" for k in range(trainer.members)]
    if not resume and given.should_save:
        for folder in folders:  # what is left of an earlier run must not be taken for this one's
            shutil.rmtree(folder, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    anew = trainer.model_init is not None
    starts = [None if anew else trainer.model if k == 0 else shared_copy(trainer.model) for k in range(trainer.members)]
    members: list[nn.Module] = []
    outputs: list[TrainOutput] = []
    try:
        for k, (folder, start) in enumerate(zip(folders, starts, strict=True)):
            trainer.args = _own_args(given, k, folder)
            trainer.member = k
            set_seed(trainer.args.seed)
            if start is not None:
                trainer.take(start)
            if (folder / POSTERIOR_FILE).is_file():
                members.append(load(trainer.call_model_init() if start is None else start, folder))
            else:
                outputs.append(trainer.train_one(checkpoint_in(folder) if resume else None, *args, **kwargs))
                members.append(trainer.model)
                if given.should_save:
                    save_posterior(trainer.model, folder, frozen=not is_adapter(trainer.model))
                trainer.accelerator.wait_for_everyone()
            mixture = mix(members)  # equal frozen weights are in memory once from now on
    finally:
        trainer.args, trainer.member = given, None
    trainer.take(mixture.eval())
    if not outputs:
        return TrainOutput(0, 0.0, {})
    steps = sum(output.global_step for output in outputs)
    loss = sum(output.training_loss for output in outputs) / len(outputs)
    return TrainOutput(steps, loss, {**outputs[-1].metrics, "train_loss": loss})


def _own_args(given: Any, member: int, folder: Path) -> Any:
    """Return the arguments of one member's training."""
    own = copy.copy(given)
    own.output_dir, own.seed = str(folder), given.seed + member
    return own


def last_checkpoint(output_dir: "str | os.PathLike[str]") -> str:
    """Return the last checkpoint that was written to its end; a killed process may leave another behind."""
    found = checkpoint_in(output_dir)
    if found is None:
        raise ValueError(f"there is no complete checkpoint in {os.fspath(output_dir)}; train without resuming first")
    return found


def checkpoint_in(output_dir: "str | os.PathLike[str]") -> str | None:
    """Return the last complete checkpoint in a folder, if there is one."""
    found = [
        folder
        for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name)
        and (folder / STATE_FILE).is_file()
        and (folder / POSTERIOR_FILE).is_file()
    ]
    return str(max(found, key=lambda folder: int(folder.name.rsplit("-", 1)[1]))) if found else None
