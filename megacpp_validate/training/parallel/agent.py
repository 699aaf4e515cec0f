"""torchrun for the ranks of one host; exit status 0 where every rank ended well.

    python -m megacpp_validate.training.parallel.agent ORDER

ORDER is the JSON that `launch` writes. Standard torchrun prints the exit codes of failed ranks in a table; this leaves
them as JSON, and names log and error files by the rank of the world, not of the host.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ...evidence.whole_file import write_whole
from .ranks import AGENT, LAUNCHER, end_with_parent, error_path, log_paths

_MONITOR: Final = 0.1  # seconds between torchrun's looks at its ranks


class RankLogs(LogsSpecs):
    """Log and error files of ranks, all in the folder of the run."""

    @property
    def root_log_dir(self) -> str:
        """The folder of the run."""
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank, from the variables that torchrun gives it."""
        folder = Path(self.root_log_dir)
        errors = {local: str(error_path(folder, int(env["RANK"]))) for local, env in envs.items()}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
        logs = {local: log_paths(folder, env["RANK"]) for local, env in envs.items()}
        return LogsDest(
            stdouts={local: str(out) for local, (out, _) in logs.items()},
            stderrs={local: str(err) for local, (_, err) in logs.items()},
            error_files=errors,
        )


def main() -> None:
    """Run torchrun; the exit status is 1 where a rank failed."""
    end_with_parent(int(os.environ[LAUNCHER]))
    os.environ[AGENT] = str(os.getpid())
    order = json.loads(sys.argv[1])
    config = LaunchConfig(
        min_nodes=order["hosts"],
        max_nodes=order["hosts"],
        nproc_per_node=order["ranks"],
        run_id=order["run"],
        rdzv_backend="c10d",
        rdzv_endpoint=order["endpoint"],
        rdzv_configs={"join_timeout": max(1, round(order["joining"]))},
        max_restarts=0,
        monitor_interval=_MONITOR,
        logs_specs=RankLogs(order["folder"]),
    )
    try:
        elastic_launch(config, sys.executable)("-m", *order["words"])
    except ChildFailedError as failed:
        found = {rank: [one.exitcode, float(one.timestamp)] for rank, one in failed.failures.items()}
        # torchrun ends the others with SIGTERM when one fails, and lists them too.
        of_itself = {rank: end for rank, end in found.items() if end[0] != -signal.SIGTERM}
        found = of_itself or found
        write_whole(Path(order["failures"]), json.dumps(found))
        sys.exit(1)


if __name__ == "__main__":
    main()
