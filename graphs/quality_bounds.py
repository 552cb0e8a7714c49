"""When a target's precision costs so much quality that its user should know: the bounds, and the words.

Owns: the two bounds. Does not own: measuring (`export/quality.py`), showing (`cli`).
"""

from mirrorsd.graphs.manifest import QualityEntry

LARGEST_PERPLEXITY_RATIO = 1.05
SMALLEST_TOP1_AGREEMENT = 0.90


def quality_warnings(quality: QualityEntry | None) -> tuple[str, ...]:
    """Say what is beyond the bounds, one sentence each; nothing where all is well or nothing was measured.

    >>> entry = QualityEntry(text="t", positions=9, perplexity=12.0, reference_perplexity=10.0, top1_agreement=0.95)
    >>> quality_warnings(entry)[0].split(":")[0]
    'perplexity rises from 10.00 to 12.00, by more than 5%'
    """
    if quality is None:
        return ()
    found = []
    advice = "choose a higher precision, smaller blocks or other rounding"
    if not quality.perplexity <= LARGEST_PERPLEXITY_RATIO * quality.reference_perplexity:  # NaN warns too
        found.append(
            f"perplexity rises from {quality.reference_perplexity:.2f} to {quality.perplexity:.2f}, by more than "
            f"{LARGEST_PERPLEXITY_RATIO - 1:.0%}: {advice}"
        )
    if not quality.top1_agreement >= SMALLEST_TOP1_AGREEMENT:
        found.append(
            f"the best token is the fp32 model's at {quality.top1_agreement:.1%} of {quality.positions} positions, "
            f"below {SMALLEST_TOP1_AGREEMENT:.0%}: {advice}"
        )
    return tuple(found)
