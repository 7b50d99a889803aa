"""A file of a checkpoint has one writer; two of them tear it apart on the first bad day."""

from trainer.checks.base import Result, Subject, quantity, temporary_folder


def check(subject: Subject) -> Result:
    """Every rank saves into a folder of its own, so that whatever lies in it, that rank wrote, in whichever language.

    (Python's audit events do not see the files of torch.save and safetensors.) The main process writes; another rank may write files of
    its own, such as its generators' states, under names that no other rank uses.
    """
    assert subject.save is not None
    save = subject.save

    with temporary_folder(subject) as folder:
        subject.each(lambda: save(folder))
        files = subject.each(lambda: {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()})
    if not any(files):
        return Result("FAIL", "save(folder) wrote nothing into the folder: it must take it from its argument")
    for rank, own in enumerate(files[1:], start=1):
        for earlier in range(rank):
            twice = sorted(own.keys() & files[earlier].keys())
            if twice:
                return Result(
                    "FAIL", f"ranks {earlier} and {rank} both write {twice[0]}: write it on the main process only (is_main_process)"
                )
    if not files[0]:
        return Result("FAIL", f"rank {next(rank for rank, own in enumerate(files) if own)} writes, and not the main process")
    text = f"{quantity(len(files[0]), 'file')}, {sum(files[0].values()) / 1e6:.1f} MB, by the main process"
    others = sorted(name for own in files[1:] for name in own)
    if others:
        return Result("PASS", f"{text}; other ranks only files of their own, for example {others[0]}")
    return Result("PASS", f"{text}{' only' * (subject.count > 1)}")
