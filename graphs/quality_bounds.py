"""What of a bundle its user should know: rounding that costs too much, texts that never end. The bounds and the words.

Owns: the bounds. Does not own: measuring (`export/verify/quality.py`, `export/verify/draft_accuracy.py`), showing
(`cli`), what makes a graph wrong instead of coarse (`export/verify/tolerances.py`).
"""

from mirrorsd.graphs.manifest import DraftAccuracy, Manifest, QualityEntry, TokenEntry

LARGEST_PERPLEXITY_RATIO = 1.05
SMALLEST_TOP1_AGREEMENT = 0.90
LARGEST_DIVERGENCE = 0.1
SMALLEST_ACCEPTED_SHARE = 0.97


def warnings_of(manifest: Manifest) -> tuple[str, ...]:
    """Say what in a bundle is beyond the bounds or missing, one sentence each."""
    return (
        *end_warnings(manifest.tokens),
        *quality_warnings(manifest.quality),
        *draft_warnings(manifest.draft_accuracy),
    )


def end_warnings(tokens: TokenEntry) -> tuple[str, ...]:
    """Say that no token ends a text; nothing where one does.

    >>> end_warnings(TokenEntry(eos_ids=(2,), bos_id=None, pad_id=None))
    ()
    """
    if tokens.eos_ids:
        return ()
    return (
        "no token ends a text, so that each one runs to its longest length: neither the target's configs nor its "
        "tokenizer name one; set eos_token_id in its generation_config.json and export again",
    )


def quality_warnings(quality: QualityEntry | None) -> tuple[str, ...]:
    """Say what the target's precision costs beyond the bounds; nothing where all is well or nothing was measured.

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
    if not quality.mean_divergence <= LARGEST_DIVERGENCE:
        found.append(
            f"the distributions diverge from the fp32 model's by {quality.mean_divergence:.2f} nats, above "
            f"{LARGEST_DIVERGENCE}: {advice}"
        )
    return tuple(found)


def draft_warnings(accuracy: DraftAccuracy | None) -> tuple[str, ...]:
    """Say that compression costs accepted length beyond the bound, or that too little was accepted to tell."""
    if accuracy is None or accuracy.accepted_share >= SMALLEST_ACCEPTED_SHARE:
        return ()
    if is_surely_lossy(accuracy):
        return (f"{loss_line(accuracy)}: texts stay the same, but come more slowly",)
    return (f"{loss_line(accuracy)}: too few to tell whether compression costs any",)


def is_surely_lossy(accuracy: DraftAccuracy) -> bool:
    """Whether even the upper bound of what is left is below what is wanted.

    >>> entry = DraftAccuracy(scheme="int8", agreement=(0.9,), accepted_before=0.02, accepted_after=0.01, num_windows=9,
    ...                       num_positions=9, share_interval=(0.0, 1.0))
    >>> is_surely_lossy(entry)
    False
    """
    high = accuracy.accepted_share if accuracy.share_interval is None else accuracy.share_interval[1]
    return high < SMALLEST_ACCEPTED_SHARE


def loss_line(accuracy: DraftAccuracy) -> str:
    """What compression leaves of the accepted length, in words."""
    low, high = accuracy.share_interval or (accuracy.accepted_share, accuracy.accepted_share)
    counts = (
        f"{accuracy.accepted_after:.2f} of {accuracy.accepted_before:.2f} tokens over {accuracy.num_windows} windows"
    )
    return (
        f"{accuracy.scheme} weights keep {accuracy.accepted_share:.1%} ({low:.0%} to {high:.0%}) of the draft's "
        f"accepted length ({counts})"
    )
