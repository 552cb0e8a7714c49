"""What `mirrorsd tune` prints: the parts' times per layout, the contests, what was kept."""

from typing import TYPE_CHECKING, Literal

from rich.table import Table

from mirrorsd.cli.output.console import add_row, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mirrorsd.machine.tuning.contest import Contest
    from mirrorsd.machine.tuning.part_times import PartTimes

_CONTEST_COLUMNS = (
    *("layout", "method", "gamma", "passes", "window", "roots", "from", "exits"),
    *("tokens/s", "/ plain", "accepted", "reuse", "step ms", "law ms"),
)


def print_parts(parts_by_layout: "Mapping[str, PartTimes]") -> None:
    """Print the times of the parts over rows, alone and side by side, a table per layout."""
    for layout, parts in parts_by_layout.items():
        title = f"layout {layout}, parts alone"
        table = Table("rows", "prefix ms", "exit ms", "suffix ms", "draft round ms", title=title, title_justify="left")
        for rows, stages in parts.target.items():
            cells = [f"{stages.get(name, 0.0):.2f}" for name in ("prefix", "exit", "suffix")]
            draft = parts.draft.get(rows)
            add_row(table, str(rows), *cells, "" if draft is None else f"{draft:.2f}")
        print_table(table)
        print(
            f"side by side: target x {parts.target_slowdown:.2f}, draft x {parts.draft_slowdown:.2f}; "
            f"hand-over {parts.transfer_ms:.2f} ms"
        )


def print_contests(title: str, contests: "Sequence[Contest]") -> None:
    """Print who was how fast; `/ plain` is over the fastest plain decoding of all layouts."""
    plain = max(contest.tokens_per_second for contest in contests if contest.method == "plain")
    table = Table(*_CONTEST_COLUMNS, title=title, title_justify="left")
    for contest in contests:
        setting = contest.speculation
        window = (setting.gamma, setting.passes, setting.window)
        settings = (*window, setting.roots, setting.root_source, named_exits(setting.exits))
        figures = (contest.mean_accepted, contest.reuse_rate, contest.step_ms, contest.predicted_step_ms)
        add_row(
            table,
            contest.layout,
            contest.method,
            *(map(str, settings) if contest.method in ("mirror", "serial") else [""] * len(settings)),
            f"{contest.tokens_per_second:.1f}",
            f"{contest.tokens_per_second / plain:.2f}",
            *(f"{figure:.2f}" for figure in figures),
        )
    print_table(table)


def verdict(kind: str, contests: "Sequence[Contest]") -> str:
    """What was fastest for texts of a kind, and what that is over plain decoding."""
    plain = max(contest.tokens_per_second for contest in contests if contest.method == "plain")
    best = max(contests, key=lambda contest: contest.tokens_per_second)
    if best.method == "plain":
        return (
            f"{kind} texts: plain decoding is fastest here, {plain:.1f} tokens/s; drafting every window does not pay, "
            "so `auto` drafts where it foresees a gain, and repeats what a text has said"
        )
    setting = best.speculation
    how = f" (gamma {setting.gamma}, {setting.passes} passes, windows {setting.window}"
    how += f", {setting.roots} roots from {setting.root_source})" if best.method == "mirror" else ")"
    times = best.tokens_per_second / plain
    speed = f"{kind} texts: {best.method} is {times:.1f} times plain, {best.tokens_per_second:.1f} tokens/s"
    return speed + how if best.method in ("mirror", "serial") else speed


def named_exits(exits: Literal["all"] | tuple[int, ...]) -> str:
    """The exits in a word or two: `all`, `none`, `12,20`."""
    return exits if exits == "all" else ",".join(map(str, exits)) or "none"
