"""What the bridge refuses, before any kernel is launched.

Every text says what happened, the likely cause and the next step. The classes derive from the built-in exception
that fits, so that code which knows nothing of the bridge can still catch them.
"""

from __future__ import annotations


class BridgeError(Exception):
    """Anything that the bridge refuses."""


class WrongShape(BridgeError, ValueError):
    """A tensor of another rank, layout or size than the call takes."""


class NotDivisible(BridgeError, ValueError):
    """A head size, group count or width that does not divide what it must."""


class WrongDtype(BridgeError, TypeError):
    """A dtype that the chosen path cannot take."""


class MaskConflict(BridgeError, ValueError):
    """Two kinds of mask that cannot hold at once."""


class TokenCountMismatch(BridgeError, ValueError):
    """Numbers of tokens that do not sum to the rows that are there."""


class UnknownName(BridgeError, ValueError):
    """A preset, flag, kind or recipe that there is not."""


class WrongOption(BridgeError, ValueError):
    """An option of a call whose value makes no sense, or lacks its counterpart."""


class WrongTarget(BridgeError, RuntimeError):
    """A target, or a recipe of one, that does not match the device that is there."""


class WeightMismatch(BridgeError, ValueError):
    """Weights that cannot be mapped onto a layer: a name missing, unknown, or of another shape."""


class ScopeEnteredTwice(BridgeError, RuntimeError):
    """The low-precision scope entered while it is already on."""
