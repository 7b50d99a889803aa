"""Every image can be opened; a broken one would end the training hours later, on one rank."""

import time

import torch

from trainer.checks.base import Result, Subject, quantity
from trainer.data.decode import SizeError

SHOWN = 10
SECONDS = 30.0


def check(subject: Subject) -> Result:
    """The ranks share the images out. After `SECONDS` the rest is left, and the check is SKIPPED, not passed.

    Bad images are a warning where the training leaves them out; not those that are sound, but of another size.
    """
    assert subject.images is not None
    splits = subject.images

    def opened() -> tuple[int, bool, list[str]]:
        deadline = time.monotonic() + SECONDS
        number, fatal = 0, not subject.skips_bad
        bad: list[str] = []
        for split in splits:
            # Spread over the split, for when time runs out.
            order = torch.randperm(split.count, generator=torch.Generator().manual_seed(0)).tolist()
            for index in order[subject.rank :: subject.count]:
                if time.monotonic() > deadline:
                    return number, fatal, bad
                number += 1
                try:
                    split.open(index)
                except Exception as error:
                    fatal = fatal or isinstance(error, SizeError)
                    message = " ".join(str(error).split())[:200]
                    bad.append(message if f"image {index}" in message else f"{split.name}: image {index}: {message}")
        return number, fatal, bad

    results = subject.each(opened)
    number = sum(count for count, *_ in results)
    total = sum(split.count for split in splits)
    bad = sorted(message for *_, messages in results for message in messages)
    if bad:
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        text = f"{quantity(len(bad), 'image')} of {total:,} cannot be used: {'; '.join(bad[:SHOWN])}{more}"
        if not any(fatal for _, fatal, _ in results) and len(bad) < number:
            return Result("WARN", f"--on_bad_image skip leaves out: {text}")
        return Result("FAIL", text)
    if number < total:
        return Result("SKIPPED", f"only {number:,} of {total:,} images were opened in {SECONDS:.0f} s, all of them well")
    return Result("PASS", f"{quantity(total, 'image')} opened ({', '.join(f'{split.name} {split.count:,}' for split in splits)})")
