"""Why an image is not planned, pinned or built."""

from __future__ import annotations


class ImageRefused(ValueError):
    """Something that the matrix or the caller says cannot be built; the text has the reason and the next step."""


class PinsDamaged(ImageRefused):
    """The file of pins is not what the verb writes, or says of itself what it cannot show; the text names it all."""


class NotInRegistry(ImageRefused):
    """A registry has nothing of that name; the text has the next step."""


class RegistryUnreachable(OSError):
    """No registry answered, or it answered that it will not; the text has the reason and the next step."""


class RegistryLies(ValueError):
    """What a registry answered is not what the digest says; the text has both digests and the next step."""
