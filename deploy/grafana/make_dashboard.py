"""Writes corella.json, the dashboard, from the list of its panels below.

    python3 deploy/grafana/make_dashboard.py
"""

import json
from pathlib import Path

DASHBOARD = Path(__file__).with_name("corella.json")
ONE = '{instance=~"$instance", model_name=~"$model_name"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


def select(metric, labels=""):
    return f"{metric}{ONE}{', ' + labels if labels else ''}}}"


def rate(metric, labels=""):
    return f"rate({select(metric, labels)}[$__rate_interval])"


def total(metric, by="instance", labels=""):
    return f"sum by ({by}) ({rate(metric, labels)})"


def quantiles(metric):
    """Returns queries for the median, and for the values that one in twenty and one in a hundred exceed."""
    return [
        (f"histogram_quantile({share}, sum by (le) ({rate(metric + '_bucket')}))", name)
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ]


# Rows of panels, each with its title, unit, description, and queries with legends.
ROWS = {
    "Load": [
        ("Running and waiting", "short", "Requests that run, and those that wait to start or to resume.", [
            (f"sum({select('corella_num_requests_running')})", "running"),
            (f"sum({select('corella_num_requests_waiting')})", "waiting"),
        ]),
        ("Tokens per second", "short", "Prompt tokens count when their first output token is there.", [
            (f"sum({rate('corella_generation_tokens_total')})", "generated"),
            (f"sum({rate('corella_prompt_tokens_total')})", "prompt"),
        ]),
        ("Answers by status", "reqps", "499 is a client that left early.", [
            (total("corella_http_requests_total", "status"), "{{status}}"),
        ]),
        ("Ends of choices", "short", "How choices ended, per second.", [
            (total("corella_request_success_total", "finished_reason"), "{{finished_reason}}"),
        ]),
    ],
    "Latency": [
        ("Time to first token", "s", "From the arrival of a request.", quantiles("corella_time_to_first_token_seconds")),
        ("Time between tokens", "s", "Of one choice.", quantiles("corella_inter_token_latency_seconds")),
        ("Whole request", "s", "From arrival to last token.", quantiles("corella_e2e_request_latency_seconds")),
        ("Where the first token waits", "s", "One request in twenty takes longer than this.", [
            (f"histogram_quantile(0.95, sum by (le) ({rate(f'corella_request_{part}_time_seconds_bucket')}))", part)
            for part in ("tokenize", "queue", "prefill")
        ]),
    ],
    "KV cache": [
        ("KV cache in use", "percentunit", "Share of the pages that running requests hold.", [
            (select("corella_kv_cache_usage_perc"), "{{instance}}"),
        ]),
        ("Pages", "short", "Pages in use, cached for later prompts, pinned, and held for other nodes.", [
            (f"sum({select(f'corella_kv_pages_{state}')})", state.replace("_", " "))
            for state in ("in_use", "cached", "pinned", "held")
        ]),
        ("Prompt tokens found in the cache", "percentunit", "They were not computed.", [
            (
                f"sum({rate('corella_prefix_cache_hits_total')}) / sum({rate('corella_prefix_cache_queries_total')})",
                "found",
            ),
        ]),
        ("Preemptions and evictions", "short", "Per second. Preemptions that go on ask for a larger KV cache.", [
            (f"sum({rate('corella_num_preemptions_total')})", "preemptions"),
            (f"sum({rate('corella_kv_pages_evicted_total')})", "evicted pages"),
            (f"sum({rate('corella_kv_spills_total')})", "spills"),
        ]),
    ],
    "KV cache on a disk": [
        ("Pages on the disk", "short", "With --kv-disk: pages on the disks, and those for which there is room.", [
            (f"sum({select('corella_kv_disk_blocks')})", "used"),
            (f"sum({select('corella_kv_disk_max_blocks')})", "room"),
        ]),
        ("Pages read and written", "short", "Per second.", [
            (f"sum({rate('corella_kv_disk_hits_total')})", "read for requests"),
            (f"sum({rate('corella_kv_disk_blocks_stored_total')})", "written"),
        ]),
        ("Bytes written for each byte read", "short", "In a day. Far above 1, the disk wears out for little.", [
            (
                f"sum(increase({select('corella_kv_disk_written_bytes_total')}[1d]))"
                f" / sum(increase({select('corella_kv_disk_read_bytes_total')}[1d]))",
                "written / read",
            ),
        ]),
        ("Errors and copies given up", "short", "In five minutes. Requests that need the pages end a copy.", [
            (select('corella_kv_disk_off'), "disks off {{instance}}"),
            (f"increase({select('corella_kv_disk_errors_total')}[5m])", "errors {{instance}}"),
            (f"increase({select('corella_kv_disk_damaged_blocks_total')}[5m])", "damaged {{instance}}"),
            (f"increase({select('corella_kv_disk_copies_dropped_total')}[5m])", "given up {{instance}}"),
        ]),
    ],
    "Steps": [
        ("Steps per second", "short", "", [
            (total("corella_steps_total"), "{{instance}}"),
        ]),
        ("Time spent in steps", "percentunit", "Below 1, the engine has time to spare.", [
            (total("corella_step_seconds_total"), "{{instance}}"),
        ]),
        ("Generated tokens per step", "short", "How well requests share steps.", [
            (f"{total('corella_generation_tokens_total')} / {total('corella_steps_total')}", "{{instance}}"),
        ]),
        ("Drafts that were right", "percentunit", "With --speculate.", [
            (
                f"{total('corella_spec_decode_num_accepted_tokens_total')}"
                f" / {total('corella_spec_decode_num_draft_tokens_total')}",
                "{{instance}}",
            ),
        ]),
        ("Failed and slow steps", "short", "In five minutes. There should be none.", [
            (f"increase({select('corella_failed_steps_total')}[5m])", "failed {{instance}}"),
            (f"increase({select('corella_slow_steps_total')}[5m])", "slow {{instance}}"),
        ]),
        ("Most steps one request was passed over", "short", "", [
            (select("corella_max_passed_over"), "{{instance}}"),
        ]),
    ],
    "Prefill and decode nodes": [
        ("Sessions", "short", "Requests that run on two nodes.", [
            (f"sum by (instance) ({select('corella_sessions')})", "{{instance}}"),
        ]),
        ("Decode nodes", "short", "By what prefill nodes know of them.", [
            (f"max by (standing) ({select('corella_decode_nodes')})", "{{standing}}"),
        ]),
        ("KV rows sent", "Bps", "", [
            (total("corella_kv_sent_bytes_total"), "{{instance}}"),
        ]),
        ("Stages of a session, p95", "s", "From opening a session to the first token of the decode node.", [
            (f"histogram_quantile(0.95, sum by (le) ({rate(f'corella_pd_{stage}_seconds_bucket')}))", stage)
            for stage in ("allocate", "prefill", "transfer", "handover")
        ]),
    ],
}


def dashboard():
    panels, y = [], 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        width = COLUMNS // min(len(row), 4)
        for index, (name, unit, about, queries) in enumerate(row):
            x = index * width % COLUMNS
            panels.append(panel(len(panels) + 1, name, unit, about, queries, x, y, width))
            if x + width >= COLUMNS or index + 1 == len(row):
                y += 8
    return {
        "uid": "corella",
        "title": "Corella",
        "tags": ["corella", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables()},
        "panels": panels,
    }


def panel(panel_id, title, unit, about, queries, x, y, width):
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": 8},
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {"fillOpacity": 10, "showPoints": "never", "spanNulls": False},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(queries)
        ],
    }


def variables():
    def label(name, within):
        query = f"label_values(corella_steps_total{within}, {name})"
        return {
            "name": name,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }

    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return [source, label("model_name", ""), label("instance", '{model_name=~"$model_name"}')]


if __name__ == "__main__":
    DASHBOARD.write_text(json.dumps(dashboard(), indent=2) + "\n")
