import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from tests.run_cases import ROOT, command, leftovers, mp4s, query, rows_of, write_manifest

LORA = {"A": (4, 5120), "B": (5120, 4)}  # of a model of 14B


def vgbatch(*args: str, folder: Path, knobs: str = "Knobs()", **environ: str) -> tuple[int, str, str]:
    process = command(*args, folder=folder, knobs=knobs, **environ)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_help_loads_no_heavy_package():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom jobs.cli import app\n"
        "r = CliRunner().invoke(app, ['--help'])\nassert r.exit_code == 0, r.output\n"
        "heavy = ('torch', 'diffusers', 'transformers', 'pyarrow', 'duckdb', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_packages_come_from_this_checkout():
    import cost
    import jobs
    import manifests
    import pipeline
    import storage

    for package in (cost, jobs, manifests, pipeline, storage):
        assert Path(package.__file__).parent.parent == ROOT


def test_run_and_report_need_no_flag(tmp_path):
    write_manifest(tmp_path, rows_of("a", "b"))
    code, out, err = vgbatch("run", "manifest.parquet", folder=tmp_path)
    assert code == 0, err
    assert "2 delivered" in out
    assert (tmp_path / "out" / "vgbatch.duckdb").exists()
    code, out, err = vgbatch("report", "--gpu-price", "2.5", folder=tmp_path)
    assert code == 0, err
    assert "n/a" in out


def test_a_log_has_no_control_characters_and_one_line_a_job_at_most(tmp_path):
    write_manifest(tmp_path, rows_of(*"abcdefghijklmnopqrst"))
    knobs = "Knobs(non_finite_on=frozenset({'c'}))"
    code, out, err = vgbatch("run", "manifest.parquet", folder=tmp_path, knobs=knobs)
    assert code == 3
    text = out + err
    assert "\r" not in text
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 20 + 8
    assert len([entry for entry in err.splitlines() if entry.startswith("failed: job 'c'")]) == 1


@pytest.mark.parametrize("locale", [{"LANG": "C"}, {"LC_ALL": "C"}, {"LC_ALL": "POSIX"}])
def test_any_locale_and_no_home_will_do(tmp_path, locale):
    rows = rows_of("红色")
    write_manifest(tmp_path, rows)
    code, _, err = vgbatch(
        "run", "manifest.parquet", folder=tmp_path, HOME="/proc/nowhere", XDG_CACHE_HOME="", **locale
    )
    assert code == 0, err
    code, out, err = vgbatch("status", "红色", folder=tmp_path, HOME="/proc/nowhere", **locale)
    assert code == 0, err
    assert "delivered" in out


def test_dry_run_is_plan_and_writes_nothing(tmp_path):
    write_manifest(tmp_path, rows_of("a", "b"))
    assert vgbatch("run", "manifest.parquet", "--dry-run", folder=tmp_path) == vgbatch(
        "plan", "manifest.parquet", folder=tmp_path
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.parquet"]


def builtin_lora(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    (own,) = (ROOT / "pipeline/models/tiny/few_step").glob("*.safetensors")
    file.write_bytes(own.read_bytes())
    return str(file)


def test_long_paths_of_loras_leave_the_plan_a_table(tmp_path):
    folder = tmp_path / "of somebody" / "with-a-long-name" / "and-many-loras"
    one, two = builtin_lora(folder / "one.safetensors"), builtin_lora(folder / "two.safetensors")
    write_manifest(tmp_path, [*rows_of("a", lora=f"{one}=0.5,{two}"), *rows_of("b", lora=one)])
    code, out, err = vgbatch("plan", "manifest.parquet", folder=tmp_path)
    assert code == 0, err
    table = out.partition("to render")[0]
    assert max(map(len, table.splitlines())) <= 170
    assert "builtin with ...g-name/and-many-loras/one.safetensors " in table
    assert "many-loras/one.safetensors=0.5, ...g-name/and-many-loras/two.safetensors " in table
    _, out, _ = vgbatch("plan", "manifest.parquet", "--json", folder=tmp_path)
    assert {bucket["lora"] for bucket in json.loads(out)["buckets"]} == {f"{one}=0.5,{two}", one}


def test_a_lora_of_another_model_gets_the_same_verdict_from_plan_and_run(tmp_path):
    weights = {f"transformer.blocks.0.attn1.to_q.lora_{half}.weight": shape for half, shape in LORA.items()}
    save_file(
        {name: np.ones(shape, np.float32) for name, shape in weights.items()}, tmp_path / "a.safetensors"
    )
    write_manifest(tmp_path, [*rows_of("a", lora="a.safetensors"), *rows_of("b")])
    told = []
    for command_name in ("plan", "run"):
        code, out, err = vgbatch(command_name, "manifest.parquet", folder=tmp_path)
        assert code == 3
        told.append([line for line in (out + err).splitlines() if line.startswith("rejected: ")])
    assert told[0] == told[1]
    assert "the LoRA changes blocks.0.attn1.to_q.weight, (5120, 5120), where the model has" in told[0][0]


def test_plan_and_run_give_the_same_verdict(tmp_path):
    rows = rows_of("a", "b", "c")
    rows[1]["width"] = 63
    write_manifest(tmp_path, rows)
    code, out, _ = vgbatch("plan", "manifest.parquet", "--json", folder=tmp_path)
    assert code == 3
    facts = json.loads(out)
    assert (facts["to_render"], facts["rejected"]) == (2, 1)
    (row,) = facts["rejected_rows"]
    assert (row["row"], row["id"], row["column"], row["value"]) == (1, "b", "width", "63")
    code, out, _ = vgbatch("run", "manifest.parquet", "--json", folder=tmp_path)
    assert code == 3
    assert json.loads(out)["num_rejected"] == 1


@pytest.mark.parametrize("command_name", ["plan", "run"])
def test_an_unusable_manifest_writes_nothing(tmp_path, command_name):
    good = write_manifest(tmp_path, rows_of("a", "b")).read_bytes()
    (tmp_path / "folder").mkdir()
    for name, content in {"zero": b"", "half": good[: len(good) // 2], "csv": b"id,prompt\na,b\n"}.items():
        (tmp_path / f"{name}.parquet").write_bytes(content)
    for target in ("zero.parquet", "half.parquet", "csv.parquet", "folder", "missing.parquet"):
        code, out, err = vgbatch(command_name, target, folder=tmp_path)
        assert (code, out) == (2, "")
        assert target in err
        assert "Traceback" not in err
        assert not (tmp_path / "out").exists()


def test_strict_turns_a_rejected_row_into_nothing_runs(tmp_path):
    rows = rows_of("a", "b")
    rows[1]["height"] = 63
    write_manifest(tmp_path, rows)
    code, _, err = vgbatch("run", "manifest.parquet", "--strict", folder=tmp_path)
    assert code == 2
    assert "height" in err
    assert not (tmp_path / "out").exists()


def test_an_encoder_that_ffmpeg_refuses_is_told_in_ffmpeg_s_words(tmp_path):
    write_manifest(tmp_path, rows_of("a"))
    code, _, err = vgbatch("run", "manifest.parquet", "--encoder-preset", "nope", folder=tmp_path)
    assert code == 2
    assert "nope" in err
    assert "medium" in err


def test_retry_runs_failed_jobs_only_and_brings_the_list_up_to_date(tmp_path):
    write_manifest(tmp_path, rows_of("a", "b", "c"))
    knobs = "Knobs(exit_on=frozenset({'b'}))"
    assert vgbatch("run", "manifest.parquet", folder=tmp_path, knobs=knobs)[0] == 3
    assert vgbatch("run", "manifest.parquet", folder=tmp_path)[0] == 3
    code, out, err = vgbatch("retry", "--json", folder=tmp_path)
    assert code == 0, err
    assert json.loads(out)["num_delivered"] == 1
    listed = pq.read_table(tmp_path / "out" / "clips.parquet").to_pylist()
    assert {row["id"]: row["status"] in ("delivered", "reused") for row in listed} == dict.fromkeys(
        "abc", True
    )
    numbers = query(tmp_path, "SELECT number, state FROM attempts WHERE id = 'b' ORDER BY started_at")
    assert numbers == [(1, "lost"), (2, "lost"), (3, "failed"), (1, "delivered")]
    code, _, err = vgbatch("retry", folder=tmp_path)
    assert code == 0
    assert "nothing to retry" in err


def test_status_of_one_job_and_of_an_unknown_one(tmp_path):
    write_manifest(tmp_path, rows_of("a", "b"))
    vgbatch("run", "manifest.parquet", folder=tmp_path, knobs="Knobs(raise_on=frozenset({'b'}))")
    code, out, _ = vgbatch("status", "b", folder=tmp_path)
    assert code == 0
    assert "cannot render" in out
    code, out, _ = vgbatch("status", "--json", folder=tmp_path)
    assert json.loads(out)["counts"]["delivered"] == 1
    code, _, err = vgbatch("status", "zz", folder=tmp_path)
    assert code == 2
    assert "zz" in err


def test_commands_without_a_ledger_say_how_to_get_one(tmp_path):
    for name in ("status", "report", "retry"):
        code, out, err = vgbatch(name, folder=tmp_path)
        assert (code, out) == (2, ""), name
        assert "vgbatch run" in err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("price", ["-1", "nan", "inf", "abc", "2,5", ""])
def test_a_wrong_price_names_its_flag(tmp_path, price):
    code, out, err = vgbatch("report", "--gpu-price", price, folder=tmp_path)
    assert (code, out) == (2, "")
    assert "--gpu-price" in err


def test_reports_of_empty_and_failed_ledgers_are_valid(tmp_path):
    pq.write_table(pa.table({"id": pa.nulls(0), "prompt": pa.nulls(0)}), tmp_path / "empty.parquet")
    assert vgbatch("run", "empty.parquet", folder=tmp_path)[0] == 0
    write_manifest(tmp_path, rows_of("a"))
    for _ in range(2):
        for extra in ([], ["--gpu-price", "0"], ["--gpu-price", "2.5", "--price-per-video", "0"]):
            code, out, err = vgbatch("report", "--json", *extra, folder=tmp_path)
            assert code == 0, err
            assert "NaN" not in out
            json.loads(out)
            code, out, err = vgbatch("report", *extra, folder=tmp_path)
            assert code == 0, err
            assert not re.search(r"-0(\.0+)?\b|nan|inf", out, re.IGNORECASE)
        vgbatch("run", "manifest.parquet", folder=tmp_path, knobs="Knobs(non_finite_on=frozenset({'a'}))")


def test_select_and_refresh_say_what_is_valid(tmp_path):
    write_manifest(tmp_path, rows_of("a"))
    for args in (["--select", "a"], ["--refresh", "all"], ["--select", "id=nobody"]):
        code, _, err = vgbatch("plan", "manifest.parquet", *args, folder=tmp_path)
        assert code == 2
        assert args[1].removeprefix("id=") in err


def test_the_output_folder_may_not_be_a_file(tmp_path):
    write_manifest(tmp_path, rows_of("a"))
    (tmp_path / "out").write_text("mine")
    code, _, err = vgbatch("run", "manifest.parquet", folder=tmp_path)
    assert code == 2
    assert "out" in err
    assert "Traceback" not in err


def test_a_folder_removed_while_encoding_fails_its_jobs_with_ffmpeg_s_words(tmp_path):
    write_manifest(tmp_path, rows_of("a"))
    knobs = "Knobs(remove_folder=Path('out/clips'))"
    code, _, err = vgbatch(
        "run",
        "manifest.parquet",
        "--out",
        "out/clips",
        "--ledger",
        "out/l.duckdb",
        folder=tmp_path,
        knobs=knobs,
    )
    assert code in (1, 3)
    assert "No such file" in err


def test_converted_manifests_run(tmp_path):
    (tmp_path / "m.csv").write_text(
        "id,prompt,seed,width,height,num_frames\n007,a ball,9007199254740993,64,64,5\n"
    )
    assert vgbatch("manifest", "from-csv", "m.csv", "m.parquet", folder=tmp_path)[0] == 0
    (tmp_path / "m.jsonl").write_text('{"id": "x", "prompt": "a ball", "width": 63}\n')
    code, _, err = vgbatch("manifest", "from-jsonl", "m.jsonl", "j.parquet", folder=tmp_path)
    assert code == 3
    assert "width" in err
    assert vgbatch("run", "m.parquet", folder=tmp_path)[0] == 0
    assert query(tmp_path, "SELECT id, seed FROM clips") == [("007", 9007199254740993)]
    assert len(mp4s(tmp_path)) == 1
    assert leftovers(tmp_path) == []


def test_the_template_runs_as_it_is(tmp_path):
    code, out, _ = vgbatch("manifest", "template", folder=tmp_path)
    assert code == 0
    assert "prompt" in out
    assert vgbatch("plan", "manifest.parquet", "--strict", folder=tmp_path)[0] == 0
    code, _, err = vgbatch("manifest", "template", folder=tmp_path)
    assert code == 2
    assert "--overwrite" in err


def test_a_closed_pipe_is_no_error(tmp_path):
    write_manifest(tmp_path, rows_of(*"abcdefgh"))
    process = command("plan", "manifest.parquet", "--json", folder=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.wait(timeout=60)


def test_shell_completion_is_offered(tmp_path):
    done = command(
        "--show-completion", "bash", folder=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    out, err = done.communicate(timeout=60)
    assert "complete" in out.lower(), (out, err)
    assert os.path.exists(tmp_path)


@pytest.mark.parametrize("args", [["--nope"], ["run"], ["plan", "m.parquet", "--limit", "0"], ["nope"]])
def test_wrong_usage_is_exit_2_with_the_word_in_question(tmp_path, args):
    code, out, err = vgbatch(*args, folder=tmp_path)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert "Error" in err


@pytest.mark.parametrize("args", [["run", "manifest.parquet"], ["probe", "manifest.parquet"], ["verify"]])
def test_a_card_that_is_not_there_is_wrong_usage_before_anything_starts(tmp_path, args):
    write_manifest(tmp_path, rows_of("a"))
    code, out, err = vgbatch(*args, "--devices", "cuda:977,cuda:978", folder=tmp_path)
    assert (code, out) == (2, "")
    told = [line for line in err.splitlines() if not line.startswith("model ")]
    assert told[0] == "error: --devices: not on this machine: cuda:977, cuda:978"
    assert told[1].startswith("hint: valid here: auto, cpu")
    assert len(told) == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["manifest.parquet"]


def test_a_variable_that_names_a_card_is_named_itself(tmp_path):
    write_manifest(tmp_path, rows_of("a"))
    code, _, err = vgbatch("run", "manifest.parquet", folder=tmp_path, VGBATCH_DEVICES="cuda:977")
    assert code == 2
    assert "VGBATCH_DEVICES: not on this machine: cuda:977" in err


def test_messages_that_cannot_be_written_do_not_end_a_run(tmp_path):
    write_manifest(tmp_path, rows_of("a", "b"))
    for number, ending in enumerate(("2>/dev/full", "2>&-", "2>&- >&-")):
        shell = f"{sys.executable} -m tests.fake_vgbatch run manifest.parquet --out o{number} {ending}"
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "FAKE_KNOBS": "Knobs()", "VGBATCH_DEVICES": "cpu"}
        done = subprocess.run(
            ["sh", "-c", shell], cwd=tmp_path, env=environ, capture_output=True, check=False
        )
        assert done.returncode == 0, (ending, done)
        assert len(list((tmp_path / f"o{number}").glob("*.mp4"))) == 2


def test_a_file_that_is_no_ledger_is_said_to_be_none(tmp_path):
    manifest = write_manifest(tmp_path, rows_of("a"))
    (tmp_path / "led.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.duckdb").touch()
    os.mkfifo(tmp_path / "fifo")
    for name in (manifest.name, "led.csv", "empty.duckdb", "fifo", "."):
        for arguments in (["report"], ["status"], ["run", "manifest.parquet"]):
            code, out, err = vgbatch(*arguments, "--ledger", name, folder=tmp_path)
            assert (code, out) == (2, ""), (name, arguments, err)
            assert "Traceback" not in err
    assert manifest.read_bytes()[:4] == b"PAR1"


def test_odd_things_with_a_clip_s_name_are_no_clips(tmp_path):
    write_manifest(tmp_path, rows_of("a", "b", "c"))
    assert vgbatch("run", "manifest.parquet", folder=tmp_path)[0] == 0
    first, second, third = mp4s(tmp_path)
    (tmp_path / "out" / "vgbatch.duckdb").unlink()
    for clip in (first, second, third):
        clip.unlink()
    first.mkdir()
    second.symlink_to("nowhere")
    os.mkfifo(third)
    code, _, err = vgbatch("plan", "manifest.parquet", folder=tmp_path)
    assert code == 0, err
    code, _, err = vgbatch("run", "manifest.parquet", folder=tmp_path)
    assert "Traceback" not in err
    assert code == 3
    assert err.count("has its name") == 2  # the broken link is replaced


def test_control_characters_of_an_id_stay_out_of_the_terminal(tmp_path):
    write_manifest(tmp_path, rows_of("\x1b[31mred"))
    knobs = "Knobs(non_finite_on=frozenset({'\\x1b[31mred'}))"
    code, out, err = vgbatch("run", "manifest.parquet", folder=tmp_path, knobs=knobs)
    assert code == 3
    status = vgbatch("status", "\x1b[31mred", folder=tmp_path)
    assert status[0] == 0
    assert "\x1b" not in out + err + "".join(status[1:])


def test_an_ffmpeg_that_does_not_work_stops_before_anything_is_rendered(tmp_path):
    write_manifest(tmp_path, rows_of("a"))
    code, _, err = vgbatch("run", "manifest.parquet", folder=tmp_path, IMAGEIO_FFMPEG_EXE="/bin/false")
    assert code == 2
    assert "ffmpeg" in err
    assert not (tmp_path / "out").exists()


def test_what_a_removed_folder_took_with_it_is_said_on_stderr(tmp_path):
    write_manifest(tmp_path, rows_of("a"))
    knobs = f"Knobs(remove_folder=Path({str(tmp_path / 'out')!r}))"
    code, out, err = vgbatch("run", "manifest.parquet", folder=tmp_path, knobs=knobs)
    assert code == 3
    assert "no longer a folder" in err
    assert "No such file" in err  # ffmpeg's own words
    assert "the folder for clips is gone" in out + err
    assert "clips in" not in out + err
    assert "vgbatch status" not in out + err


def test_status_of_a_job_shows_settings_that_are_zero(tmp_path):
    write_manifest(tmp_path, [rows_of("a")[0] | {"seed": 0, "guidance_scale": 0.0, "price": 0}])
    assert vgbatch("run", "manifest.parquet", folder=tmp_path)[0] == 0
    code, out, _ = vgbatch("status", "a", folder=tmp_path)
    assert code == 0
    shown = dict(line.split(None, 1) for line in out.splitlines() if len(line.split(None, 1)) == 2)
    assert shown["seed"] == "0"
    assert shown["row"] == "0"
    assert float(shown["price"]) == 0
    assert "negative" not in shown


@pytest.mark.parametrize(("name", "command"), [("m.csv", "from-csv"), ("m.JSONL", "from-jsonl")])
def test_a_file_that_can_be_converted_is_told_how(tmp_path, name, command):
    (tmp_path / name).write_text("id,prompt\n1,a ball\n")
    code, _, err = vgbatch("run", name, folder=tmp_path)
    assert code == 2
    assert f"vgbatch manifest {command} {name} manifest.parquet" in err


def test_a_seed_that_is_no_whole_number_is_told_so(tmp_path):
    write_manifest(
        tmp_path, [row | {"seed": seed} for row, seed in zip(rows_of("a", "b"), ("2.5", ""), strict=True)]
    )
    code, out, err = vgbatch("plan", "manifest.parquet", folder=tmp_path)
    assert code == 3
    assert (out + err).count("must be a whole number from 0 to 9223372036854775807") == 2


def test_a_value_of_white_space_is_shown_on_one_line(tmp_path):
    write_manifest(tmp_path, [rows_of("a")[0] | {"prompt": " \t\n "}])
    _, out, err = vgbatch("plan", "manifest.parquet", folder=tmp_path)
    (said,) = [line for line in (out + err).splitlines() if line.startswith("rejected:")]
    assert r"' \t\n '" in said
    assert "say what to show" in said


def test_buckets_that_differ_in_nothing_but_their_shift_are_told_apart(tmp_path):
    rows = [
        row | {"flow_shift": shift}
        for row, shift in zip(rows_of("a", "b", "c"), (3.0, 5.5, 3.0), strict=True)
    ]
    rows.append(rows_of("d")[0] | {"steps": 3})
    write_manifest(tmp_path, rows)
    _, out, err = vgbatch("plan", "manifest.parquet", folder=tmp_path)
    lines = [line for line in (out + err).splitlines() if "steps" in line and line.startswith("builtin")]
    assert sum(" shift 3 " in line for line in lines) == 1
    assert sum(" shift 5.5 " in line for line in lines) == 1
    assert len(lines) == 3
