"""For `torch.multiprocessing.spawn`, which starts processes but does not tell them about each other, as a launcher does."""

import os
from collections.abc import Sequence

from trainer.main import main


def spawned(rank: int, processes: int, argv: Sequence[str], port: int = 29500) -> None:
    """One of `processes` processes of this host: `torch.multiprocessing.spawn(spawned, args=(2, ["--epochs", "1"]), nprocs=2)`.

    Args:
        rank: given by spawn.
        processes: the same number as spawn's `nprocs`.
        argv: the trainer's flags.
        port: a free port of this host, where the processes meet.

    Raises:
        SystemExit: the run failed; 2 for a user's mistake, 1 for anything else.
    """
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    main(argv)
