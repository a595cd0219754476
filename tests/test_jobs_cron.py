"""The crontab line of docs/cron.md, run as cron would run it, with a stand-in for the command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "cron.md"
COMMAND = "/opt/vgbatch/.venv/bin/vgbatch"


def cron_command(schedule: str) -> str:
    (line,) = (
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"    {schedule} ")
    )
    return line.strip().removeprefix(schedule).replace("\\%", "%")


def run_by_cron(command: str, folder: Path, *, stand_in: str) -> subprocess.CompletedProcess[str]:
    """stand_in: the shell script that takes the place of the command."""
    (folder / "vgbatch").write_text(f"#!/bin/sh\n{stand_in}\n")
    (folder / "vgbatch").chmod(0o755)
    command = command.replace(COMMAND, str(folder / "vgbatch")).replace("/srv/vgbatch", str(folder))
    environment = [f"HOME={folder}", "PATH=/usr/bin:/bin"]
    return subprocess.run(
        ["env", "-i", *environment, "/bin/sh", "-c", command], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("code", [0, 75, 130])
def test_a_night_that_needs_nobody_mails_nothing(tmp_path: Path, code: int) -> None:
    done = run_by_cron(
        cron_command("0 22 * * *"), tmp_path, stand_in=f'echo "$@"; echo oops >&2; exit {code}'
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "run.log").read_text() == "run manifest.parquet\noops\n"


@pytest.mark.parametrize("code", [1, 2, 3, 137, 143])
def test_a_failed_night_mails_its_exit_code_and_the_end_of_the_log(tmp_path: Path, code: int) -> None:
    (tmp_path / "run.log").write_text("earlier\n" * 100)
    done = run_by_cron(cron_command("0 22 * * *"), tmp_path, stand_in=f"echo error: no luck; exit {code}")
    lines = done.stdout.splitlines()
    assert lines[0] == f"exit code {code}"
    assert lines[-1] == "error: no luck"
    assert len(lines) == 41


def test_the_deadline_interrupts_and_mails_nothing(tmp_path: Path) -> None:
    command = cron_command("0 22 * * *").replace(" 9h ", " 0.2 ")
    done = run_by_cron(command, tmp_path, stand_in="trap 'echo finishing; exit 130' INT; while :; do :; done")
    assert done.stdout == ""
    assert (tmp_path / "run.log").read_text() == "finishing\n"


def test_a_missing_working_folder_is_mailed(tmp_path: Path) -> None:
    command = cron_command("0 22 * * *").replace("cd /srv/vgbatch", "cd /srv/vgbatch/missing")
    done = run_by_cron(command, tmp_path, stand_in="exit 0")
    assert "exit code" in done.stdout
    assert "missing" in done.stderr


def test_the_morning_report_covers_yesterday(tmp_path: Path) -> None:
    done = run_by_cron(cron_command("0 8 * * *"), tmp_path, stand_in='echo "$@"')
    words = done.stdout.split()
    assert words[:4] == ["report", "--gpu-price", "2.5", "--since"]
    assert words[5] == "--until"
    assert len(words[4]) == len(words[6]) == len("2026-11-01")
    assert words[4] < words[6]
