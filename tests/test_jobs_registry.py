"""`vgbatch models`: what an alias points at, how it moves and comes back, and what runs make of it."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pytest
from rich.console import Console
from typer.testing import CliRunner

import jobs.verification.table
import jobs.verification.verify
from jobs.aliases import read_aliases
from jobs.cli import app
from jobs.config import Settings
from jobs.lock import run_lock
from jobs.prepare import find_models, read
from jobs.registry import Change, add, history, promote, rollback
from jobs.registry_table import list_facts, show_change
from jobs.retry import read_failed
from jobs.verification.verify import Verification
from manifests.errors import Busy, LedgerError, ModelError, RunError, UsageError, VgbatchError
from manifests.job import Weights
from pipeline.models import resolve, tiny
from pipeline.models.hub import Snapshot
from pipeline.models.resolve import resolve_model
from storage import schema
from storage.ledger import Ledger
from tests.fake_engine import Knobs
from tests.run_cases import planned, query, render, rows_of, settings_for, write_manifest

TINY = Path(tiny.__file__).parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
QUIET = Console(quiet=True)


def make_model(folder: Path, mark: str) -> Path:
    """A checkpoint that can be planned with, as its weights are not looked at; of a revision of its own."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "*.safetensors"))
    for part in ("text_encoder", "vae", "transformer"):
        (folder / part / "diffusion_pytorch_model.safetensors").write_text("weights")
    change(folder, mark)
    return folder


def change(model: Path, mark: str) -> None:
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"_mark": mark}))


def revision_of(model: Path | str) -> str:
    return resolve_model(str(model)).source.base_revision


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return make_model(tmp_path / "a", "a")


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return make_model(tmp_path / "b", "b")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_for(tmp_path)


@dataclass
class FakeVerifier:
    """Says what it is told to and remembers what was compared: candidate, reference, both presets."""

    exit_code: int = 0
    passed: bool | None = None
    kept: bool = True
    error: VgbatchError | None = None
    meanwhile: Callable[[], object] = lambda: None
    compared: list[tuple[str, str, str, str]] = field(default_factory=list)
    num_clips: list[int | None] = field(default_factory=list)

    def __call__(
        self,
        settings: Settings,
        *,
        against: str,
        against_model: str,
        num_clips: int | None,
        console: Console,
    ) -> Verification:
        self.compared.append((settings.model, against_model, settings.preset, against))
        self.num_clips.append(num_clips)
        self.meanwhile()
        if self.error is not None:
            raise self.error
        passed = self.exit_code == 0 if self.passed is None else self.passed
        return Verification(passed=passed, exit_code=self.exit_code, facts={"passed": passed}, kept=self.kept)


def move(alias: str, model: Path | str, settings: Settings, *, force: bool = False, **verdict: Any) -> Change:
    verify = FakeVerifier(**verdict)
    return promote(alias, str(model), settings=settings, verify=verify, console=QUIET, force=force)


def target_of(alias: str, settings: Settings) -> str:
    return read_aliases(settings).targets[alias]


def add_prod(model: Path | str, settings: Settings) -> None:
    add("prod", str(model), settings=settings)


def facts_of(change: Change) -> tuple[str, str, bool, bool]:
    return (change.row.target, change.row.action, change.row.forced, change.made)


# ---- add --------------------------------------------------------------------------------------------


def test_an_alias_is_the_folder_and_the_hash_of_its_contents(settings: Settings, a: Path) -> None:
    add_prod(a, settings)
    (row,) = history("prod", settings=settings)
    assert (row.target, row.revision, row.action, row.forced) == (str(a), revision_of(a), "add", False)


def test_a_relative_folder_is_found_from_anywhere(
    settings: Settings, a: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(a.parent)
    add_prod("a", settings)
    monkeypatch.chdir("/")
    assert find_models(settings).spec(Weights("prod")).revision == revision_of(a)


def test_a_hub_id_is_pinned_to_the_commit_it_has_now(
    settings: Settings, a: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch_configs(repo: str, *, revision: str | None) -> Snapshot:
        asked.append((repo, revision))
        files = frozenset(file.relative_to(a).as_posix() for file in a.rglob("*") if file.is_file())
        return Snapshot(folder=a, commit=COMMIT, files=files)

    monkeypatch.setattr(resolve, "fetch_configs", fetch_configs)
    add_prod("org/wan@main", settings)
    assert target_of("prod", settings) == f"org/wan@{COMMIT}"
    find_models(settings).spec(Weights("prod"))
    assert asked == [("org/wan", "main"), ("org/wan", COMMIT)]


def test_what_another_alias_stands_for_is_taken_not_its_name(settings: Settings, a: Path, b: Path) -> None:
    add("next", str(a), settings=settings)
    add_prod("next", settings)
    move("next", b, settings)
    assert target_of("prod", settings) == str(a)


@pytest.mark.parametrize("alias", ["prod", "PROD"])
def test_an_alias_that_is_there_is_not_added_again(settings: Settings, a: Path, alias: str) -> None:
    add_prod(a, settings)
    with pytest.raises(UsageError, match=f"the alias {alias} is there already.*{settings.ledger}") as caught:
        add(alias, "builtin", settings=settings)
    assert caught.value.hint == "`vgbatch models promote prod MODEL` points it at another revision"
    assert len(history("prod", settings=settings)) == 1


@pytest.mark.parametrize(
    "alias",
    [
        "",
        "builtin",
        "Builtin",
        "org/name",
        "./x",
        "..",
        "~",
        "a b",
        "a@b",
        "-x",
        "рrod",
        "生産",
        "a\n",
        "x" * 65,
    ],
)
def test_a_name_that_cannot_be_an_alias_is_refused_with_what_can(settings: Settings, alias: str) -> None:
    with pytest.raises(UsageError, match="not a name for an alias") as caught:
        add(alias, "builtin", settings=settings)
    assert caught.value.hint is not None
    assert "valid: 1 to 64 letters" in caught.value.hint
    assert not settings.out.exists()


@pytest.mark.parametrize("alias", ["p", "Prod-2.1_b", "7b", "x" * 64])
def test_letters_digits_and_three_signs_make_an_alias(settings: Settings, alias: str) -> None:
    add(alias, "builtin", settings=settings)
    assert target_of(alias, settings) == "builtin"


@pytest.mark.parametrize("model", ["builtin", "./here"])
def test_an_alias_does_not_come_to_hide_a_folder(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    make_model(tmp_path / "here", "h")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"a folder of that name is here, .*: here") as caught:
        add("here", model, settings=settings)
    assert caught.value.hint is not None
    assert "an alias goes before a folder" in caught.value.hint
    assert not settings.out.exists()


def test_an_alias_goes_before_a_folder_that_comes_later(
    tmp_path: Path, settings: Settings, a: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_prod(a, settings)
    later = make_model(tmp_path / "prod", "later")
    monkeypatch.chdir(tmp_path)
    models = find_models(settings)
    assert models.spec(Weights("prod")).revision == revision_of(a)
    assert models.spec(Weights("./prod")).revision == revision_of(later)


def test_a_model_that_cannot_be_had_makes_nothing(settings: Settings) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        add_prod("./nowhere", settings)
    assert not settings.out.exists()


# ---- runs -------------------------------------------------------------------------------------------


def test_the_ledger_says_which_revision_made_which_clip(
    tmp_path: Path, settings: Settings, a: Path, b: Path
) -> None:
    add_prod(a, settings)
    render(tmp_path, rows_of("x"), model="prod")
    move("prod", b, settings)
    render(tmp_path, rows_of("x", "y"), model="prod")
    made = query(tmp_path, "SELECT id, model, model_revision FROM clips ORDER BY id")
    assert made == [("x", "prod", revision_of(a)), ("y", "prod", revision_of(b))]


def test_a_row_may_name_an_alias(tmp_path: Path, settings: Settings, a: Path) -> None:
    add_prod(a, settings)
    plan = planned(tmp_path, [{**row, "model": "prod"} for row in rows_of("x")]).plan
    assert plan.jobs["model_revision"].to_pylist() == [revision_of(a)]


def test_contents_that_have_changed_stop_a_run_with_both_revisions(
    tmp_path: Path, settings: Settings, a: Path
) -> None:
    add_prod(a, settings)
    before = revision_of(a)
    change(a, "other")
    with pytest.raises(ModelError) as caught:
        planned(tmp_path, rows_of("x"), model="prod")
    assert caught.value.message == (
        f"the alias prod points at revision {before[:12]}, but the contents have changed to "
        f"{revision_of(a)[:12]}: {a}"
    )
    assert caught.value.hint is not None
    assert f"`vgbatch models promote prod {a} --force`" in caught.value.hint
    plan = planned(tmp_path, [{**row, "model": "prod"} for row in rows_of("x")]).plan
    assert "the contents have changed" in plan.rejected["reason"][0].as_py()
    change(a, "a")
    assert planned(tmp_path, rows_of("x"), model="prod").plan.jobs.num_rows == 1


def test_a_folder_that_is_gone_is_named_beside_its_alias(tmp_path: Path, settings: Settings, a: Path) -> None:
    add_prod(a, settings)
    shutil.rmtree(a)
    with pytest.raises(ModelError, match=rf"no such folder.*prod \({a}\)"):
        planned(tmp_path, rows_of("x"), model="prod")


@pytest.mark.parametrize("name", ["Prod", "prd"])
def test_a_name_close_to_an_alias_is_asked_about(tmp_path: Path, settings: Settings, name: str) -> None:
    add_prod("builtin", settings)
    with pytest.raises(ModelError, match=name) as caught:
        planned(tmp_path, rows_of("x"), model=name)
    assert caught.value.hint == "did you mean the alias `prod`?"


def test_plan_says_what_an_alias_stands_for(tmp_path: Path, settings: Settings, a: Path) -> None:
    add_prod(a, settings)
    manifest = write_manifest(tmp_path, rows_of("x"))
    _, models = read(str(manifest), settings=settings_for(tmp_path, model="prod"))
    (said,) = models.announcements()
    assert said.startswith(f"model prod ({a}): ")


def test_a_retry_after_a_promotion_renders_with_what_the_alias_is_now(
    tmp_path: Path, settings: Settings, a: Path, b: Path
) -> None:
    add_prod(a, settings)
    render(tmp_path, rows_of("x"), model="prod", knobs=Knobs(non_finite_on=frozenset({"x"})))
    move("prod", b, settings)
    failed = read_failed(settings)
    assert failed is not None
    assert failed.reading.jobs["model_revision"].to_pylist() == [revision_of(b)]


# ---- promote ----------------------------------------------------------------------------------------


def test_a_candidate_that_passes_is_promoted(settings: Settings, a: Path, b: Path) -> None:
    add_prod(a, settings)
    verify = FakeVerifier()
    made = promote("prod", str(b), settings=settings, verify=verify, console=QUIET)
    assert verify.compared == [(str(b), str(a), "exact", "exact")]
    assert (facts_of(made), made.exit_code) == ((str(b), "promote", False, True), 0)
    assert target_of("prod", settings) == str(b)


def test_a_worse_candidate_is_refused(settings: Settings, a: Path, b: Path) -> None:
    add_prod(a, settings)
    made = move("prod", b, settings, exit_code=3)
    assert (made.made, made.exit_code, target_of("prod", settings)) == (False, 3, str(a))


def test_a_worse_candidate_is_promoted_by_force_and_recorded_so(settings: Settings, a: Path, b: Path) -> None:
    add_prod(a, settings)
    made = move("prod", b, settings, force=True, exit_code=3)
    assert (facts_of(made), made.exit_code) == ((str(b), "promote", True, True), 0)
    assert [row.forced for row in history("prod", settings=settings)] == [False, True]


def test_force_that_was_not_needed_is_not_recorded(settings: Settings, a: Path, b: Path) -> None:
    add_prod(a, settings)
    assert facts_of(move("prod", b, settings, force=True)) == (str(b), "promote", False, True)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("exit_code", "passed"), [(130, False), (3, False), (3, True)])
def test_a_comparison_without_a_verdict_that_was_kept_promotes_nothing_even_by_force(
    settings: Settings, a: Path, b: Path, exit_code: int, passed: bool, force: bool
) -> None:
    add_prod(a, settings)
    made = move("prod", b, settings, force=force, exit_code=exit_code, passed=passed, kept=False)
    assert (made.made, made.exit_code, target_of("prod", settings)) == (False, exit_code, str(a))
    said = io.StringIO()
    show_change(made, Console(file=said, width=500))
    assert said.getvalue().startswith("not promoted, the verdict could not be kept: prod points at ")
    assert made.verification is not None
    made.verification.facts["stopped_by"] = "SIGINT"
    show_change(made, Console(file=said, width=500))
    assert "\nnot promoted, stopped before the end: prod points at " in said.getvalue()
    assert "--force" not in said.getvalue()


def test_what_cannot_be_compared_is_promoted_by_force_alone(settings: Settings, a: Path, b: Path) -> None:
    add_prod(a, settings)
    broken = RunError("the device does not start: cuda:0", hint="look at it")
    with pytest.raises(RunError, match="cuda:0") as caught:
        move("prod", b, settings, error=broken)
    assert caught.value.hint == "look at it; `--force` promotes without comparing"
    assert facts_of(move("prod", b, settings, error=broken, force=True)) == (str(b), "promote", True, True)


def test_contents_changed_in_place_are_taken_by_force_alone(
    tmp_path: Path, settings: Settings, a: Path
) -> None:
    add_prod(a, settings)
    change(a, "other")
    with pytest.raises(ModelError, match="the contents have changed"):
        move("prod", a, settings)
    verify = FakeVerifier()
    promote("prod", str(a), settings=settings, verify=verify, console=QUIET, force=True)
    assert verify.compared == []
    assert [row.forced for row in history("prod", settings=settings)] == [False, True]
    assert planned(tmp_path, rows_of("x"), model="prod").plan.jobs.num_rows == 1


def test_the_same_revision_is_nothing_to_do(settings: Settings, a: Path) -> None:
    add_prod(a, settings)
    made = move("prod", a, settings, error=RunError("not to be asked"))
    assert (made.made, made.exit_code) == (False, 0)
    assert len(history("prod", settings=settings)) == 1


def test_the_same_contents_elsewhere_need_no_comparing(
    settings: Settings, a: Path, b: Path, tmp_path: Path
) -> None:
    add_prod(b, settings)
    move("prod", a, settings)
    elsewhere = a.rename(tmp_path / "elsewhere")
    made = move("prod", elsewhere, settings, error=RunError("not to be asked"))
    assert facts_of(made) == (str(elsewhere), "promote", False, True)
    assert rollback("prod", settings=settings).row.target == str(b)


def test_a_candidate_that_cannot_be_had_changes_nothing(settings: Settings, a: Path) -> None:
    add_prod(a, settings)
    with pytest.raises(ModelError, match="no such folder"):
        move("prod", "./nowhere", settings, force=True)
    assert len(history("prod", settings=settings)) == 1


def test_an_alias_that_moved_while_comparing_is_left_alone(
    settings: Settings, a: Path, b: Path, tmp_path: Path
) -> None:
    add_prod(a, settings)
    c = make_model(tmp_path / "c", "c")
    with pytest.raises(UsageError, match="another command has moved the alias meanwhile: prod"):
        move("prod", b, settings, meanwhile=lambda: move("prod", c, settings))
    assert target_of("prod", settings) == str(c)


def test_promoting_what_is_no_alias_names_those_that_are(settings: Settings) -> None:
    with pytest.raises(UsageError, match="no such alias") as caught:
        move("prod", "builtin", settings)
    assert caught.value.hint == "`vgbatch models add ALIAS MODEL` registers one"
    add("stage", "builtin", settings=settings)
    with pytest.raises(UsageError, match="no such alias") as caught:
        move("prod", "builtin", settings)
    assert caught.value.hint == "registered: stage"


# ---- rollback ---------------------------------------------------------------------------------------


def test_rollback_goes_back_one_promotion_each_time(settings: Settings, a: Path, b: Path) -> None:
    add_prod(a, settings)
    move("prod", b, settings, force=True, exit_code=3)
    move("prod", "builtin", settings)
    assert facts_of(rollback("prod", settings=settings)) == (str(b), "rollback", False, True)
    assert facts_of(rollback("prod", settings=settings)) == (str(a), "rollback", False, True)
    with pytest.raises(UsageError, match="nothing to go back to: prod"):
        rollback("prod", settings=settings)
    assert target_of("prod", settings) == str(a)


def test_a_promotion_after_a_rollback_can_be_taken_back_too(settings: Settings, a: Path, b: Path) -> None:
    add_prod(a, settings)
    move("prod", b, settings)
    rollback("prod", settings=settings)
    move("prod", "builtin", settings)
    assert rollback("prod", settings=settings).row.target == str(a)


def test_rollback_goes_to_where_the_same_contents_were_last(
    settings: Settings, a: Path, b: Path, tmp_path: Path
) -> None:
    add_prod(a, settings)
    moved = Path(shutil.copytree(a, tmp_path / "moved"))
    move("prod", moved, settings)
    move("prod", b, settings)
    assert rollback("prod", settings=settings).row.target == str(moved)
    with pytest.raises(UsageError, match="nothing to go back to: prod points at the first revision"):
        rollback("prod", settings=settings)


def test_rollback_knows_the_first_revision_again_and_the_same_weights_at_another_place(
    settings: Settings, a: Path, b: Path, tmp_path: Path
) -> None:
    add_prod(a, settings)
    move("prod", b, settings)
    move("prod", a, settings)
    assert rollback("prod", settings=settings).row.target == str(b)
    moved = Path(shutil.copytree(b, tmp_path / "moved"))
    move("prod", moved, settings)  # of the revision that the rollback went to
    move("prod", "builtin", settings)
    assert rollback("prod", settings=settings).row.target == str(moved)
    assert rollback("prod", settings=settings).row.target == str(a)


def test_rollback_refuses_what_is_no_longer_what_it_was(settings: Settings, a: Path, b: Path) -> None:
    add_prod(a, settings)
    move("prod", b, settings)
    change(a, "other")
    with pytest.raises(ModelError, match="cannot go back, the alias prod points at revision"):
        rollback("prod", settings=settings)
    assert target_of("prod", settings) == str(b)


# ---- with the configuration file --------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["prod", "Prod"])
def test_an_alias_of_both_places_is_refused_with_both(tmp_path: Path, a: Path, alias: str) -> None:
    add_prod(a, settings_for(tmp_path))
    (tmp_path / "vgbatch.toml").write_text(f'[models]\n{alias} = "builtin"\n')
    with pytest.raises(UsageError) as caught:
        planned(tmp_path, rows_of("x"))
    for part in (str(tmp_path / "vgbatch.toml"), str(tmp_path / "out" / "vgbatch.duckdb"), str(a), "builtin"):
        assert part in caught.value.message
    listed = list_facts(settings_for(tmp_path))
    assert [one["alias"] for one in listed["aliases"]] == ["prod", alias]
    assert listed["clashes"] == [caught.value.message]


def test_an_alias_of_the_configuration_file_is_listed_and_not_managed(tmp_path: Path, a: Path) -> None:
    (tmp_path / "vgbatch.toml").write_text('[models]\nprod = "a"\n')
    settings = settings_for(tmp_path)
    (listed,) = list_facts(settings)["aliases"]
    assert (listed["alias"], listed["target"]) == ("prod", str(a))
    assert (listed["origin"], listed["revision"]) == (str(tmp_path / "vgbatch.toml"), None)
    with pytest.raises(UsageError, match=r"the alias prod is there already, in .*vgbatch\.toml"):
        add_prod("builtin", settings)
    with pytest.raises(UsageError, match="an alias of the configuration file, not of the ledger: prod"):
        move("prod", "builtin", settings)
    assert not settings.ledger.exists()


# ---- ledgers ----------------------------------------------------------------------------------------


def test_verified_is_what_the_last_comparison_said(
    tmp_path: Path, settings: Settings, a: Path, b: Path
) -> None:
    add_prod(a, settings)
    move("prod", b, settings)
    add("stage", str(a), settings=settings)
    with duckdb.connect(str(settings.ledger)) as connection:
        connection.execute(
            "INSERT INTO verifications (model_revision, reference_revision, passed, verified_at) "
            "VALUES (?, ?, true, now())",
            [revision_of(b), revision_of(a)],
        )
    listed = {one["alias"]: one["verified"] for one in list_facts(settings)["aliases"]}
    assert listed == {"prod": True, "stage": None}


def test_an_older_ledger_is_brought_up_to_date_by_add(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        Ledger(settings.ledger).create()
    assert list_facts(settings)["aliases"] == []
    assert find_models(settings).spec(Weights("builtin")).name == "builtin"
    add_prod("builtin", settings)
    assert target_of("prod", settings) == "builtin"


def test_a_run_at_work_keeps_aliases_where_they_are(settings: Settings, a: Path, b: Path) -> None:
    add_prod(a, settings)
    move("prod", b, settings)
    with run_lock(out=settings.out, ledger=settings.ledger, run_id="night"):
        for command in (
            lambda: add("stage", str(a), settings=settings),
            lambda: move("prod", a, settings, force=True),
            lambda: rollback("prod", settings=settings),
        ):
            with pytest.raises(Busy, match="run night") as caught:
                command()
            assert caught.value.exit_code == 75
        assert list(read_aliases(settings).targets.items()) == [("prod", str(b))]


def test_a_comparison_that_is_kept_out_promotes_nothing_even_by_force(
    settings: Settings, a: Path, b: Path
) -> None:
    add_prod(a, settings)
    with pytest.raises(Busy):
        move("prod", b, settings, error=Busy("another run is at work here"), force=True)
    assert len(history("prod", settings=settings)) == 1


# ---- the command line -------------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path: Path) -> Iterator[Path]:
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def models(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def models_json(*arguments: str) -> tuple[int, Any]:
    code, out = models(*arguments, "--json")
    return code, json.loads(out)


def test_listing_without_a_ledger_makes_none(in_folder: Path) -> None:
    assert models("list") == (0, "no alias yet: `vgbatch models add ALIAS MODEL` registers one\n")
    assert models_json("list") == (0, {"aliases": [], "clashes": []})
    assert list(in_folder.iterdir()) == []


def test_an_alias_s_life_on_the_command_line(
    in_folder: Path, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = FakeVerifier(exit_code=3)
    monkeypatch.setattr(jobs.verification.verify, "verify", verify)
    monkeypatch.setattr(
        jobs.verification.table, "show_verification", lambda facts, console, page: print(facts)
    )
    first, second = revision_of(a)[:12], revision_of(b)[:12]
    assert models("add", "prod", "./a") == (0, f"prod points at {a} (revision {first}): added\n")
    code, out = models("promote", "prod", "./b", "--preset", "fast", "--clips", "60")
    assert (code, out.splitlines()) == (
        3,
        [
            "{'passed': False}",
            f"not promoted, the candidate is worse: prod points at {a} (revision {first}); "
            "`--force` promotes it all the same",
        ],
    )
    code, facts = models_json("promote", "prod", "./b")
    assert (code, facts["changed"], facts["target"]) == (3, False, str(a))
    assert facts["verification"] == {"passed": False}
    code, out = models("promote", "prod", "./b", "--force")
    assert (code, out.splitlines()[1]) == (
        0,
        f"prod points at {b} (revision {second}): promoted, forced, before {a} (revision {first})",
    )
    assert models("promote", "prod", "./b")[0] == 0
    assert verify.compared == [(str(b), str(a), preset, preset) for preset in ("fast", "exact", "exact")]
    assert verify.num_clips == [60, None, None]
    code, facts = models_json("rollback", "prod")
    assert (code, facts["target"], facts["before"]["target"]) == (0, str(a), str(b))
    code, facts = models_json("history", "prod")
    changes = [(change["action"], change["target"], change["forced"]) for change in facts["changes"]]
    assert changes == [("add", str(a), False), ("promote", str(b), True), ("rollback", str(a), False)]
    _, out = models("history", "prod")
    assert [entry.split()[1:3] for entry in out.splitlines()[1:]] == [
        ["added", first],
        ["promoted,", "forced"],
        ["rolled", "back"],
    ]
    code, facts = models_json("list")
    (prod,) = facts["aliases"]
    assert (prod["revision"], prod["action"], prod["verified"]) == (revision_of(a), "rollback", None)
    _, out = models("list")
    assert out.splitlines()[1].split()[:3] == ["prod", str(a), first]


def test_a_ledger_may_lie_elsewhere(in_folder: Path, a: Path) -> None:
    models("add", "prod", str(a), "--ledger", "shared.duckdb", "--out", "clips")
    assert models_json("list")[1]["aliases"] == []
    assert [one["alias"] for one in models_json("list", "--ledger", "shared.duckdb")[1]["aliases"]] == [
        "prod"
    ]


def test_a_folder_that_cannot_be_written_is_said(in_folder: Path) -> None:
    (in_folder / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to the folder .*file"):
        models("add", "prod", "builtin", "--out", "file")


def test_a_file_that_is_no_ledger_is_said(in_folder: Path) -> None:
    (in_folder / "notes.txt").write_text("not a database")
    with pytest.raises(LedgerError, match=r"notes\.txt"):
        models("list", "--ledger", "notes.txt")
