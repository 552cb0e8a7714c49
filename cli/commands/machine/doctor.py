"""`mirrorsd doctor`: is this machine ready, what is wrong if not, and does a bundle work on each card that fits."""

from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

import typer
from rich import box
from rich.table import Table

from mirrorsd.cli.input import options
from mirrorsd.cli.output.console import add_row, print_json, print_table, progress
from mirrorsd.cli.output.failures import EXIT_FAILED, EXIT_NO_DEVICE
from mirrorsd.cli.output.leaving import end_on_ctrl_c
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.cli.output.readiness import (
    CardFit,
    Readiness,
    card_fits,
    fit_lines,
    picked_card,
    print_readiness,
    readiness,
)
from mirrorsd.device_maps import load_device_map
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.graphs.user_cache import keeping_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mirrorsd import GenerationConfig, GenerationResult, MirrorPipeline
    from mirrorsd.devices.hardware import DeviceDetail
    from mirrorsd.machine.doctor.energy import EnergyMeter

_PROMPT, _NUM_TOKENS = "Once upon a time", 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at; `advice` is empty where all is well."""

    name: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """A bundle on a card: seconds to load, speeds, and whether mirror decoding gave plain decoding's ids.

    `row_difference` is the largest difference of a target's logit between passes of one row and of several; 0.0: the
    methods cannot part by rounding. Joules per token are the whole machine's while it generated; None where it does not
    count them.
    """

    device_map: str
    load_seconds: float
    plain_tokens_per_second: float
    mirror_tokens_per_second: float
    identical: bool
    plain_joules_per_token: float | None = None
    mirror_joules_per_token: float | None = None
    row_difference: float = 0.0
    draft_length: float | None = None
    draft_length_at_export: float | None = None
    is_draft_fine: bool = True
    failure: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether the texts are right, and the draft is not dead."""
        return self.identical and self.is_draft_fine


@keeping_nothing()
def doctor(
    bundle: options.MaybeBundle = None,
    show_all: options.ShowAll = False,
    as_json: options.AsJson = False,
) -> None:
    """Look for what is wrong with this machine's set-up; with a bundle, try it."""
    end_on_ctrl_c()
    from mirrorsd.devices.hardware import hardware_details
    from mirrorsd.devices.inventory import cannot_run
    from mirrorsd.devices.layouts import usable_cores
    from mirrorsd.runtime import device_inventory

    inventory, details = device_inventory(), hardware_details()
    fits, picked = card_fits(inventory), picked_card(inventory)
    usable = [fit.name for fit in fits if not (fit.missing or fit.is_paced)]
    checks = [check_flavours(installed_versions()), check_cores(usable_cores().num_threads), check_cards(usable)]
    checks += [*check_versions(installed_versions(), details), check_energy()]
    misfits = [check_fit(fit) for fit in fits if fit.missing]
    tried, needs, reasons = usable, list[Check](), dict[str, str]()
    if bundle is not None:
        manifest = read_bundle(bundle)
        reasons = {name: cannot_run(load_device_map(name), manifest) for name in usable}
        tried = [name for name in usable if not reasons[name]]
        misfits += [unfit(name, reason) for name, reason in reasons.items() if reason]
        needs = [check for name in tried for check in check_memory(bundle, name)]
    tests = try_bundle(bundle, tried) if bundle else []
    if as_json:
        place = {"machine": describe_machine(), "versions": installed_versions(), "devices": asdict(inventory)}
        place["hardware"] = [asdict(detail) for detail in details]
        found = [asdict(check) for check in (*checks, *misfits, *needs)]
        results = {"checks": found, "self_tests": [asdict(test) for test in tests]}
        print_json(place | {"device_maps": usable} | results)
    else:
        print_readiness(judge(readiness(picked, usable_cores().num_threads), [*checks, *needs], tests))
        print_checks([*checks, *misfits, *needs] if show_all else [c for c in (*checks, *needs) if c.advice])
        print_tests(tests)
        if not show_all:
            untried = [f"{name} was not tried: {reason}." for name, reason in reasons.items() if reason]
            print("\n".join([*fit_lines(fits, picked), *untried]))
        print("What other commands keep: `mirrorsd cache list`. `mirrorsd cache clear --tuned` deletes all of it.")
    if isinstance(picked, str):
        raise typer.Exit(EXIT_NO_DEVICE)
    if any(not test.is_fine for test in tests):
        raise typer.Exit(EXIT_FAILED)


def judge(found: Readiness, checks: list[Check], tests: list[SelfTest]) -> Readiness:
    """The verdict, once a bundle has been tried: what failed comes first, what is worth a look behind it."""
    failed = [test.device_map for test in tests if not test.is_fine]
    if failed:
        return Readiness(False, f"the bundle fails on {', '.join(failed)}; the table says how.")
    num_advised = sum(bool(check.advice) for check in checks)
    cards = ", ".join(test.device_map for test in tests)
    tried = f" Plain and mirror decoding gave the same text on {cards}." if tests else ""
    advice = f" {num_advised} thing{'s' if num_advised > 1 else ''} to look at, below." if num_advised else ""
    return Readiness(found.is_ready, f"{found.words}{tried}{advice}")


def check_flavours(versions: dict[str, str]) -> Check:
    """Two flavours of ONNX Runtime overwrite each other's files."""
    from mirrorsd.devices.inventory import ONNX_PACKAGES

    found = [f"{name} {versions[name]}" for name in ONNX_PACKAGES if name in versions]
    advice = ""
    if len(found) > 1:
        names = " ".join(name for name in ONNX_PACKAGES if name in versions)
        advice = f"keep one flavour only: pip uninstall {names}, then install the one you want"
    return Check(name="ONNX Runtime", found=", ".join(found) or "none", advice=advice)


def check_versions(versions: dict[str, str], details: "Sequence[DeviceDetail]") -> list[Check]:
    """Pairs of versions that are known to fail together."""
    from mirrorsd.machine.doctor.known_versions import KNOWN_BAD, find_known_bad

    found = find_known_bad(versions, details)
    if not found:
        return [Check(name="known-bad versions", found=f"none of {len(KNOWN_BAD)} known pairs")]
    return [
        Check(name="known-bad versions", found=f"{bad.found}: {bad.what}", advice=f"{bad.advice} ({bad.source})")
        for bad in found
    ]


def check_cores(num_cores: int) -> Check:
    """Two devices on one processor need two cores."""
    advice = "" if num_cores > 1 else "with one core the two sides take turns: expect no gain from the mirror"
    return Check(name="cores", found=str(num_cores), advice=advice)


def check_energy() -> Check:
    """What counts joules here."""
    from mirrorsd.machine.doctor.energy import EnergyMeter

    return Check(name="energy", found=", ".join(EnergyMeter().names) or "unknown")


def check_cards(usable: list[str]) -> Check:
    """At least one device map must fit."""
    advice = "" if usable else "no device map fits; `mirrorsd devices` says what each of them misses"
    return Check(name="device maps", found=", ".join(usable) or "none", advice=advice)


def check_fit(fit: CardFit) -> Check:
    """Why a device map does not fit, which matters to whoever wants that one."""
    return unfit(fit.name, "; ".join(fit.missing))


def unfit(name: str, reason: str) -> Check:
    """A device map that is not tried."""
    return Check(name=f"map {name}", found=reason, advice="only if you want this one")


def check_memory(bundle: Path, name: str) -> list[Check]:
    """What the bundle will need on each device of a card, against what is free there."""
    from mirrorsd.machine.doctor.memory import free_memory, memory_needs

    needs = memory_needs(read_bundle(bundle), load_device_map(name))
    checks = []
    for device in dict.fromkeys(need.device for need in needs):
        there = [need for need in needs if need.device == device]
        needed, free = sum(need.total for need in there), free_memory(device)
        parts = ", ".join(f"{need.part} {need.total / 1e6:.0f}" for need in there)
        found = f"{needed / 1e6:.0f} MB of {'?' if free is None else f'{free / 1e6:.0f}'} free ({parts})"
        advice = ""
        if free is not None and needed > free:
            advice = "too little: close other programs, or export with --precision int8 or a smaller --context"
        checks.append(Check(name=f"{device}, {name}", found=found, advice=advice))
    return checks


def try_bundle(bundle: Path, names: list[str]) -> list[SelfTest]:
    """Generate a few tokens on every card."""
    with progress("trying", len(names)) as advance:
        tests = []
        for name in names:
            tests.append(self_test(bundle, name))
            advance(name)
    return tests


def self_test(bundle: Path, name: str) -> SelfTest:
    """Load a bundle on one card and generate by plain and by mirror decoding."""
    from mirrorsd import GenerationConfig, MirrorPipeline
    from mirrorsd.machine.doctor.draft_length import measure_draft
    from mirrorsd.machine.doctor.energy import EnergyMeter
    from mirrorsd.machine.doctor.row_invariance import largest_row_difference

    meter = EnergyMeter()
    config = GenerationConfig(max_new_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    started = perf_counter()
    try:
        with MirrorPipeline.load(bundle, device_map=name, speculation={"pad_rows_to": 8, "gamma": 6}) as pipe:
            load_seconds = perf_counter() - started
            plain, mirror = (pipe.generate(_PROMPT, config, method=method) for method in ("plain", "mirror"))
            speeds = speeds_by_turns(pipe, meter, config)
            worker, model = pipe.engine.target_worker, pipe.engine.target_model
            row_difference = worker.run(lambda: largest_row_difference(model.new_session()))
            draft = measure_draft(pipe)
    except DeviceError as error:
        return SelfTest(
            device_map=name,
            load_seconds=0.0,
            plain_tokens_per_second=0.0,
            mirror_tokens_per_second=0.0,
            identical=False,
            failure=str(error),
        )
    return SelfTest(
        device_map=name,
        load_seconds=round(load_seconds, 3),
        plain_tokens_per_second=round(speeds["plain"].tokens_per_second, 1),
        mirror_tokens_per_second=round(speeds["mirror"].tokens_per_second, 1),
        plain_joules_per_token=speeds["plain"].joules_per_token,
        mirror_joules_per_token=speeds["mirror"].joules_per_token,
        identical=plain.token_ids == mirror.token_ids,
        row_difference=row_difference,
        draft_length=draft.now,
        draft_length_at_export=draft.at_export,
        is_draft_fine=draft.is_fine,
        failure="; ".join([*mirror.stats.warnings, *([] if draft.is_fine and draft.now else [draft.words])]),
    )


class Speed(NamedTuple):
    """How fast a method wrote; None where nobody counts joules."""

    tokens_per_second: float
    joules_per_token: float | None


def speeds_by_turns(pipe: "MirrorPipeline", meter: "EnergyMeter", config: "GenerationConfig") -> dict[str, Speed]:
    """The better of two texts of each method, which read the prompt anew; one that nobody times stands before them.

    Passes have as many rows as they need: equal ones, which show that texts are the same, make plain decoding slow.
    """
    found: dict[Literal["plain", "mirror"], list[Speed]] = {"plain": [], "mirror": []}
    with closing(pipe.session({"pad_rows_to": 0})) as session:
        for _ in range(3):
            for method, speeds in found.items():
                session.forget()
                ask = partial(session.generate, _PROMPT, config, method=method)
                result, joules = measured(meter, ask)
                speeds.append(Speed(result.stats.tokens_per_second, joules))
    return {method: max(speeds[1:], key=lambda one: one.tokens_per_second) for method, speeds in found.items()}


def measured(
    meter: "EnergyMeter", generate: "Callable[[], GenerationResult]"
) -> "tuple[GenerationResult, float | None]":
    """A text, and joules per token while it was written."""
    meter.start()
    result = generate()
    joules = meter.joules()
    return result, None if joules is None else round(joules / max(1, result.num_tokens), 4)


def print_checks(checks: list[Check]) -> None:
    """Print what was found, and what to do about it."""
    if not checks:
        return
    table = Table("check", "found", "advice", box=box.SIMPLE_HEAD)
    for check in checks:
        add_row(table, check.name, check.found, check.advice or "fine")
    print_table(table)


def print_tests(tests: list[SelfTest]) -> None:
    """Print the trials of a bundle, a row per card."""
    if not tests:
        return
    speeds = ("plain tokens/s", "mirror tokens/s", "J/token")
    trials = Table("device map", "load s", *speeds, "identical", "rows differ by", "failure", box=box.SIMPLE_HEAD)
    for test in tests:
        speeds = (f"{test.plain_tokens_per_second:.1f}", f"{test.mirror_tokens_per_second:.1f}", energy_cell(test))
        verdict = "yes" if test.identical else "no"
        rows = f"{test.row_difference:.0e}" if test.row_difference else "nothing"
        add_row(trials, test.device_map, f"{test.load_seconds:.2f}", *speeds, verdict, rows, test.failure)
    print_table(trials)


def energy_cell(test: SelfTest) -> str:
    """Joules per token, plain and mirror."""
    if test.plain_joules_per_token is None or test.mirror_joules_per_token is None:
        return "unknown"
    return f"{test.plain_joules_per_token:.2f}, {test.mirror_joules_per_token:.2f}"
