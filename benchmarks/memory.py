"""Does memory grow with the number of images? Folders of JPEG photos of 256 pixels, which are decoded each time, and 20 updates on each.

    python benchmarks/memory.py --images 1000 10000 50000

Prints for each size what the images would take decoded, and the peak of the memory of the trainer and its data workers together, in which
pages that they share count once, and the libraries' files, which are shared with whatever else runs, do not count. Exits with 1 when it
grows by more than a tenth of the smallest one's. On Linux.
"""

import argparse
import io
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy
import psutil
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
CLASSES, SIDE, DIFFERENT = 10, 256, 100


def photo(seed: int) -> bytes:
    """A JPEG file of about 10 KB: smooth colours."""
    small = numpy.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=80)
    return file.getvalue()


def write(folder: Path, images: int) -> int:
    """`images` to train on and 100 to evaluate on; returns their bytes."""
    photos = [photo(seed) for seed in range(DIFFERENT)]
    for split, count in (("train", images), ("val", 100)):
        for name in range(CLASSES):
            (folder / split / str(name)).mkdir(parents=True)
        for index in range(count):
            (folder / split / str(index % CLASSES) / f"{index:06d}.jpg").write_bytes(photos[index % DIFFERENT])
    return sum(len(photos[index % DIFFERENT]) for index in range(images))


def peak(command: list[str], log: Path) -> int:
    """The largest sum of the memory of a command and its children, bytes, twice in a row of twenty looks a second.

    Between the looks at two processes one can have become two, whose shared pages then count twice.
    """
    with log.open("wb") as output, psutil.Popen(command, stdout=output, stderr=output) as process:
        largest = before = 0
        while process.poll() is None:
            total = 0
            with suppress(psutil.Error, OSError):
                for one in (process, *process.children(recursive=True)):
                    lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
                    total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
            largest, before = max(largest, min(before, total)), total
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(log.read_text(encoding="utf-8")[-3000:])
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[1000, 10_000, 50_000])
    parser.add_argument("--folder", help="where the photos are written for the time; unset: the system's")
    parser.add_argument("--num_workers", type=int, default=2)
    arguments = parser.parse_args()
    peaks = []
    for images in arguments.images:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
            size = write(Path(place, "photos"), images)
            flags = ["--data_dir", f"{place}/photos", "--image_size", "224", "--batch_size", "4", "--eval_batch_size", "4"]
            flags += ["--max_steps", "20", "--cache", "none", "--num_workers", str(arguments.num_workers), "--output_dir", f"{place}/run"]
            start = time.perf_counter()
            peaks.append(peak([sys.executable, str(ROOT / "trainer" / "main.py"), *flags], Path(place, "log")))
            print(
                f"images {images:6d}  on disk {size / 2**20:6.0f} MiB  decoded {images * 3 * 224 * 224 / 2**20:6.0f} MiB  "
                f"peak {peaks[-1] / 2**20:6.0f} MiB  {time.perf_counter() - start:5.1f} s",
                flush=True,
            )
    growth = max(peaks) / peaks[0] - 1
    print(f"{'flat' if growth <= 0.1 else 'NOT FLAT'}: at most {100 * growth:.1f} % more than with {arguments.images[0]} images")
    raise SystemExit(growth > 0.1)


if __name__ == "__main__":
    main()
