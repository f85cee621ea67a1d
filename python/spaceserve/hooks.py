"""Hooks into SGLang, declared as records and verified after they are applied.

SGLang's plugin loader only logs a hook that fails. A server whose scheduler misses one would hang or answer
wrongly, so each process applies its own list here and refuses to start when a target is missing, has another
signature than the one that the hook was written for, or was not patched.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

HookKind = Literal["before", "after", "around", "replace"]


class HookError(RuntimeError):
    """A hook that the start relies on could not be installed; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One change to SGLang.

    Attributes:
        target: dotted path of a function, method or class of SGLang.
        function: what runs; its arguments are those of SGLang's `HookType` of the same kind.
        kind: before, after, around or replace.
        why: what the hook is for, in a few words.
        parameters: names of the target's parameters that `function` relies on, in order; empty for classes.
    """

    target: str
    function: Callable[..., Any]
    kind: HookKind
    why: str
    parameters: tuple[str, ...] = ()


def _resolve(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise HookError(f"SGLang has no {target}: {error}") from error


def check_signature(hook: Hook) -> None:
    """Compare the target with what the hook was written for.

    Raises:
        HookError: the target is missing or one of `hook.parameters` is not among its parameters in this order.
    """
    target = _resolve(hook.target)
    if not hook.parameters:
        return
    names = [name for name in inspect.signature(inspect.unwrap(target)).parameters if name not in ("self", "cls")]
    wanted = list(hook.parameters)
    if [name for name in names if name in wanted] != wanted:
        raise HookError(f"{hook.target} has parameters {names}, the hook ({hook.why}) needs {wanted}")


def install(hooks: Sequence[Hook]) -> None:
    """Apply `hooks` in this process and verify each.

    Raises:
        HookError: a target is missing, has changed, or was not patched.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        check_signature(hook)
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    HookRegistry.apply_hooks()
    verify(hooks)


def verify(hooks: Sequence[Hook]) -> None:
    """Check that every hook of the list is in force.

    Raises:
        HookError: one is not; the message names it.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for hook in hooks:
        registered = [function for _, function, _ in HookRegistry._hooks.get(hook.target, [])]
        if hook.target not in HookRegistry._patched or hook.function not in registered:
            raise HookError(f"the hook on {hook.target} ({hook.why}) is not in force")
