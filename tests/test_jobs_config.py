from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from jobs.config import DEFAULT, Settings, resolve, unknown_variables
from manifests.errors import UsageError


def settings(
    folder: Path, *, toml: str | None = None, environ: dict[str, str] | None = None, **flags: object
) -> Settings:
    if toml is not None:
        (folder / "vgbatch.toml").write_text(toml, encoding="utf-8")
    return resolve(flags, environ=environ or {}, folder=folder)


def refused(
    folder: Path, *, toml: str | None = None, environ: dict[str, str] | None = None, **flags: object
) -> str:
    """The message and the hint."""
    with pytest.raises(UsageError) as caught:
        settings(folder, toml=toml, environ=environ, **flags)
    assert caught.value.exit_code == 2
    return f"{caught.value.message}\n{caught.value.hint}"


def test_defaults(tmp_path: Path) -> None:
    made = settings(tmp_path)
    assert made == Settings(
        out=tmp_path / "out",
        ledger=tmp_path / "out" / "vgbatch.duckdb",
        model="builtin",
        preset="exact",
        crf=18,
        encoder_preset="medium",
        strict=False,
        tags=(),
        gpu_price=None,
        price_per_video=None,
        price_per_second=None,
        utilization=None,
        tz=ZoneInfo("UTC"),
        devices="auto",
        aliases={},
        origins=dict.fromkeys(made.origins, DEFAULT),
    )


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    toml = 'crf = 20\nmodel = "a/file"\nencoder_preset = "fast"\n'
    made = settings(
        tmp_path, toml=toml, environ={"VGBATCH_CRF": "21", "VGBATCH_MODEL": "an/environment"}, crf=22
    )
    assert (made.crf, made.model, made.encoder_preset, made.preset) == (22, "an/environment", "fast", "exact")
    assert [made.origins[name] for name in ("crf", "model", "encoder_preset", "preset")] == [
        "--crf",
        "VGBATCH_MODEL",
        str(tmp_path / "vgbatch.toml"),
        DEFAULT,
    ]


def test_every_setting_can_be_given_in_all_three_places(tmp_path: Path) -> None:
    texts = {
        "out": "clips",
        "ledger": "l.duckdb",
        "model": "org/name",
        "preset": "exact",
        "crf": "30",
        "encoder_preset": "slow",
        "strict": "true",
        "tags": "customer,campaign",
        "gpu_price": "2.5",
        "price_per_second": "0.1",
        "utilization": "0.7",
        "tz": "Asia/Tokyo",
        "devices": "cuda:0, cuda:1",
    }
    made = settings(tmp_path)
    assert {*texts, "price_per_video"} == set(made.origins)
    by_variable = settings(
        tmp_path, environ={f"VGBATCH_{name.upper()}": text for name, text in texts.items()}
    )
    by_flag = settings(tmp_path, **{**texts, "strict": True})
    lines = [
        f'{name} = "{text}"' for name, text in texts.items() if name not in ("crf", "strict", "gpu_price")
    ]
    by_file = settings(tmp_path, toml="\n".join([*lines, "crf = 30", "strict = true", "gpu_price = 2.5"]))
    for one in (by_variable, by_flag, by_file):
        assert one.out == tmp_path / "clips"
        assert one.ledger == tmp_path / "l.duckdb"
        assert (one.crf, one.strict, one.encoder_preset) == (30, True, "slow")
        assert one.tags == ("customer", "campaign")
        assert one.prices.gpu_per_hour == Decimal("2.5")
        assert one.prices.utilization == Decimal("0.7")
        assert one.prices.per_second == Decimal("0.1")
        assert str(one.tz) == "Asia/Tokyo"
        assert one.devices == "cuda:0,cuda:1"
        assert one.model == "org/name"


def test_empty_variables_and_flags_that_are_none_count_as_not_given(tmp_path: Path) -> None:
    made = settings(tmp_path, environ={"VGBATCH_CRF": "", "VGBATCH_CONFIG": ""}, model=None)
    assert (made.crf, made.model) == (18, "builtin")


def test_the_ledger_is_in_the_output_folder_wherever_that_is(tmp_path: Path) -> None:
    made = settings(tmp_path, toml='out = "/data/clips"')
    assert made.ledger == Path("/data/clips/vgbatch.duckdb")


def test_the_file_can_be_elsewhere_and_its_relative_paths_start_there(tmp_path: Path) -> None:
    elsewhere = tmp_path / "etc"
    (elsewhere / "wan").mkdir(parents=True)
    (elsewhere / "night.toml").write_text(
        'out = "clips"\nmodel = "wan"\n[models]\nbig = "./wan"\nhub = "org/name@main"'
    )
    made = settings(tmp_path, environ={"VGBATCH_CONFIG": "etc/night.toml", "VGBATCH_LEDGER": "l.duckdb"})
    assert made.out == elsewhere / "clips"
    assert made.ledger == tmp_path / "l.duckdb"
    assert made.model == str(elsewhere / "wan")
    assert made.aliases == {"big": str(elsewhere / "wan"), "hub": "org/name@main"}


def test_a_model_on_the_command_line_stays_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "wan").mkdir()
    assert settings(tmp_path, model="wan").model == "wan"
    assert settings(tmp_path, environ={"VGBATCH_MODEL": "wan"}).model == "wan"


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings(tmp_path, toml='out = "~/clips"').out == tmp_path / "clips"


def test_money_in_the_file_is_read_exactly(tmp_path: Path) -> None:
    assert settings(tmp_path, toml="gpu_price = 0.1").gpu_price == Decimal("0.1")
    assert settings(tmp_path, toml='gpu_price = "3.60"').gpu_price == Decimal("3.60")


def test_a_price_per_video_flag_replaces_a_price_per_second_from_the_file(tmp_path: Path) -> None:
    made = settings(tmp_path, toml="price_per_second = 0.1", price_per_video="0.5")
    assert (made.price_per_video, made.price_per_second) == (Decimal("0.5"), None)
    assert made.prices.per_video == Decimal("0.5")


def test_both_clip_prices_from_one_place_are_refused(tmp_path: Path) -> None:
    text = refused(tmp_path, price_per_video="0.5", price_per_second="0.1")
    assert "--price-per-video and --price-per-second" in text


@pytest.mark.parametrize(
    "line",
    [
        "crf = 52",
        "crf = 0",
        "crf = -1",
        "crf = true",
        "crf = 18.5",
        'crf = "high"',
        "out = 3",
        'out = ""',
        "model = []",
        'preset = "turbos"',
        "preset = ['exact']",
        'encoder_preset = "medum"',
        'strict = "yes"',
        "strict = 1",
        "tags = 1",
        'tags = [""]',
        "gpu_price = nan",
        "gpu_price = inf",
        "gpu_price = -1",
        "gpu_price = true",
        "gpu_price = 2026-11-01",
        'gpu_price = "2,5"',
        "utilization = 0",
        "utilization = 70",
        'tz = "Berlin/Europe"',
        "tz = 1",
        'devices = "cuda"',
        'devices = "cuda:0,cuda:0"',
        'devices = "cuda:0,cpu"',
        'devices = "cuda:0,"',
        'devices = "auto,cpu"',
        "devices = []",
    ],
)
def test_a_bad_value_in_the_file_names_file_key_and_value(tmp_path: Path, line: str) -> None:
    text = refused(tmp_path, toml=line)
    key, _, value = line.partition(" = ")
    assert f"{key} in {tmp_path / 'vgbatch.toml'}" in text
    assert value.strip("\"'[]").lower().removeprefix("2026-11-01") in text.lower()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VGBATCH_CRF", "high"),
        ("VGBATCH_STRICT", "maybe"),
        ("VGBATCH_GPU_PRICE", "-1"),
        ("VGBATCH_TZ", "Nowhere"),
        ("VGBATCH_DEVICES", "gpu0"),
        ("VGBATCH_ENCODER_PRESET", "quick"),
    ],
)
def test_a_bad_value_in_a_variable_names_the_variable(tmp_path: Path, name: str, value: str) -> None:
    text = refused(tmp_path, environ={name: value})
    assert name in text
    assert repr(value) in text


def test_a_bad_flag_names_the_flag_and_the_near_miss(tmp_path: Path) -> None:
    text = refused(tmp_path, encoder_preset="medum")
    assert "--encoder-preset: 'medum'" in text
    assert "did you mean medium?" in text


@pytest.mark.parametrize(
    ("word", "strict"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)]
)
def test_switches_in_the_environment(tmp_path: Path, word: str, strict: bool) -> None:
    assert settings(tmp_path, environ={"VGBATCH_STRICT": word}).strict is strict


@pytest.mark.parametrize("devices", ["auto", "cpu", "cpu,cpu", "cuda:0", "cuda:1,cuda:0"])
def test_devices(tmp_path: Path, devices: str) -> None:
    assert settings(tmp_path, devices=devices).devices == devices


def test_an_unknown_key_gets_a_near_miss(tmp_path: Path) -> None:
    text = refused(tmp_path, toml="gpu-price = 2.5")
    assert f"unknown key in {tmp_path / 'vgbatch.toml'}: gpu-price" in text
    assert "did you mean gpu_price?" in text


def test_an_unknown_key_without_a_near_miss_gets_all_keys(tmp_path: Path) -> None:
    assert "encoder_preset" in refused(tmp_path, toml="zzz = 1")


@pytest.mark.parametrize(
    "toml", ["models = 3", "[models]\nbig = 3", '[models]\nbig = ""', "[models.big]\na = 1"]
)
def test_bad_aliases_are_refused(tmp_path: Path, toml: str) -> None:
    assert "models" in refused(tmp_path, toml=toml)


@pytest.mark.parametrize("alias", ["", "builtin", "BuiltIn", "org/name", "org/name@main", "./wan", "~"])
def test_an_alias_with_another_model_s_name_is_refused(tmp_path: Path, alias: str) -> None:
    text = refused(tmp_path, toml=f'[models]\n"{alias}" = "builtin"')
    assert f"not a name for an alias, models in {tmp_path / 'vgbatch.toml'}: '{alias}'" in text
    assert "neither a path, nor a hub id, nor `builtin`" in text


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    text = refused(tmp_path, toml="crf = 18\nout = \n")
    assert str(tmp_path / "vgbatch.toml") in text
    assert "line 2" in text


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vgbatch.toml").write_bytes(b"\xff\xfe")
    assert "not valid TOML" in refused(tmp_path)


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_named_file_that_cannot_be_read_names_the_variable(tmp_path: Path, name: str) -> None:
    text = refused(tmp_path, environ={"VGBATCH_CONFIG": name})
    assert "VGBATCH_CONFIG" in text
    assert str(tmp_path / name) in text


def test_misspelt_variables_are_found() -> None:
    environ = {
        "VGBATCH_GPU_PRCE": "1",
        "VGBATCH_OUT": "x",
        "VGBATCH_CONFIG": "y",
        "VGBATCH_XYZ": "",
        "HOME": "/",
    }
    assert unknown_variables(environ) == {"VGBATCH_GPU_PRCE": "VGBATCH_GPU_PRICE", "VGBATCH_XYZ": None}


def test_settings_load_no_heavy_package() -> None:
    code = "import sys, jobs.config; print({'pyarrow', 'duckdb', 'torch', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
