"""Running bundles: sessions, caches, draft expansion, verification, the scheduler, sampling, the public pipeline."""

from mirrorsd.devices.inventory import DeviceInventory, choose_device_map, device_inventory, missing_devices
from mirrorsd.runtime.decoding.protocol import GeneratedToken
from mirrorsd.runtime.pipeline import MirrorPipeline
from mirrorsd.runtime.reporting.results import Chunk, GenerationResult
from mirrorsd.runtime.reporting.stats import GenerationStats
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.texts.config import CancelToken, GenerationConfig, SpeculationConfig

__all__ = [
    "CancelToken",
    "Chunk",
    "DeviceInventory",
    "GeneratedToken",
    "GenerationConfig",
    "GenerationResult",
    "GenerationStats",
    "MirrorPipeline",
    "MirrorSession",
    "SpeculationConfig",
    "choose_device_map",
    "device_inventory",
    "missing_devices",
]
