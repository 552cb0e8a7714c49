"""Two conversations on one pair of devices: while one is verified, the other's draft runs.

python samples/two_sessions.py storyteller.mirror
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from mirrorsd import MirrorPipeline

QUESTIONS = ("Tell me a story about a fox.", "Tell me a story about a king.")


def tell(pipe: MirrorPipeline, question: str) -> str:
    """Answer one question in a session with caches of its own."""
    with pipe.session() as session:
        return session.generate(messages=[{"role": "user", "content": question}], max_new_tokens=80).text


with MirrorPipeline.load(sys.argv[1]) as pipe, ThreadPoolExecutor(len(QUESTIONS)) as pool:
    for question, story in zip(QUESTIONS, pool.map(lambda text: tell(pipe, text), QUESTIONS), strict=True):
        print(f"> {question}\n{story}\n")
