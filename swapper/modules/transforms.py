"""Steps out of the transforms of torch.func (grad, vjp, jvp, vmap, functionalize) for work that is not the user's.

Within a transform every tensor that is made is wrapped, for as long as the transform lasts. A commit, a transfer or an optimizer's
update must not see that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_AT_HAND: AbstractContextManager[Any] = nullcontext()
_innermost = torch._C._functorch.peek_interpreter_stack


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context within which no transform of torch.func runs."""
    return _AT_HAND if _innermost() is None else temporarily_clear_interpreter_stack()
