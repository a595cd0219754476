"""The ledger's schema: numbered, append-only steps. A released step is never edited.

No primary keys, unique indexes or constraints: replaying the write-ahead log after a kill has failed
on them elsewhere, and the parent is the only writer and knows what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# duckdb has no useful types; a connection is passed as Any.
Migration = Callable[[Any], None]


def m001_first_light(connection: Any) -> None:
    connection.execute(
        """
        CREATE TABLE runs (
            run_id VARCHAR, started_at TIMESTAMPTZ, heartbeat_at TIMESTAMPTZ, ended_at TIMESTAMPTZ,
            state VARCHAR, exit_code INTEGER, manifest VARCHAR, out_dir VARCHAR, num_devices INTEGER,
            device_s DOUBLE, host VARCHAR, gpu_name VARCHAR, versions MAP(VARCHAR, VARCHAR), command VARCHAR,
            retry_of VARCHAR
        );
        CREATE TABLE jobs (
            run_id VARCHAR, state VARCHAR, reason VARCHAR,
            file VARCHAR, "row" BIGINT, id VARCHAR, fingerprint VARCHAR, prompt VARCHAR,
            negative_prompt VARCHAR, width INTEGER, height INTEGER, num_frames INTEGER, fps_num INTEGER,
            fps_den INTEGER, seed BIGINT, steps INTEGER, guidance_scale DOUBLE, guidance_scale_2 DOUBLE,
            flow_shift DOUBLE, preset VARCHAR, model VARCHAR, model_revision VARCHAR, crf INTEGER,
            encoder_preset VARCHAR, render_width INTEGER, render_height INTEGER, render_frames INTEGER,
            priority INTEGER, price DECIMAL(18, 6), warning VARCHAR, tags MAP(VARCHAR, VARCHAR)
        );
        CREATE TABLE batches (
            run_id VARCHAR, batch BIGINT, try_number INTEGER, worker INTEGER, device VARCHAR,
            gpu_name VARCHAR, bucket VARCHAR, model VARCHAR, model_revision VARCHAR, numerics VARCHAR,
            preset VARCHAR, render_width INTEGER, render_height INTEGER, render_frames INTEGER,
            steps INTEGER, guidance_scale DOUBLE, guidance_scale_2 DOUBLE, flow_shift DOUBLE,
            size INTEGER, cap INTEGER, num_jobs INTEGER, state VARCHAR, started_at TIMESTAMPTZ,
            load_s DOUBLE, encode_s DOUBLE, denoise_s DOUBLE, decode_s DOUBLE, write_s DOUBLE,
            device_s DOUBLE, peak_memory_bytes BIGINT
        );
        CREATE TABLE attempts (
            run_id VARCHAR, batch BIGINT, try_number INTEGER, id VARCHAR, fingerprint VARCHAR,
            number INTEGER, state VARCHAR, reason VARCHAR, traceback VARCHAR, started_at TIMESTAMPTZ,
            ended_at TIMESTAMPTZ, device_s DOUBLE, write_s DOUBLE
        );
        CREATE TABLE clips (
            run_id VARCHAR, batch BIGINT, id VARCHAR, fingerprint VARCHAR, file VARCHAR, num_bytes BIGINT,
            width INTEGER, height INTEGER, num_frames INTEGER, fps_num INTEGER, fps_den INTEGER,
            seed BIGINT, model VARCHAR, model_revision VARCHAR, numerics VARCHAR, preset VARCHAR,
            cap INTEGER, gpu_name VARCHAR, adopted BOOLEAN, delivered_at TIMESTAMPTZ
        );
        CREATE TABLE caps (
            bucket VARCHAR, gpu_name VARCHAR, numerics VARCHAR, cap INTEGER, source VARCHAR,
            recorded_at TIMESTAMPTZ
        );
        CREATE TABLE flushes (flush_id VARCHAR, flushed_at TIMESTAMPTZ, num_outcomes INTEGER);
        """
    )


def m002_probes(connection: Any) -> None:
    connection.execute(
        """
        CREATE TABLE probes (
            probe_id VARCHAR, bucket VARCHAR, model VARCHAR, model_revision VARCHAR, preset VARCHAR,
            render_width INTEGER, render_height INTEGER, render_frames INTEGER, steps INTEGER,
            guidance_scale DOUBLE, gpu_name VARCHAR, numerics VARCHAR, size INTEGER, clip_step_s DOUBLE,
            peak_memory_bytes BIGINT, recorded_at TIMESTAMPTZ
        );
        """
    )


def m003_loras_verifications_and_aliases(connection: Any) -> None:
    connection.execute(
        """
        ALTER TABLE jobs ADD COLUMN lora VARCHAR;
        ALTER TABLE batches ADD COLUMN lora VARCHAR;
        ALTER TABLE clips ADD COLUMN lora VARCHAR;
        ALTER TABLE probes ADD COLUMN lora VARCHAR;
        CREATE TABLE verifications (
            verification_id VARCHAR, model VARCHAR, model_revision VARCHAR, lora VARCHAR, preset VARCHAR,
            reference_model VARCHAR, reference_revision VARCHAR, reference_lora VARCHAR,
            reference_preset VARCHAR, numerics VARCHAR, gpu_name VARCHAR, num_clips INTEGER, passed BOOLEAN,
            result VARCHAR, verified_at TIMESTAMPTZ
        );
        CREATE TABLE aliases (
            alias VARCHAR, target VARCHAR, revision VARCHAR, action VARCHAR, forced BOOLEAN,
            recorded_at TIMESTAMPTZ
        );
        """
    )


MIGRATIONS: tuple[Migration, ...] = (m001_first_light, m002_probes, m003_loras_verifications_and_aliases)
