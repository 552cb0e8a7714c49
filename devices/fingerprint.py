"""What must be the same for a speed to be: a hash of machine, devices, versions and bundle."""

import hashlib
import platform
from dataclasses import replace
from pathlib import Path

from mirrorsd.device_maps import DeviceMap
from mirrorsd.devices.inventory import runtime_versions
from mirrorsd.devices.layouts import processor_name, usable_cores
from mirrorsd.graphs import names


def fingerprint(bundle: Path, card: DeviceMap) -> str:
    """Hash of processor, usable cores, all that the card says, its devices, the versions and the bundle's manifest.

    Of a card with several layouts, target's and draft's cores are those of the layout in force, and left out.
    """
    if len(card.layouts) > 1:
        target, draft = (replace(one, cores=(), threads=1) for one in (card.target, card.draft))
        card = replace(card, target=target, draft=draft)  # type: ignore[arg-type]
    places = (card.target, card.draft, card.exit, card.pace, card.speculation, card.layouts, card.shared_cores)
    parts = [platform.machine(), processor_name(), *map(str, (usable_cores(), *places))]
    if not (card.target.is_on_cpu and card.draft.is_on_cpu and card.exit.device == "target"):
        from mirrorsd.devices.hardware import device_names

        parts += device_names(card)
    parts += [f"{name}={found}" for name, found in runtime_versions().items()]
    digest = hashlib.sha256("|".join(parts).encode())
    digest.update((bundle / names.MANIFEST_FILE).read_bytes())
    return digest.hexdigest()[:16]
