"""The documentation names only commands and options that exist, and every command."""

import re

import pytest
from typer.main import get_command

from jobs.cli import app
from manifests.presets import PRESETS
from tests.run_cases import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = get_command(app).commands
GROUPS = {name: group.commands for name, group in COMMANDS.items() if hasattr(group, "commands")}
SINGLE = {name: command for name, command in COMMANDS.items() if name not in GROUPS} | {
    f"{name} {part}": command for name, group in GROUPS.items() for part, command in group.items()
}
OPTIONS = {
    option
    for command in [*SINGLE.values(), get_command(app)]
    for parameter in command.params
    for option in parameter.opts
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_and_options_exist(page):
    text = page.read_text(encoding="utf-8")
    used = re.findall(
        r"\bvgbatch (plan|run|status|retry|report|manifest|doctor|[a-z]+)\b(?= |`|$)", text, re.M
    )
    code = " ".join(re.findall(r"`[^`]+`|^    .+$", text, re.M))
    named = set(re.findall(r"vgbatch ([a-z]+)", code))
    assert used
    assert named <= set(COMMANDS), named - set(COMMANDS)
    options = {
        option for line in code.split("vgbatch ")[1:] for option in re.findall(r"(?<![\w-])--[a-z-]+", line)
    }
    own = {option for option in options if option not in OPTIONS}
    assert own <= {"--foreground", "--preserve-status", "--signal", "--user", "--now", "--help"}, own


def test_the_readme_names_every_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"vgbatch {name}" not in text] == []


def test_every_command_offers_json():
    without = [
        name
        for name, command in SINGLE.items()
        if not any("--json" in parameter.opts for parameter in command.params)
    ]
    assert without == []


def test_every_preset_is_named_where_one_may_be_given():
    (row,) = re.findall(r"^\| `preset` \|.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert [name for name in PRESETS if f"`{name}`" not in row] == []
    for name in ("plan", "run", "verify", "probe", "models promote"):
        (option,) = [one for one in SINGLE[name].params if "--preset" in one.opts]
        assert [preset for preset in PRESETS if preset not in option.help] == [], name
