"""`report.html`: one file that needs no network, light or dark as the reader likes it.

Owns: the page, its colours and words, the summary's form. Does not own: figures (`tables`), drawings (`charts`, and the
`timeline` of the output).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from mirrorsd.cli.bench import charts, tables
from mirrorsd.cli.bench.running import REFERENCE
from mirrorsd.cli.output.timeline import Timeline, draw
from mirrorsd.cli.output.trace_picture import read_trace
from mirrorsd.graphs.whole_file import write_whole

SUMMARY, REPORT = "summary.json", "report.html"
Cells = tuple[str, ...]
_COLUMNS = {
    "speed": "tokens/s",
    "over_plain": "times plain",
    "decode_over_plain": "decoding",
    "before_loops_over_plain": "before loops",
    "tokens_per_step": "tokens/step",
    "ttft": "first token",
    "reuse": "windows came from",
}
_LEAST_SHARE = 0.005
_COLOURS = ("#2a6fb5", "#d9822b", "#2f8f6b", "#b5478a", "#7a5cc9", "#8a7a1f", "#3aa0b8", "#c2503f", "#6b7280")
_DARK = ("#5b9bdc", "#e39a4c", "#4fb48c", "#d470ab", "#a189e6", "#b8a83f", "#5fc0d6", "#e0705f", "#a3acb8")
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2733;--soft:#5f6b78;--line:#dde3e9;--card:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--paper:#12171d;--ink:#e8edf2;--soft:#9aa7b4;--line:#2b343e;--card:#1a212a}}
body{margin:0 auto;max-width:1000px;padding:1.5rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .3rem}p{margin:.3rem 0}.soft{color:var(--soft)}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:8px;padding:.5rem;margin-top:.5rem}
.chart{width:100%;min-width:620px;display:block;font-size:12px}.chart text{fill:var(--ink)}
.chart .soft{fill:var(--soft);font-size:11px}.grid{stroke:var(--line)}
.one{stroke:var(--soft);stroke-dasharray:4 3}.end{stroke:var(--ink);stroke-width:1.2;fill:none;opacity:.75}
.dot{fill-opacity:.65}.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin-top:.4rem}
.legend svg{width:12px;height:12px;vertical-align:-1px;margin-right:.35rem}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap}th{color:var(--soft);font-weight:500}
th:nth-child(-n+2),td:nth-child(-n+2),th:last-child,td:last-child{text-align:left}td:last-child{white-space:normal}
tr.first td{border-top:1px solid var(--line)}
.bad{border-left:4px solid #c8544f;padding-left:.8rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
"""


def summary(settings: Mapping[str, Any], runs: tables.Runs, own: Sequence[str], left_out: int) -> dict[str, Any]:
    """What `summary.json` says.

    Args:
        settings: how it was measured.
        runs: all answers.
        own: the entrants whose texts must be the same.
        left_out: questions that did not fit into the context.
    """
    differences = tables.find_differences(runs, own)
    others = [name for name in runs if name not in own]
    elsewhere = tables.find_differences(runs, [own[0], *others], with_ends=False) if others else []
    return {
        "settings": dict(settings),
        "identical": not differences,
        "differences": [asdict(difference) for difference in differences],
        "other_texts": {name: sum(found.method == name for found in elsewhere) for name in others},
        "left_out": left_out,
        "rows": tables.summarise(runs),
        "questions": tables.points(runs),
    }


def write(folder: Path, found: Mapping[str, Any]) -> None:
    """Write `summary.json` and `report.html` beside the answers.

    Raises:
        OSError: the folder cannot be written.
    """
    write_whole(folder / SUMMARY, f"{json.dumps(found, indent=1)}\n".encode())
    traces = {name: folder / f"trace-{name}.json" for name in found["settings"]["methods"]}
    timelines = {name: read_trace(path) for name, path in traces.items() if path.is_file()}
    write_whole(folder / REPORT, page(found, timelines).encode())


def page(found: Mapping[str, Any], timelines: Mapping[str, Timeline]) -> str:
    """The page of a summary, and what the devices did in one text of each method."""
    settings, rows = found["settings"], found["rows"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    compared = [name for name in methods if name != REFERENCE]
    places = {name: number % len(_COLOURS) for number, name in enumerate(compared)}
    title = f"{settings['bundle']}: {', '.join(methods)}"
    series = {row["method"]: row["accepted_at"] for row in rows if row["task"] == tables.ALL_TASKS}
    lines = {name: values for name, values in series.items() if values}
    parts = [
        f"<h1>{escape(title)}</h1>{_head(found)}",
        _section(
            "Speed-up by task",
            "Mean tokens per second over plain decoding's, prompts included; whiskers: 95 % of resampled questions.",
            charts.bars(rows, "over_plain", "interval", places),
            places,
        ),
        _section(
            "Decoding alone: without the prompts",
            "The same from the end of each prompt on.",
            charts.bars(rows, "decode_over_plain", "decode_interval", places),
            _among(places, rows, "decode_over_plain"),
        ),
        _section(
            "How much of a window is right",
            "Of the windows that have a token at this place, those right up to it.",
            charts.lines(lines, places),
            {name: place for name, place in places.items() if name in lines},
        ),
        _section(
            "Questions",
            "Each point is a question.",
            charts.cloud(found["questions"], places),
            _among(places, found["questions"], "tokens_per_step"),
        ),
        *(_timeline(name, timeline) for name, timeline in timelines.items()),
        f"<h2>All figures</h2><div class='wide'>{_table(rows)}</div>",
        f"<h2>How it was measured</h2>{_definitions(settings)}",
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}{_colours()}</style>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _head(found: Mapping[str, Any]) -> str:
    settings = found["settings"]
    num_asked = max(row["questions"] for row in found["rows"])
    sampled = "greedy" if not settings["temperature"] else f"T = {settings['temperature']:g}"
    words = [f"{num_asked} questions, {settings['runs']} {'runs' if settings['runs'] > 1 else 'run'}, {sampled}"]
    words.append(f"up to {settings['max_tokens']} tokens a turn, ends {settings['ends']}")
    if found["left_out"]:
        words.append(f"{found['left_out']} more questions do not fit into the context")
    line = f'<p class="soft">{escape("; ".join(words))}.</p>'
    if settings["card_is_paced"]:
        line += f"<p>Paced: the times are those of the card {escape(settings['device_map'])}, not of this machine.</p>"
    for name, count in found["other_texts"].items():
        said = f"{count} texts are others than ours" if count else "all texts are ours"
        line += f'<p class="soft">{escape(name)}: {said}.</p>'
    if found["identical"]:
        return line + ("<p>All methods wrote the same texts.</p>" if len(settings["methods"]) > 1 else "")
    first = found["differences"][0]
    return line + (
        f'<p class="bad">The texts differ: {len(found["differences"])} times, first in question '
        f"{escape(str(first['question_id']))} by {escape(first['method'])}.</p>"
    )


def _among(places: Mapping[str, int], rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, int]:
    """The methods of which `name` is known, with their colours."""
    known = {row["method"] for row in rows if row[name] is not None}
    return {method: place for method, place in places.items() if method in known}


def _section(title: str, words: str, drawing: str, shown: Mapping[str, int]) -> str:
    if not drawing:
        return ""
    return f'<h2>{title}</h2><p class="soft">{words}</p><div class="wide">{drawing}{_legend(shown)}</div>'


def _legend(places: Mapping[str, int]) -> str:
    items = (
        f'<span><svg viewBox="0 0 12 12" aria-hidden="true"><rect class="c{number}" width="12" height="12" rx="2"/>'
        f"</svg>{escape(name)}</span>"
        for name, number in places.items()
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _timeline(name: str, whole: Timeline) -> str:
    start = whole.start_ms + whole.length_ms / 2
    part = whole.between(start, start + whole.usual_stretch())
    words = escape("; ".join(whole.figures()))
    return (
        f"<h2>What the devices did: {escape(name)}</h2><p class='soft'>A few steps from the middle of the first "
        f"question. The whole text: {words}.</p><div class='wide'>{draw(part, 940)}</div>"
    )


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row's figures in words, by column; "" where there is nothing to say."""
    number = {name: row[name] for name in _COLUMNS if name in row}
    said = {name: "" if value is None else f"{value:.2f}" for name, value in number.items()}
    if row["interval"] is not None and row["method"] != REFERENCE:
        said["over_plain"] += f" ({row['interval'][0]:.2f}-{row['interval'][1]:.2f})"
    deviation = row["deviation_of_runs"]
    said["speed"] = f"{row['tokens_per_second']:.1f}" + ("" if deviation is None else f" \u00b1 {deviation:.1f}")
    said["ttft"] = "" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f} ms"
    shares = sorted(row["reuse_by_source"].items(), key=lambda pair: -pair[1])
    said["reuse"] = ", ".join(f"{source} {share:.0%}" for source, share in shares if share >= _LEAST_SHARE)
    return {_COLUMNS[name]: said[name] for name in _COLUMNS}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = "".join(f"<th>{name}</th>" for name in ("task", "method", *_COLUMNS.values()))
    lines, last = [], None
    for row in rows:
        is_first = row["task"] != last
        shown = (row["task"] if is_first else "", row["method"], *cells(row).values())
        kind = ' class="first"' if is_first else ""
        lines.append(f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in shown)}</tr>")
        last = row["task"]
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _definitions(settings: Mapping[str, Any]) -> str:
    """Settings, machine and versions, as pairs; a long list is its length."""
    pairs = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            said = ", ".join(f"{key} {what}" for key, what in value.items())
        elif name == "questions":
            said = str(len(value))
        elif isinstance(value, bool):
            said = "yes" if value else "no"
        else:
            said = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        pairs.append(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(said or 'none')}</dd>")
    return f"<dl>{''.join(pairs)}</dl>"


def _colours() -> str:
    """A fill and a stroke for every method, in both schemes."""

    def rules(colours: Sequence[str]) -> str:
        return "".join(
            f".c{place}{{fill:{colour}}}.s{place}{{stroke:{colour};fill:none;stroke-width:2}}"
            for place, colour in enumerate(colours)
        )

    return f"{rules(_COLOURS)}@media(prefers-color-scheme:dark){{{rules(_DARK)}}}"
