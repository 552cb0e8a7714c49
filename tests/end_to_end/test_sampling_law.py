"""The law of sampled text, end to end: export, ONNX Runtime, OpenVINO and the real chooser, against PyTorch."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mirrorsd import GenerationConfig, MirrorPipeline

PROMPT = "The old heron"
NUM_SEEDS = 700
TOP_K = 6
CRITICAL_1_PERCENT = {2: 9.210, 3: 11.345, 4: 13.277, 5: 15.086}
"""Chi-square at p = 0.01 by degrees of freedom."""


def next_token_law(target: Path, ids: list[int]) -> dict[int, float]:
    """Probabilities of the next token among the best `TOP_K`, by Hugging Face's own forward pass."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
    values, tokens = torch.topk(logits, TOP_K)
    return dict(zip(tokens.tolist(), torch.softmax(values, dim=0).tolist(), strict=True))


def chi_square(counts: Counter[int], law: dict[int, float]) -> tuple[float, int]:
    """Statistic and degrees of freedom; tokens with fewer than five expected draws are pooled."""
    assert set(counts) <= set(law)
    total = counts.total()
    cells = [(counts[token], total * share) for token, share in law.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    small = np.sum([cell for cell in cells if cell[1] < 5], axis=0)
    if np.size(small) == 2 and small[1] > 0:
        large.append((small[0], small[1]))
    return float(sum((found - wanted) ** 2 / wanted for found, wanted in large)), len(large) - 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "serial", "mirror"])
def test_sampled_tokens_follow_the_targets_own_distribution(
    tiny_pair: tuple[Path, Path], tiny_bundle: Path, method: str
) -> None:
    config = GenerationConfig(max_new_tokens=3, top_k=TOP_K, temperature=1.0, ignore_eos=True, method=method)
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        texts = [pipe.generate(PROMPT, config, seed=seed).token_ids for seed in range(NUM_SEEDS)]
        prompt_ids = pipe.generate(PROMPT, config, max_new_tokens=1).prompt_ids
    target, _ = tiny_pair
    first = Counter(text[0] for text in texts)
    statistic, freedom = chi_square(first, next_token_law(target, prompt_ids))
    assert statistic < CRITICAL_1_PERCENT[freedom]
    commonest, _ = first.most_common(1)[0]
    second = Counter(text[1] for text in texts if text[0] == commonest)
    statistic, freedom = chi_square(second, next_token_law(target, [*prompt_ids, commonest]))
    assert statistic < CRITICAL_1_PERCENT[freedom]
