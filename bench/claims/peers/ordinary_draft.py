"""Write a draft's main rows out as an ordinary model, which other runtimes read.

    python bench/claims/peers/ordinary_draft.py TARGET DRAFT OUTPUT

Its streams stay behind. An embedding that it shares with its target is taken from the target's checkpoint, and the two
halves of a head of low rank are multiplied: the same tokens, at the cost of a whole head. Runs where the peers are.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm", "lm_head.weight"
OWN_ENTRIES = ("head_rank", "shares_embedding")
"""Of config.json: what an ordinary model does not know."""


def main() -> None:
    """Write the model's folder."""
    target, draft, output = (Path(word) for word in sys.argv[1:4])
    output.mkdir(parents=True)
    for path in draft.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, output)
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    weights = ordinary_weights(load_file(draft / "model.safetensors"), config, target)
    left = {name: value for name, value in config.items() if name not in OWN_ENTRIES}
    (output / "config.json").write_text(json.dumps(left, indent=2) + "\n", encoding="utf-8")
    save_file(weights, output / "model.safetensors", {"format": "pt"})


def ordinary_weights(
    weights: dict[str, torch.Tensor], config: dict[str, object], target: Path
) -> dict[str, torch.Tensor]:
    """The weights with an embedding and a head of their own, in the draft's own numbers."""
    found = dict(weights)
    kind = found[f"{NORM}.weight" if f"{NORM}.weight" in found else f"{NORM}.norm.weight"].dtype
    if config.get("shares_embedding"):
        found[EMBEDDING] = read_tensor(target, EMBEDDING).to(kind)
    if config.get("head_rank"):
        down = found.pop(f"{NORM}.down.weight")
        found[f"{NORM}.weight"] = found.pop(f"{NORM}.norm.weight")
        found[HEAD] = (found[HEAD].float() @ down.float()).to(kind)
    return {name: value.contiguous() for name, value in found.items()}


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    """One tensor of a checkpoint, whichever of its files holds it.

    Raises:
        SystemExit: none does.
    """
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            if name in opened.keys():  # noqa: SIM118  it is no dictionary
                found: torch.Tensor = opened.get_tensor(name)
                return found
    raise SystemExit(f"no file *.safetensors in {folder} has the tensor {name!r}, which the draft shares")


if __name__ == "__main__":
    main()
