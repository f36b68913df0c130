"""The routes of the server: OpenAI's chat and completions, and ours for scores and rewards."""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from posttrain import __version__
from posttrain.base.errors import DataError, EngineError, PosttrainError, RewardError
from posttrain.base.pieces import Pieces
from posttrain.data.rows import Turns
from posttrain.engines.joining import Event, Job
from posttrain.engines.live import Busy
from posttrain.serving.answers import Form, Json, Replies, usage
from posttrain.serving.guard import error_body
from posttrain.serving.host import Host, Policy, TokenScore
from posttrain.serving.texts import Report
from posttrain.serving.wire import (
    MOST_REWARDED,
    ChatRequest,
    CompletionRequest,
    Message,
    RenderRequest,
    RewardRequest,
    Sampled,
    ScoreRequest,
)

log = logging.getLogger("posttrain")
TYPE = re.compile(r"^(constrained-)?str$|^list\[")  # pydantic's name of a type in the place of an error

GONE_EVERY_S = 0.2  # how often a waiting request asks whether its client is still there


def make_app(host: Host) -> FastAPI:
    app = FastAPI(title="posttrain", version=__version__, docs_url=None, redoc_url=None)
    app.state.host = host
    _add_errors(app)
    _add_models(app)
    _add_completions(app)
    _add_scores(app)
    return app


def _add_models(app: FastAPI) -> None:
    created = int(time.time())

    def model(name: str) -> Json:
        return {"id": name, "object": "model", "created": created, "owned_by": "posttrain"}

    @app.get("/health")
    async def health(request: Request) -> Json:
        policy = _host(request).policy
        live, waiting = policy.live.load if policy is not None else (0, 0)
        return {"status": "ok", "live": live, "waiting": waiting}

    @app.get("/v1/models")
    async def models(request: Request) -> Json:
        return {"object": "list", "data": [model(name) for name in _host(request).names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> Json:
        return model(name if name in _host(request).names else _host(request).names[0])


def _add_completions(app: FastAPI) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        policy = _policy(request)
        tokens = await _prompt(policy, body)
        form = Form(True, body.model or policy.name, body.top_logprobs if body.logprobs else None)
        job = _job(policy, body, form, tokens, body.max_completion_tokens or body.max_tokens)
        return await _replied(request, body, policy, Replies(form, policy.tokenizer, [job], policy.stops))

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        policy = _policy(request)
        if body.echo and body.stream:
            raise DataError("echo is not streamed: give one of the two")
        if not body.max_tokens and not body.echo:
            raise DataError("max_tokens: 0 gives nothing; with echo, the prompt's log-probabilities")
        given = body.prompts()
        prompts = await policy.apart(
            lambda: [policy.text_tokens(one) if isinstance(one, str) else one for one in given]
        )
        for index, pair in enumerate(zip(given, prompts, strict=True)):
            if not all(pair):
                raise DataError(f"prompt {index} is empty: there is nothing to complete; give at least one token")
            outside = next((token for token in pair[1] if not 0 <= token < policy.live.vocabulary), None)
            if outside is not None:
                raise DataError(f"prompt {index} has the token id {outside}; the model has {policy.live.vocabulary:,}")
        form = Form(False, body.model or policy.name, body.logprobs)
        if body.echo:
            return await _while_there(request, _echoed(policy, body, prompts, form))
        jobs = [_job(policy, body, form, tokens, body.max_tokens) for tokens in prompts]
        return await _replied(request, body, policy, Replies(form, policy.tokenizer, jobs, policy.stops))


def _add_scores(app: FastAPI) -> None:
    @app.post("/v1/score")
    async def score(body: ScoreRequest, request: Request) -> Json:
        """Each token of a text with its log-probability, its entropy, and the likeliest ones; `scored` is where the
        completion begins."""
        policy = _policy(request)
        if body.messages is not None:
            turns = [message.turn() for message in body.messages]
            if turns[-1]["role"] != "assistant":
                raise DataError("the last message, which is scored, must be the assistant's")
            prompt, whole = await policy.apart(policy.scored_tokens, turns, body.chat_template_kwargs, renders=True)
        else:
            prompt, whole = await policy.apart(
                lambda: (policy.text_tokens(body.prompt), policy.text_tokens(body.prompt + body.completion))
            )
        if not whole:
            raise DataError("there is nothing to score: give messages, or a prompt or completion")
        scored = next((i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
        scores = await policy.scores(whole, body.top_logprobs, body.model)
        return await policy.apart(_scored, policy, body, whole, min(scored, len(whole)), scores)

    @app.post("/v1/render")
    async def render(body: RenderRequest, request: Request) -> Json:
        """The prompt of a conversation as the model reads it."""
        policy = _policy(request)
        tokens = await _prompt(policy, body)
        if len(tokens) > policy.live.context:
            raise DataError(f"the prompt has {len(tokens):,} tokens; the server reads up to {policy.live.context:,}")
        return {"text": await policy.apart(Pieces(policy.tokenizer, special=True).whole, tokens), "tokens": tokens}

    @app.post("/reward")
    async def reward(body: RewardRequest, request: Request) -> Json:
        rewards = _host(request).rewards
        if rewards is None:
            raise DataError("no reward model is served: start the server with one, or with --reward-model")
        prompts, completions = _to_reward(body)
        short = body.truncated if isinstance(body.truncated, list) else [body.truncated] * len(completions)
        if len(completions) > MOST_REWARDED:
            raise DataError(f"{len(completions):,} completions; a request takes up to {MOST_REWARDED:,}")
        if len(short) != len(completions):
            raise DataError(f"{len(short)} values of truncated for {len(completions)} completions")
        return {"rewards": await rewards(prompts, completions, short)}


def _to_reward(body: RewardRequest) -> tuple[list[str | Turns], list[str]]:
    """The prompts and completions of a request."""
    if body.messages is not None:
        talks: list[list[Message]] = (
            [body.messages] if isinstance(body.messages[0], Message) else body.messages  # pyright: ignore
        )
        turns = [[message.turn() for message in talk] for talk in talks]
        if any(len(talk) < 2 or talk[-1]["role"] != "assistant" for talk in turns):
            raise DataError("each conversation must end with the assistant's message, after another's")
        return [talk[:-1] for talk in turns], [talk[-1]["content"] for talk in turns]
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    completions = [body.completion] if isinstance(body.completion, str) else body.completion
    if not prompts or not completions or len(prompts) != len(completions):
        raise DataError("give messages, or a prompt and a completion each, as many of the one as of the other")
    return [*prompts], completions


def _scored(policy: Policy, body: ScoreRequest, whole: list[int], scored: int, scores: list[TokenScore]) -> Json:
    """The object of a text's scores."""
    report = Report(policy.tokenizer)
    tokens = [
        {
            "id": (one := report.add(token, logprob, likely, last=number == len(whole))).id,
            "text": one.text,
            "logprob": logprob,
            "entropy": entropy,
            "top_logprobs": [{"id": of.id, "text": of.text, "logprob": of.logprob} for of in one.likely],
        }
        for number, (token, (logprob, entropy, likely)) in enumerate(zip(whole, scores, strict=True), 1)
    ]
    return {"model": body.model or policy.name, "scored": scored, "tokens": tokens}


async def _prompt(policy: Policy, body: RenderRequest) -> list[int]:
    given = body.turns(), body.chat_template_kwargs, body.continue_final_message
    return await policy.apart(policy.chat_tokens, *given, renders=True)


def _job(policy: Policy, body: Sampled, form: Form, tokens: list[int], limit: int | None) -> Job:
    """A prompt's completions: of `limit` tokens, or as many as there is room for."""
    context = policy.live.context
    room = context - len(tokens)
    if limit is not None and limit > context:
        raise DataError(f"max_tokens is {limit:,}; the server has room for {context:,} with the prompt")
    if room < 1:
        raise DataError(
            f"the prompt has {len(tokens):,} tokens; the server has room for {context:,} with the completion: shorten "
            "it, or start the server with a larger --context"
        )
    seed = secrets.randbits(63) if body.seed is None else body.seed
    sampling = body.sampling(seed, min(limit or room, room), policy.stops)
    return Job(tokens, sampling, policy.adapter(body.model), form.alternatives or 0, body.stream)


async def _replied(request: Request, body: Sampled, policy: Policy, replies: Replies) -> Response:
    events = policy.events(replies.jobs)
    if not body.stream:
        return await _while_there(request, replies.whole(events))
    first = await anext(events)  # what is refused, is refused before the stream begins

    async def all_events() -> AsyncIterator[Event]:
        yield first
        async for event in events:
            yield event

    async def lines() -> AsyncIterator[str]:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        try:
            async for chunk in replies.chunks(all_events(), with_usage):
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"
        except PosttrainError as error:
            yield f"data: {json.dumps(_error(error)[1])}\n\n"
        finally:
            await events.aclose()

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _while_there(request: Request, work: Awaitable[Json]) -> Response:
    """The result of `work` as JSON; when the client leaves, the work is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=GONE_EVERY_S)
            if not task.done() and await request.is_disconnected():
                return Response(status_code=499)
        return JSONResponse(task.result())
    finally:
        task.cancel()


async def _echoed(policy: Policy, body: CompletionRequest, prompts: list[list[int]], form: Form) -> Json:
    """The object of completions that begin with their prompts."""
    jobs = [_job(policy, body, form, tokens, body.max_tokens) for tokens in prompts] if body.max_tokens else []
    replies = Replies(form, policy.tokenizer, jobs, policy.stops)
    whole = await replies.whole(policy.events(jobs))
    choices: list[Json] = []
    for tokens in prompts:
        text, before = await policy.apart(Pieces(policy.tokenizer).whole, tokens), None
        if form.alternatives is not None:
            scores = await policy.scores(tokens, form.alternatives, body.model)
            before = await policy.apart(replies.prompt_logprobs, tokens, scores)
        for _ in range(body.n):
            one = whole["choices"][len(choices)] if jobs else {"text": "", "logprobs": None, "finish_reason": "length"}
            after = one["logprobs"]
            if after:
                after["text_offset"] = [len(text) + place for place in after["text_offset"]]
            logprobs = before and {name: before[name] + (after[name] if after else []) for name in before}
            choices.append({**one, "index": len(choices), "text": text + one["text"], "logprobs": logprobs})
    return {**whole, "choices": choices, "usage": usage(prompts, whole["usage"]["completion_tokens"])}


def _host(request: Request) -> Host:
    return request.app.state.host


def _policy(request: Request) -> Policy:
    policy = _host(request).policy
    if policy is None:
        raise DataError("the server has a reward model, which completes nothing: POST /reward")
    return policy


def _error(error: PosttrainError) -> tuple[int, Json]:
    """Status and body for an error."""
    status, code = 500, "server_error"
    if isinstance(error, Busy):
        status, code = 429, "rate_limit_exceeded"
    elif isinstance(error, DataError | RewardError):
        status, code = 400, "invalid_request_error"
    elif isinstance(error, EngineError):
        status = 503
    return status, error_body(str(error), code, code)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(PosttrainError)
    async def known(request: Request, error: PosttrainError) -> Response:
        status, body = _error(error)
        return JSONResponse(body, status, {"Retry-After": "1"} if status == 429 else None)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        errors = error.errors()
        # A value of several types has an error for each; those of types that it does not have say little.
        same = [one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]]
        first = next((one for one in same if not one["type"].endswith("_type")), same[0])
        where = ".".join(str(part) for part in first["loc"] if part != "body" and not TYPE.search(str(part)))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "there is no such parameter"
        elif first["type"] == "json_invalid":
            where, message = "", f"the body is not JSON: {first['ctx']['error']}"
        message = f"{where}: {message}" if where else message
        return JSONResponse(error_body(message, "invalid_request_error", param=where or None), 400)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return JSONResponse(error_body(error.detail, None), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return JSONResponse(error_body("the server failed; its log says why", None, "server_error"), 500)
