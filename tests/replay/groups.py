"""The groups of scenarios: a recording each."""

from __future__ import annotations

from typing import Final

from . import gate, hosts, loss, pages, releases, stacks
from .harness import Group

GROUPS: Final = (
    Group("gate", gate.gates),
    Group("compare", stacks.compares, every=4),
    Group("blame", stacks.blames, every=4),
    Group("fits", stacks.fits, every=4),
    Group("policy", stacks.policies, every=3),
    Group("loss", loss.losses),
    Group("doctor", hosts.doctors, every=5),
    Group("images", pages.images, every=4),
    Group("site", pages.sites, every=3),
    Group("history", pages.histories),
    Group("static", releases.statics, slow=True),
    Group("bisect", releases.bisects, slow=True),
    Group("firewall", releases.firewalls, slow=True),
)
