"""What the doctor saw from inside an interpreter: facts, not yet judged.

Written there as JSON, where nothing but the standard library can be counted on: so these are plain dataclasses.
`environments.doctor` judges them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .receipt import Failure, Library, Strict


@dataclass(frozen=True)
class Wanted(Strict):
    """A symbol that a compiled extension wants and that nothing it would find defines.

    Attributes:
        symbol: as it stands in the file.
        readable: the name without its C++ encoding, as far as that is simple.
        lazy: bound at the first call, so that the extension loads without it.
    """

    symbol: str
    readable: str
    lazy: bool


@dataclass(frozen=True)
class Headers(Strict):
    """Whether an extension was compiled against the torch headers that are there.

    torch's assertions carry the file and line of the header that they were compiled from.

    Attributes:
        compared: assertions of the extension whose header is there.
        moved: those that the header does not have at that line: "c10/core/TensorImpl.h:1799".
    """

    compared: int = 0
    moved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Extension(Strict):
    """A compiled file of a package.

    Attributes:
        tag: what its name says of the Python that it is for: "cpython-312-x86_64-linux-gnu", "abi3", or nothing.
        loaded: mapped after the import.
        needed: libraries that it names.
        not_found: those of them that the loader would not find.
        wanted: symbols that nothing defines.
        problem: why it could not be looked at; empty where it could.
    """

    file: str
    tag: str = ""
    loaded: bool = False
    needed: tuple[str, ...] = ()
    not_found: tuple[str, ...] = ()
    wanted: tuple[Wanted, ...] = ()
    headers: Headers = field(default_factory=Headers)
    problem: str = ""


@dataclass(frozen=True)
class Behaviour(Strict):
    """A cheap call whose answer shows whether an extension reads tensors as torch lays them out.

    Attributes:
        name: of the call.
        given: the tensor that it was given, in words.
        answered: what came back.
        right: None where it could not be called here, for the reason in `answered`.
    """

    name: str
    given: str
    answered: str
    right: bool | None


@dataclass(frozen=True)
class Record(Strict):
    """The files of a package against what its installer recorded of them.

    Attributes:
        compared: files that the record lists.
        changed: those whose size or contents are others.
        gone: those that are not there.
        elsewhere: site folder of the metadata, where the package was loaded from another one; nothing is compared then.
    """

    compared: int = 0
    changed: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    elsewhere: str = ""


@dataclass(frozen=True)
class PackageLook(Strict):
    """One vendor package, imported in a process of its own after torch.

    Attributes:
        package: what was imported: "transformer_engine.pytorch".
        installed: whether it can be found at all.
        version, file: as loaded; of the first copy on the path where the import failed.
        copies: other copies on the path.
        failure: what the import raised; None where it did not.
        ended: how the process ended where it left no answer: "signal 6", "killed after 120 s"; empty where it did.
        words: its last words in that case.
        libraries: CUDA libraries that were mapped after the import, with their versions as they say them.
        mapped: every file of the CUDA libraries that was mapped then, by name without version.
        runtimes: what `dlopen` gives for a CUDA runtime in that process: soname -> file.
        extensions: its compiled files.
        behaviours: what calls showed.
        record: its files against what was installed.
        seconds: of the import.
    """

    package: str
    installed: bool
    version: str = ""
    file: str = ""
    copies: tuple[str, ...] = ()
    failure: Failure | None = None
    ended: str = ""
    words: str = ""
    libraries: tuple[Library, ...] = ()
    mapped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    runtimes: dict[str, str] = field(default_factory=dict)
    extensions: tuple[Extension, ...] = ()
    behaviours: tuple[Behaviour, ...] = ()
    record: Record = field(default_factory=Record)
    seconds: float = 0.0


@dataclass(frozen=True)
class Distribution(Strict):
    """What an installer left of a package: its metadata.

    Attributes:
        folder: site folder that it lies in.
        requires: its requirements, as they are written; of vendor packages only.
    """

    name: str
    version: str
    folder: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class PathLook(Strict):
    """What an interpreter would find, read without importing any of it.

    Attributes:
        soabi: the tag of extensions for it.
        torch_cuda: CUDA release that torch was built for; empty for a CPU build.
        driver: version of the NVIDIA driver.
        driver_cuda: the newest CUDA release that the driver runs: "13.0".
        gpu: name of the first GPU that a process there sees, and its compute capability.
        no_gpu: why there is none.
        variables: of Transformer Engine (NVTE_*), as they are set.
        distributions: all of them; the first of a name is what `importlib.metadata` gives.
    """

    python: str
    executable: str
    soabi: str
    machine: str
    torch: str = ""
    torch_cuda: str = ""
    driver: str = ""
    driver_cuda: str = ""
    gpu: str = ""
    capability: str = ""
    no_gpu: str = ""
    ld_library_path: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    distributions: tuple[Distribution, ...] = ()
