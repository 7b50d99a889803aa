"""Draws docs/terminal.svg, the README's picture: a real training on two processes.

python docs/terminal.py
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
SHOWN = "accelerate launch --config_file accelerate_configs/multi_cpu.yaml trainer/main.py --epochs 3"
WIDTH = 118


def main() -> None:
    console = Console(record=True, width=WIDTH, quiet=False, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        command = [*SHOWN.split()[1:], "--output_dir", "runs/first"]
        files = [str(ROOT / word) if word.endswith((".yaml", ".py")) else word for word in command]
        done = subprocess.run(
            [str(Path(sys.executable).with_name("accelerate")), *files], cwd=folder, capture_output=True, text=True, check=True
        )
    console.print(Text(f"$ {SHOWN}", style="bold"))
    for line in done.stdout.splitlines():
        style = {"eval": "green", "done": "bold green", "trai": ""}.get(line[:4], "cyan")
        console.print(Text(line, style=style), overflow="fold")
    console.save_svg(str(Path(__file__).with_suffix(".svg")), title="accelerate-trainer")


if __name__ == "__main__":
    main()
