"""The kinds of heads, a file each: its network, the rules of its config, how it is trained. Each adds itself."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
