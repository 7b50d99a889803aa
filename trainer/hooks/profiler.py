"""Where the time of an update goes: torch.profiler over some updates, once."""

import time
from contextlib import AbstractContextManager

from torch.profiler import ProfilerActivity, profile, record_function

from trainer.files import write_text
from trainer.hooks.base import Hook
from trainer.state import Run

WARM_UP = 10
ROWS = 30


class Profiler(Hook):
    """Records `--profile` updates of the main process after `WARM_UP`: output_dir/profile/trace.json and table.txt.

    Each operator also stands under the phase of the loop in which it was called (`run.at`), so that the table tells data, forward,
    backward and update apart. An evaluation ends the recording.
    """

    def __init__(self) -> None:
        self.recording: profile | None = None
        self.phase: AbstractContextManager[object] | None = None
        self.updates = 0
        self.done = False

    def on_step_end(self, run: Run) -> None:
        if run.config.profile is None or not run.is_main or self.done:
            return
        if self.recording is not None:
            self.updates += 1
            if self.updates == run.config.profile:
                self.write(run)
        elif run.state.step - run.first_step >= WARM_UP:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.accelerator.device.type == "cuda" else [])]
            self.recording = profile(activities=activities)
            self.recording.start()
            self.start = time.perf_counter()
            run.on_phase = self.enter

    def enter(self, phase: str) -> None:
        """Close the phase before and open this one."""
        self.leave()
        self.phase = record_function(f"phase: {phase}")
        self.phase.__enter__()

    def leave(self) -> None:
        if self.phase is not None:
            self.phase.__exit__(None, None, None)
            self.phase = None

    def on_eval_start(self, run: Run) -> None:
        if self.recording is not None:
            self.write(run)

    def on_fit_end(self, run: Run) -> None:
        if run.config.profile is not None and run.is_main and not self.done:
            run.notes.append(f"profile: nothing was recorded, the run ended within its first {WARM_UP} updates")

    def on_interrupt(self, run: Run) -> None:
        if self.recording is not None:
            self.write(run)

    def write(self, run: Run) -> None:
        assert self.recording is not None
        run.on_phase = None
        self.leave()
        seconds = time.perf_counter() - self.start
        self.recording.stop()
        folder = run.output_dir / "profile"
        folder.mkdir(exist_ok=True)
        self.recording.export_chrome_trace(str(folder / "trace.json"))
        averages = self.recording.key_averages()
        kind = "device" if run.accelerator.device.type == "cuda" else "cpu"
        phases = sorted(
            ((event.key.removeprefix("phase: "), event.cpu_time_total / 1e6) for event in averages if event.key.startswith("phase: ")),
            key=lambda phase: -phase[1],
        )
        shares = ", ".join(f"{name} {100 * spent / seconds:.0f}%" for name, spent in phases)
        summary = f"{self.updates} updates, {1e3 * seconds / max(1, self.updates):.2f} ms each on the main process: {shares}"
        write_text(folder / "table.txt", f"{summary}\n\n{averages.table(sort_by=f'self_{kind}_time_total', row_limit=ROWS)}\n")
        run.notes.append(f"profile {summary}; see {folder / 'table.txt'}, and {folder / 'trace.json'} in ui.perfetto.dev")
        self.recording, self.done = None, True
