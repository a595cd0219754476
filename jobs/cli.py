"""The command line. Imports are inside the commands, so that `vgbatch --help` is instant."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from jobs.cli_manifest import manifest_app
from jobs.cli_models import models_app
from jobs.cli_options import (
    ClipsOpt,
    CrfOpt,
    DevicesOpt,
    EncoderPresetOpt,
    JsonOpt,
    LedgerOpt,
    LimitOpt,
    ManifestArg,
    ModelOpt,
    OutOpt,
    PresetOpt,
    RefreshOpt,
    SelectOpt,
    StrictOpt,
    TagOpt,
    announce,
    command_line,
    messages,
    output,
    parse_selection,
    print_json,
    resolve_settings,
)
from jobs.terminal import prepare_streams, printable
from manifests.errors import UsageError, VgbatchError

if TYPE_CHECKING:
    from jobs.config import Settings
    from jobs.prepare import Selection
    from jobs.probing import Probe

# Newer versions of typer carry a click of their own: the base of typer's own errors fits both.
_ClickError: Any = typer.BadParameter.mro()[2]

app = typer.Typer(
    name="vgbatch",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(manifest_app, name="manifest")
app.add_typer(models_app, name="models")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"vgbatch {version('vgbatch')}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Render a Parquet manifest of prompts into verified MP4 clips, at the lowest GPU cost per clip."""


@app.command()
def plan(
    manifest: ManifestArg,
    out: OutOpt = None,
    ledger: LedgerOpt = None,
    model: ModelOpt = None,
    preset: PresetOpt = None,
    crf: CrfOpt = None,
    encoder_preset: EncoderPresetOpt = None,
    strict: StrictOpt = None,
    tag: TagOpt = None,
    limit: LimitOpt = None,
    select: SelectOpt = None,
    refresh: RefreshOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Say what `run` would do: buckets, batches, reuse, rejected rows. Writes nothing, uses no GPU."""
    settings = resolve_settings(
        out=out,
        ledger=ledger,
        model=model,
        preset=preset,
        crf=crf,
        encoder_preset=encoder_preset,
        strict=strict,
        tags=tag,
    )
    raise typer.Exit(_plan(manifest, settings, parse_selection(limit, select, refresh), as_json=as_json))


@app.command()
def run(
    manifest: ManifestArg,
    out: OutOpt = None,
    ledger: LedgerOpt = None,
    model: ModelOpt = None,
    preset: PresetOpt = None,
    crf: CrfOpt = None,
    encoder_preset: EncoderPresetOpt = None,
    devices: DevicesOpt = None,
    strict: StrictOpt = None,
    tag: TagOpt = None,
    limit: LimitOpt = None,
    select: SelectOpt = None,
    refresh: RefreshOpt = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="The same as `plan`.")] = False,
    as_json: JsonOpt = False,
) -> None:
    """Render the manifest. The same command again resumes: what is delivered is reused."""
    settings = resolve_settings(
        out=out,
        ledger=ledger,
        model=model,
        preset=preset,
        crf=crf,
        encoder_preset=encoder_preset,
        devices=devices,
        strict=strict,
        tags=tag,
    )
    selection = parse_selection(limit, select, refresh)
    if dry_run:
        raise typer.Exit(_plan(manifest, settings, selection, as_json=as_json))
    raise typer.Exit(_run(manifest, settings, selection, as_json=as_json))


@app.command()
def retry(
    out: OutOpt = None, ledger: LedgerOpt = None, devices: DevicesOpt = None, as_json: JsonOpt = False
) -> None:
    """Try the failed jobs again, and only those; their earlier tries stay in the ledger."""
    from jobs.prepare import Selection
    from jobs.retry import read_failed
    from jobs.runner import run as run_reading
    from jobs.views import run_facts, show_run

    settings = resolve_settings(out=out, ledger=ledger, devices=devices)
    failed = read_failed(settings)
    if failed is None:
        print("nothing to retry: no job of this ledger has failed", file=sys.stderr)
        return
    summary = run_reading(
        failed.reading,
        models=failed.models,
        settings=settings,
        selection=Selection(),
        manifest=failed.manifest,
        command=command_line(),
        console=messages(),
        retry_of=failed.run_id,
    )
    if as_json:
        print_json(run_facts(summary))
    else:
        show_run(summary, output())
    raise typer.Exit(summary.exit_code)


@app.command()
def status(
    job: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One job; all of them when left out.")
    ] = None,
    out: OutOpt = None,
    ledger: LedgerOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Counts and the last run, or everything about one job."""
    from jobs.status import job_facts, run_status, show_job, show_status
    from jobs.views import plain

    settings = resolve_settings(out=out, ledger=ledger)
    if job is None:
        facts = run_status(settings)
        show = show_status
    else:
        facts = job_facts(job, settings)
        show = show_job
    if as_json:
        print_json(plain(facts))
    else:
        show(facts, output())


@app.command()
def report(
    out: OutOpt = None,
    ledger: LedgerOpt = None,
    gpu_price: Annotated[str | None, typer.Option("--gpu-price", help="Dollars an hour of one GPU.")] = None,
    price_per_video: Annotated[
        str | None, typer.Option("--price-per-video", help="Dollars a clip without a price of its own earns.")
    ] = None,
    price_per_second: Annotated[
        str | None, typer.Option("--price-per-second", help="Dollars a finished second of such a clip earns.")
    ] = None,
    utilization: Annotated[
        str | None, typer.Option("--utilization", help="Share of paid GPU time in use, above 0, at most 1.")
    ] = None,
    by: Annotated[str | None, typer.Option("--by", help="bucket, model, preset, day, run, or a tag.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="From this date or instant on.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Before this date or instant.")] = None,
    tz: Annotated[
        str | None, typer.Option("--tz", help="Time zone of days and bare dates (default: UTC).")
    ] = None,
    as_json: JsonOpt = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout.")] = False,
) -> None:
    """What the clips cost and earned."""
    from jobs.reporting import make_report, print_report

    if as_json and as_csv:
        raise UsageError("--json and --csv were both given", hint="choose one of them")
    settings = resolve_settings(
        out=out,
        ledger=ledger,
        gpu_price=gpu_price,
        price_per_video=price_per_video,
        price_per_second=price_per_second,
        utilization=utilization,
        tz=tz,
    )
    made = make_report(settings, by=by, since=since, until=until)
    print_report(made, console=output(), form="json" if as_json else "csv" if as_csv else "table")


@app.command()
def doctor(
    out: OutOpt = None,
    ledger: LedgerOpt = None,
    config: Annotated[
        bool, typer.Option("--config", help="Show each setting with where it comes from.")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Check versions, devices, ffmpeg, folders, the ledger and the configuration."""
    from jobs.doctor import print_checks, print_config, run_checks

    settings = resolve_settings(out=out, ledger=ledger)
    if config:
        print_config(settings, output(), as_json=as_json)
        return
    checks = run_checks(settings)
    print_checks(checks, output(), as_json=as_json)
    raise typer.Exit(1 if any(check.state == "failed" for check in checks) else 0)


@app.command()
def bench(
    shape: Annotated[
        str | None,
        typer.Argument(metavar="SHAPE", help="A published model's name (default: Wan2.2-TI2V-5B)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A checkpoint instead: alias, local folder, or hub id.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--size", help="Such as 1344x768 (default: the shape's).")
    ] = None,
    frames: Annotated[
        int | None, typer.Option("--frames", help="Frames of a clip (default: the shape's).")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps of a whole clip (default: the shape's).")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="How long each side of a stage is timed.")
    ] = 20.0,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage",
            help="forward, decode, clip, small, steady, turbo, fast; repeatable (default: forward, decode).",
        ),
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Time diffusers' own pipeline and ours side by side, on random weights of a published shape."""
    from jobs.aliases import read_aliases
    from jobs.bench_table import show_bench
    from jobs.benching import plan_bench, run_bench

    wanted = plan_bench(
        shape,
        model=model,
        aliases=read_aliases(resolve_settings()).targets,
        stages=stage or [],
        size=size,
        num_frames=frames,
        steps=steps,
        seconds=seconds,
    )
    facts = run_bench(wanted, command=command_line(), say=lambda text: print(text, file=sys.stderr))
    if as_json:
        print_json(facts)
    else:
        show_bench(facts, output())


@app.command()
def verify(
    manifest: Annotated[
        str | None,
        typer.Argument(
            metavar="[MANIFEST]", help="Prompts to compare on; left out, a set that is chosen by the model."
        ),
    ] = None,
    out: OutOpt = None,
    ledger: LedgerOpt = None,
    model: ModelOpt = None,
    preset: PresetOpt = None,
    lora: Annotated[str | None, typer.Option("--lora", help="LoRAs of both sides.")] = None,
    against: Annotated[
        str, typer.Option("--against", metavar="PRESET", help="Preset of the reference, as in `--preset`.")
    ] = "exact",
    against_model: Annotated[
        str | None, typer.Option("--against-model", help="Model of the reference (default: the same).")
    ] = None,
    clips: ClipsOpt = None,
    devices: DevicesOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Render the same prompts and noise twice, and say whether the clips pass a preset's gate."""
    from jobs.verification.table import show_verification
    from jobs.verification.verify import verify as run_verify

    settings = resolve_settings(out=out, ledger=ledger, model=model, preset=preset, devices=devices)
    verification = run_verify(
        settings,
        lora=lora,
        against=against,
        against_model=against_model,
        manifest=manifest,
        num_clips=clips,
        console=messages(),
        command=command_line(),
    )
    if as_json:
        print_json(verification.facts)
    else:
        show_verification(verification.facts, output(), page=verification.page)
    raise typer.Exit(verification.exit_code)


@app.command()
def probe(
    manifest: Annotated[
        str | None,
        typer.Argument(
            metavar="[MANIFEST]",
            help="Probe the buckets of what `plan` would render; left out, the one that the options name.",
        ),
    ] = None,
    out: OutOpt = None,
    ledger: LedgerOpt = None,
    model: ModelOpt = None,
    preset: PresetOpt = None,
    size: Annotated[
        str | None, typer.Option("--size", help="Such as 1344x768 (default: the model's).")
    ] = None,
    frames: Annotated[
        int | None, typer.Option("--frames", help="Frames of a clip (default: the model's).")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Steps of the bucket (default: the model's).")
    ] = None,
    guidance_scale: Annotated[
        float | None,
        typer.Option("--guidance-scale", help="Guidance of the bucket (default: the model's)."),
    ] = None,
    crf: CrfOpt = None,
    encoder_preset: EncoderPresetOpt = None,
    devices: DevicesOpt = None,
    strict: StrictOpt = None,
    tag: TagOpt = None,
    limit: LimitOpt = None,
    select: SelectOpt = None,
    refresh: RefreshOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Measure batch sizes on the first device, and keep for each bucket the one that `run` is to use."""
    settings = resolve_settings(
        out=out,
        ledger=ledger,
        model=model,
        preset=preset,
        crf=crf,
        encoder_preset=encoder_preset,
        devices=devices,
        strict=strict,
        tags=tag,
    )
    of_bucket = {"--size": size, "--frames": frames, "--steps": steps, "--guidance-scale": guidance_scale}
    if manifest is not None:
        _refuse_flags(of_bucket, "with a manifest", hint="its rows say which buckets there are")
        raise typer.Exit(
            _probe_manifest(manifest, settings, parse_selection(limit, select, refresh), as_json=as_json)
        )
    of_manifest = {"--limit": limit, "--select": select, "--refresh": refresh}
    _refuse_flags(of_manifest, "without a manifest", hint="it chooses among a manifest's rows")
    raise typer.Exit(
        _probe_bucket(
            settings,
            as_json=as_json,
            size=size,
            num_frames=frames,
            steps=steps,
            guidance_scale=guidance_scale,
        )
    )


def main() -> NoReturn:
    """The entry point: errors a user can cause become one message and an exit code."""
    # Arrow's own choice, mimalloc, keeps what it frees: 0.15 GB more at the peak of a million-row plan.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    prepare_streams()
    _require_utf8(sys.argv)
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except _ClickError as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except VgbatchError as error:
        print(printable(f"error: {error.message}"), file=sys.stderr)
        if error.hint:
            print(printable(f"hint: {error.hint}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our stdout left (`| head`): nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print("error: no space left for what is written to stdout", file=sys.stderr)
        sys.exit(1)


def _require_utf8(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            print(f"error: not UTF-8: {argument!r}", file=sys.stderr)
            print("hint: with a UTF-8 locale, such as `LC_ALL=C.UTF-8`, any text will do", file=sys.stderr)
            sys.exit(2)


def _plan(manifest: str, settings: Settings, selection: Selection, *, as_json: bool) -> int:
    from jobs.prepare import plan_reading, read
    from jobs.views import plain, plan_facts, show_plan

    reading, models = read(manifest, settings=settings)
    announce(models)
    planned = plan_reading(reading, models=models, settings=settings, selection=selection)
    if as_json:
        print_json(plain(plan_facts(planned)))
    else:
        show_plan(planned, output())
    return 3 if planned.plan.rejected.num_rows or planned.plan.exhausted.num_rows else 0


def _run(manifest: str, settings: Settings, selection: Selection, *, as_json: bool) -> int:
    from jobs.prepare import read
    from jobs.runner import run as run_reading
    from jobs.views import run_facts, show_plan, show_run

    reading, models = read(manifest, settings=settings)
    announce(models)
    stderr = messages()
    summary = run_reading(
        reading,
        models=models,
        settings=settings,
        selection=selection,
        manifest=manifest,
        command=command_line(),
        console=stderr,
        on_plan=lambda planned: show_plan(planned, stderr),
    )
    if as_json:
        print_json(run_facts(summary))
    else:
        show_run(summary, output())
    return summary.exit_code


def _probe_manifest(manifest: str, settings: Settings, selection: Selection, *, as_json: bool) -> int:
    from jobs.prepare import plan_reading, read
    from jobs.probing import probe
    from jobs.views import rejected_facts, show_rejected

    reading, models = read(manifest, settings=settings)
    announce(models)
    stderr = messages()
    show_rejected(rejected_facts(reading.rejected), stderr)
    probed = probe(
        lambda: plan_reading(reading, models=models, settings=settings, selection=selection).plan.buckets,
        models=models,
        settings=settings,
        console=stderr,
    )
    return _show_probe(probed, as_json=as_json) or (3 if reading.rejected.num_rows else 0)


def _probe_bucket(settings: Settings, *, as_json: bool, **wanted: Any) -> int:
    from jobs.prepare import read_bucket
    from jobs.probing import probe

    bucket, models = read_bucket(settings=settings, **wanted)
    announce(models)
    probed = probe(lambda: [bucket], models=models, settings=settings, console=messages())
    return _show_probe(probed, as_json=as_json)


def _show_probe(probed: Probe, *, as_json: bool) -> int:
    from jobs.probe_table import probe_facts, show_probe

    facts = probe_facts(probed)
    if as_json:
        print_json(facts)
    else:
        show_probe(facts, output())
    return probed.exit_code


def _refuse_flags(flags: Mapping[str, object], where: str, *, hint: str) -> None:
    for flag, value in flags.items():
        if value is not None:
            raise UsageError(f"{flag} {where}: {value}", hint=hint)
