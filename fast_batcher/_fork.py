"""Registry of fork hooks that belong to objects. Any thread.

A forked child inherits memory maps and descriptors. If it kept them, shared memory would not be
freed, and a worker would never read the end of a pipe that the parent has closed.
"""

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_OwnerT = TypeVar("_OwnerT")
# Hooks before a fork, after it in the parent, and after it in the child; by owner, weakly.
_hooks: "weakref.WeakKeyDictionary[Any, tuple[Callable[[Any], object] | None, ...]]"
_hooks = weakref.WeakKeyDictionary()


def at_fork(
    owner: _OwnerT,
    *,
    before: Callable[[_OwnerT], object] | None = None,
    in_parent: Callable[[_OwnerT], object] | None = None,
    in_child: Callable[[_OwnerT], object] | None = None,
) -> None:
    """Call these functions with `owner` at each fork of this process, as long as `owner` exists.

    Args:
        owner: Hashable, and compared by identity.
        before: Called before the fork, by the thread that forks.
        in_parent: Called after the fork, by the same thread.
        in_child: Called in the child, whose only thread is a copy of that thread. Another thread
            of the parent may have held any lock.
    """
    _hooks[owner] = (before, in_parent, in_child)


def _run_hooks(index: int) -> None:
    # Another thread may register an owner meanwhile: a list of references is taken at once.
    for reference in _hooks.keyrefs():
        owner = reference()
        if owner is not None:
            hook = _hooks[owner][index]
            if hook is not None:
                hook(owner)


os.register_at_fork(
    before=functools.partial(_run_hooks, 0),
    after_in_parent=functools.partial(_run_hooks, 1),
    after_in_child=functools.partial(_run_hooks, 2),
)
