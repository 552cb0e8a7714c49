"""One call: load a bundle, generate, and see what the two devices did.

python samples/embedded_generate.py storyteller.mirror
"""

import sys

from mirrorsd import GenerationConfig, MirrorPipeline

with MirrorPipeline.load(sys.argv[1], device_map="auto") as pipe:
    result = pipe.generate("Once upon a time there was a little fox", GenerationConfig(max_new_tokens=120))

print(result.text)
stats = result.stats
print(f"\n{result.num_tokens} tokens by {result.method} decoding, {stats.tokens_per_second:.0f} tokens/s")
print(f"{stats.tokens_per_step:.2f} tokens per step; reused windows: {stats.reuse_rate:.0%}")
