"""What the commands of one process have in common: their arguments, and how they end."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from trainer.config import suggestion
from trainer.runtime import EXIT_FAILURE, UserError, disk_full, env_int, say


class Arguments(argparse.ArgumentParser):
    """A parser whose errors are sentences; flags may have hyphens or underscores."""

    def __init__(self, usage: str, description: str) -> None:
        super().__init__(usage=usage, description=description, allow_abbrev=False)

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The arguments; None takes the command line's.

        Raises:
            UserError: they are wrong.
            SystemExit: `--help` was asked for, and is printed.
        """
        words = []
        for word in sys.argv[1:] if argv is None else argv:
            flag, equals, value = word.partition("=")
            words.append(f"--{flag[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") and len(word) > 2 else word)
        found, unknown = self.parse_known_args(words)
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings]
            raise UserError(f"unknown flag {unknown[0]}{suggestion(unknown[0], known) or ': see --help'}")
        return found

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see --help")


def at_least_one(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text!r}")
    return int(text)


def run_alone(name: str, body: Callable[[], int]) -> None:
    """Run a command that is one process. A user's mistake is one sentence on stderr.

    Args:
        name: the command's.
        body: returns the exit code.

    Raises:
        SystemExit: the code is not 0; 2 for a user's mistake, 1 when the system refuses something or the reader of stdout has gone.
    """
    try:
        if env_int("WORLD_SIZE", 1) > 1:
            # Each of them says so, if it is asked alone; a launcher's others are silent.
            if env_int("RANK", 0):
                raise SystemExit(2)
            raise UserError(f"{name} runs in one process: start it with `python trainer/{name}.py`")
        code = body()
        sys.stdout.flush()
    except UserError as error:
        say(f"error: {error}")
        code = error.code
    except BrokenPipeError:
        # Whoever read stdout (`| head`) has gone; Python would say so once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILURE
    except OSError as error:
        say(f"error: {disk_full(error) or error}")
        code = EXIT_FAILURE
    except KeyboardInterrupt:
        say("interrupted")
        code = EXIT_FAILURE
    if code:
        raise SystemExit(code)
