"""Stop a generation from another thread, and go on using the pipeline.

python samples/cancel.py storyteller.mirror
"""

import sys
import threading

from mirrorsd import Cancelled, MirrorPipeline

with MirrorPipeline.load(sys.argv[1]) as pipe:
    timer = threading.Timer(0.5, pipe.cancel)
    timer.start()
    try:
        pipe.generate("Once upon a time", max_new_tokens=900, ignore_eos=True)
    except Cancelled:
        print("cancelled within one step")
    timer.cancel()

    print(pipe.generate("Once upon a time", max_new_tokens=20).text)
