"""The SQL of cost.tally: what is derived from the ledger's tables, and what is asked of it.

Read top to bottom: macros, local days, names of buckets, tries with their slots, the share of every
attempt, idle time of runs, prices, videos; then the sums of one grouping, and the percentiles.
"""

from __future__ import annotations

from cost.margin import NS_PER_S

MACROS = f"""
CREATE MACRO ns(seconds) AS round(seconds * {NS_PER_S})::BIGINT;
CREATE MACRO slot_ns(total_ns, slot, size) AS total_ns * (slot + 1) // size - total_ns * slot // size;
CREATE MACRO quarter(instant) AS epoch_us(instant) // 900_000_000;
CREATE MACRO in_window(us) AS us >= getvariable('since_us') AND us < getvariable('until_us');
CREATE MACRO label(width, height, frames, steps) AS
    width || 'x' || height || 'x' || frames || ' ' || steps || if(steps = 1, ' step', ' steps');
"""

# Every offset from UTC in use is a multiple of 15 minutes, so an instant's quarter decides its local date.
QUARTERS = """
SELECT DISTINCT quarter(started_at) FROM batches
UNION SELECT DISTINCT quarter(started_at) FROM runs
UNION SELECT DISTINCT quarter(delivered_at) FROM clips
"""

TAGS = "SELECT DISTINCT unnest(map_keys(tags)) AS tag FROM jobs ORDER BY tag"

# One row for each job even if a rejected row has its id: a join must not count a share twice.
SET_TAG = """
CREATE OR REPLACE TABLE job_tags AS SELECT run_id, id, max(tags[?]) AS tag FROM jobs GROUP BY run_id, id
"""

# A bucket is called by its size, frames and steps; where that names several, by model and preset too;
# where that is not enough either, by its key.
DERIVED = f"""
CREATE TABLE job_tags (run_id VARCHAR, id VARCHAR, tag VARCHAR);

CREATE TABLE buckets AS
SELECT *,
    CASE WHEN count(*) OVER (PARTITION BY label) = 1 THEN label
         WHEN count(*) OVER (PARTITION BY label, model, preset) = 1 THEN concat_ws(' ', label, model, preset)
         ELSE concat_ws(' ', label, model, preset, bucket) END AS name
FROM (
    SELECT DISTINCT coalesce(bucket, '') AS bucket, model, preset,
        label(render_width, render_height, render_frames, steps) AS label
    FROM batches
);

CREATE TABLE tries AS
SELECT run_id, batch, try_number, epoch_us(started_at) AS at_us, day, model, preset, buckets.name AS bucket,
    ns(device_s) AS device_ns, ns(load_s) AS load_ns, coalesce(num_attempts, 0) AS num_attempts,
    num_jobs, size
FROM (
    SELECT * REPLACE (coalesce(bucket, '') AS bucket),
        label(render_width, render_height, render_frames, steps) AS label
    FROM batches
)
JOIN buckets USING (bucket, model, preset, label)
JOIN days ON quarter = quarter(started_at)
LEFT JOIN (SELECT run_id, batch, try_number, count(*) AS num_attempts FROM attempts GROUP BY ALL)
    USING (run_id, batch, try_number);

CREATE TABLE shares AS
SELECT run_id, batch, try_number, id, fingerprint, state, at_us, day, model, preset, bucket,
    slot_ns(device_ns, slot, size) AS share_ns
FROM (
    SELECT *, row_number() OVER (PARTITION BY run_id, batch, try_number ORDER BY id) - 1 AS slot
    FROM attempts
)
JOIN tries USING (run_id, batch, try_number);

CREATE TABLE idle AS
SELECT run_id, epoch_us(started_at) AS at_us, day,
    greatest(ns(device_s) - coalesce(busy_ns, 0), 0) AS idle_ns
FROM runs
JOIN days ON quarter = quarter(started_at)
LEFT JOIN (SELECT run_id, sum(device_ns + load_ns) AS busy_ns FROM tries GROUP BY run_id) USING (run_id);

CREATE TABLE prices AS
SELECT fingerprint, arg_max(price, (started_at, file, "row")) AS price
FROM jobs JOIN runs USING (run_id) WHERE price IS NOT NULL GROUP BY fingerprint;

CREATE TABLE videos AS
SELECT run_id, id, fingerprint, epoch_us(delivered_at) AS at_us, day,
    clips.model, clips.preset, bucket, price,
    round(num_frames::DOUBLE * fps_den / fps_num * {NS_PER_S})::BIGINT AS clip_ns,
    row_number() OVER (PARTITION BY fingerprint ORDER BY delivered_at, run_id, id) = 1 AS is_first
FROM clips
JOIN days ON quarter = quarter(delivered_at)
LEFT JOIN (SELECT DISTINCT run_id, batch, bucket FROM tries) USING (run_id, batch)
LEFT JOIN prices USING (fingerprint);
"""

TALLIES = """
WITH entries AS (
    SELECT {attempt} AS name, min(at_us) AS first_us,
        sum(share_ns) FILTER (state = 'delivered') AS useful_ns,
        sum(share_ns) FILTER (state <> 'delivered') AS wasted_ns,
        count(*) AS num_attempts,
        count(*) FILTER (state = 'delivered') AS num_delivered,
        count(*) FILTER (state = 'failed') AS num_failed,
        count(*) FILTER (state NOT IN ('delivered', 'failed')) AS num_lost
    FROM shares LEFT JOIN job_tags USING (run_id, id) WHERE in_window(at_us) GROUP BY 1
    UNION ALL BY NAME
    SELECT {batch} AS name, min(at_us) AS first_us, sum(load_ns) AS load_ns,
        sum(device_ns * num_jobs // size - device_ns * num_attempts // size) AS wasted_ns,
        sum(device_ns - device_ns * num_jobs // size) AS padding_ns
    FROM tries WHERE in_window(at_us) GROUP BY 1
    UNION ALL BY NAME
    SELECT {run} AS name, min(at_us) AS first_us, sum(idle_ns) AS idle_ns
    FROM idle WHERE in_window(at_us) GROUP BY 1
    UNION ALL BY NAME
    SELECT {clip} AS name, min(at_us) AS first_us,
        count(*) FILTER (is_first) AS num_videos,
        count(*) FILTER (NOT is_first) AS num_rendered_again,
        sum(clip_ns) FILTER (is_first) AS clip_ns,
        sum(price) FILTER (is_first) AS priced_usd,
        count(*) FILTER (is_first AND price IS NULL) AS num_unpriced,
        sum(clip_ns) FILTER (is_first AND price IS NULL) AS unpriced_ns
    FROM videos LEFT JOIN job_tags USING (run_id, id) WHERE in_window(at_us) GROUP BY 1
    UNION ALL BY NAME
    SELECT {attempt} AS name, min(at_us) AS first_us, count(*) AS num_undelivered
    FROM (
        SELECT * FROM shares ANTI JOIN clips USING (fingerprint)
        QUALIFY row_number() OVER (PARTITION BY fingerprint ORDER BY at_us DESC, run_id, batch DESC) = 1
    ) LEFT JOIN job_tags USING (run_id, id) WHERE in_window(at_us) GROUP BY 1
)
SELECT coalesce(name, '{shared}') AS name, {sums} FROM entries GROUP BY ALL ORDER BY min(first_us), name
"""

DURATIONS = f"""
SELECT bucket, count(*) AS num_clips, quantile_disc(share_ns, 0.5) / {NS_PER_S},
    quantile_disc(share_ns, 0.95) / {NS_PER_S}, quantile_disc(share_ns, 0.99) / {NS_PER_S}
FROM shares WHERE state = 'delivered' AND in_window(at_us)
GROUP BY bucket ORDER BY num_clips DESC, bucket
"""
