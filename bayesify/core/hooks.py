"""The hooks by which every module tells its model's scope where a forward begins and ends."""

import copy
from collections import OrderedDict
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bayesify.core.reading import Scope
from bayesify.core.surface import refuse_to_pickle


class Hook:
    """What knows a model's scope. A copy of the model has its own, and a pickle none: its modules refuse that."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        memo[id(self)] = twin = type(self).__new__(type(self))
        twin.scope = copy.deepcopy(self.scope, memo)
        return twin

    def __reduce__(self) -> Any:
        refuse_to_pickle(self)


class Enter(Hook):
    """Forward pre-hook: a module's forward begins."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Enter the scope."""
        if torch.compiler.is_compiling():
            self.scope.enter_compiled(module)
        else:
            self.scope.enter(module)


class Leave(Hook):
    """Forward hook, called on exceptions too: a module's forward ends."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the scope."""
        if torch.compiler.is_compiling():
            self.scope.leave_compiled(module)
        else:
            self.scope.leave(module)


def put_hooks(model: nn.Module, scope: Scope) -> None:
    """Let every module tell the scope where its forward begins and ends.

    All have the same numbers, by which torch knows hooks: equal blocks of a model then take one compiled graph.
    """
    first, last = (RemovableHandle(OrderedDict()).id for _ in range(2))
    for module in model.modules():
        enter, leave = (_own_code(Enter), _own_code(Leave)) if module is model else (Enter, Leave)
        before: Any = module._forward_pre_hooks
        before[first] = enter(scope)
        before.move_to_end(first, last=False)
        module._forward_hooks[last] = leave(scope)
        module._forward_hooks_always_called[last] = True


def _own_code(hook: type[Enter] | type[Leave]) -> Any:
    """Derive a hook with code of its own, for a model as a whole.

    torch.compile compiles a model's hooks apart from its forward, and refuses more than eight variants of one code; a
    process with more compiled models would fall back to eager mode.
    """
    call: Any = hook.__call__
    code = FunctionType(call.__code__.replace(), call.__globals__, call.__name__)
    return type(hook.__name__, (hook,), {"__call__": code})
