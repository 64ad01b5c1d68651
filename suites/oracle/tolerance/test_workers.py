"""Processes that die are started again, those that do not end are ended, and what they kept is collected."""

import time
from pathlib import Path

from suites.tolerance.workers import marker_of, parts_of, work

DIES_ONCE = """
import os, sys
from pathlib import Path
file = Path(sys.argv[1])
if not file.exists():
    file.write_text("begun")
    os.abort()
file.write_text("ended")
"""
NEVER_ENDS = "import time\nwhile True: time.sleep(1)"


def test_a_process_that_dies_is_started_again(tmp_path: Path) -> None:
    collected = []
    files = [tmp_path / name for name in "ab"]
    files[1].write_text("begun")
    starts = work(
        [["-c", DIES_ONCE, str(file)] for file in files],
        time.monotonic() + 60,
        lambda: collected.append([file.read_text() for file in files]),
    )
    assert starts == [2, 1]
    assert collected[-1] == ["ended", "ended"]


def test_a_process_that_does_not_end_is_ended() -> None:
    collected = []
    # That it comes back at all shows it.
    assert work([["-c", NEVER_ENDS]], time.monotonic() - 3.5, lambda: collected.append(1)) == [1]
    assert collected == [1]


def test_places() -> None:
    part = parts_of(Path("x/r.json")) / "0.json"
    assert part == Path("x/r.json.parts/0.json")
    assert marker_of(part) == Path("x/r.json.parts/0.json.now")
    assert marker_of(part).suffix != ".json"
