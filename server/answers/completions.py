"""`POST /v1/completions`: texts to go on with; the answer is what comes after them."""

from typing import Any

from mirrorsd.server.answers.choices import Delta
from mirrorsd.server.answers.figures import usage
from mirrorsd.server.answers.job import Job, bundle_of, check_continued, ping
from mirrorsd.server.answers.logprobs import completion_logprobs
from mirrorsd.server.answers.settings_of import completion_settings
from mirrorsd.server.bundles.loaded import LoadedBundle
from mirrorsd.server.service import Service
from mirrorsd.server.transport.exchange import DONE, Exchange
from mirrorsd.server.wire.completions import CompletionRequest

_DEFAULT_TOKENS = 16


async def completions(service: Service, exchange: Exchange, body: CompletionRequest) -> None:
    """Go on with one text, or with several one after the other."""
    async with bundle_of(service, exchange, body.model, is_stream=bool(body.stream)) as bundle:
        limits = service.settings.limits
        settings = completion_settings(body, bundle.pipe.manifest.generation, limits)
        settings["max_new_tokens"] = min(body.most_tokens or _DEFAULT_TOKENS, bundle.context)
        prompts = _prompts(body)
        count = body.n or 1
        check_continued(body, len(prompts) * count)
        jobs: list[Job] = []
        for number, prompt in enumerate(prompts):
            token_ids = await _read(bundle, prompt, body)
            of_job = (service, exchange, body, bundle, token_ids, settings, count)
            jobs.append(Job(*of_job, first_index=number * count, kind="cmpl-"))
            settings["seed"] = jobs[0].configs[0].seed  # one for all, where it is drawn
            if body.echo:
                echo = prompt if isinstance(prompt, str) else bundle.tokenizer.decode(prompt)
                jobs[-1].begin_with(echo)
        await (_stream if body.stream else _whole)(exchange, body, jobs)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if isinstance(body.prompt[0], int):
        return [[token for token in body.prompt if isinstance(token, int)]]
    return [prompt for prompt in body.prompt if not isinstance(prompt, int)]


async def _read(bundle: LoadedBundle, prompt: str | list[int], body: CompletionRequest) -> list[int]:
    if not isinstance(prompt, str):
        return await bundle.encode(token_ids=prompt)
    if body.add_special_tokens:
        return await bundle.encode(prompt=prompt)
    return await bundle.encode(token_ids=await bundle.tokenize(prompt))


def _head(job: Job) -> dict[str, Any]:
    head = {"id": job.id, "object": "text_completion", "created": job.created}
    return {**head, "model": job.bundle.name, "system_fingerprint": job.bundle.fingerprint}


def _all_usage(jobs: list[Job]) -> dict[str, Any]:
    """Of several prompts: everything added up."""
    total: dict[str, Any] = {}
    for job in jobs:
        _add(total, usage(job.results))
    return total


def _add(total: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value


async def _whole(exchange: Exchange, body: CompletionRequest, jobs: list[Job]) -> None:
    head = _head(jobs[0])
    for job in jobs:
        await job.finish()
    choices = [
        _choice(job, choice.index, choice.text, choice.tokens, choice.finish_reason)
        for job in jobs
        for choice in job.choices
    ]
    await exchange.json({**head, "choices": choices, "usage": _all_usage(jobs), **await jobs[0].figures(jobs)})


async def _stream(exchange: Exchange, body: CompletionRequest, jobs: list[Job]) -> None:
    head = _head(jobs[0]) | ({"usage": None} if body.wants_usage else {})
    is_open = False
    for job in jobs:
        async with job.deltas() as deltas:
            async for delta in deltas:
                if not is_open:
                    is_open = True
                    await job.begin()
                elif delta is None:
                    await ping(exchange)
                if delta is not None:
                    if not delta.is_sent:
                        await _send(exchange, jobs, job, head, delta)
                    await job.mark(delta)
    if body.wants_usage:
        await exchange.event({**head, "choices": [], "usage": _all_usage(jobs)})
    await exchange.frame(DONE)
    await exchange.end_stream()


async def _send(exchange: Exchange, jobs: list[Job], job: Job, head: dict[str, Any], delta: Delta) -> None:
    choice = job.choices[delta.choice - job.first_index]
    reason = choice.finish_reason if delta.is_last else None
    is_end = delta.is_last and all(len(one.results) == len(one.choices) for one in jobs)
    more = {**job.extras(delta), **(await job.figures(jobs) if is_end else {})}
    if delta.text or delta.tokens or reason or more:
        said = _choice(job, delta.choice, delta.text, list(delta.tokens), reason)
        await exchange.event({**head, "choices": [said], **more})


def _choice(job: Job, index: int, text: str, tokens: list[Any], reason: str | None) -> dict[str, Any]:
    logprobs = completion_logprobs(job.bundle, tokens) if job.settings.get("logprobs") else None
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
