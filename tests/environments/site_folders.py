"""Site folders made by hand: small packages with the metadata that an installer writes."""

from __future__ import annotations

from pathlib import Path


def make_package(site: Path, name: str, version: str, body: str = "") -> Path:
    """A package that can be imported, and its distribution."""
    package = site / name
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(body or f"VERSION = {version!r}\n")
    record = site / f"{name}-{version}.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    (record / "RECORD").write_text(f"{name}/__init__.py,,\n")
    return site


def make_te(site: Path, version: str) -> Path:
    """Something that is Transformer Engine as far as a path is concerned."""
    return make_package(site, "transformer_engine", version)
