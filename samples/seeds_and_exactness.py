"""A seed decides the text; the method only decides how fast it comes.

python samples/seeds_and_exactness.py storyteller.mirror
"""

import sys

from mirrorsd import GenerationConfig, MirrorPipeline

PROMPT = "The old king had three sons, and"

with MirrorPipeline.load(sys.argv[1]) as pipe:
    for seed in (1, 2, 3):
        config = GenerationConfig(max_new_tokens=60, temperature=0.8, top_p=0.95, seed=seed)
        texts = {method: pipe.generate(PROMPT, config, method=method).text for method in ("plain", "serial", "mirror")}
        print(f"seed {seed}, identical: {'yes' if len(set(texts.values())) == 1 else 'no'}")
        print(f"  {PROMPT}{texts['mirror']}")
