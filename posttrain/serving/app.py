"""The routes of the server: OpenAI's chat and completions, and posttrain's own routes for scores and rewards."""

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from posttrain import __version__
from posttrain.base.errors import DataError, EngineError, PosttrainError, RewardError
from posttrain.base.log import log
from posttrain.base.pieces import Pieces
from posttrain.data.rows import Turns
from posttrain.data.turns import common_prefix
from posttrain.engines import Completion
from posttrain.engines.live import Busy, Ended, Event, Job
from posttrain.serving import wire
from posttrain.serving.host import Host, Policy, TokenScore
from posttrain.serving.listening import error_body
from posttrain.serving.replies import Form, Replies, usage
from posttrain.serving.texts import Report
from posttrain.serving.wire import Json

TYPE = re.compile(r"^(constrained-)?str$|^list\[")  # names of types that pydantic adds to the location of an error

Record = Callable[[Completion], None]
EPISODE = "X-Posttrain-Episode"  # the header that names a recorded episode
GONE_EVERY_S = 0.2  # seconds between two checks whether the client of a waiting request is still connected


def make_app(host: Host) -> FastAPI:
    app = FastAPI(title="posttrain", version=__version__, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_models(app, host)
    _add_completions(app, host)
    _add_scores(app, host)
    return app


def _add_models(app: FastAPI, host: Host) -> None:
    created = int(time.time())

    def model(name: str) -> Json:
        return {"id": name, "object": "model", "created": created, "owned_by": "posttrain"}

    @app.get("/health")
    async def health() -> Json:
        live, waiting = host.policy.live.load if host.policy is not None else (0, 0)
        return {"status": "ok", "live": live, "waiting": waiting}

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [model(name) for name in host.names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        return model(name if name in host.names else host.names[0])


def _add_completions(app: FastAPI, host: Host) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: wire.ChatRequest, request: Request) -> Response:
        policy, recorder, tools = _policy(host), host.recorder, body.used_tools
        codec = turn = None
        if tools or recorder is not None:
            codec = await policy.in_thread(policy.codec, tools, body.chat_template_kwargs, renders=True)
        if recorder is not None:
            if body.n > 1 or body.continue_final_message:
                raise DataError("a recorded request has one reply: leave out n and continue_final_message")
            turns, kwargs = body.turns(), json.dumps(body.chat_template_kwargs, sort_keys=True)
            kind = (policy.adapter(body.model) or policy.name, json.dumps(tools, sort_keys=True), kwargs)
            policy.check_size(turns, tools)
            name = request.headers.get(EPISODE) or None
            turn = await policy.in_thread(recorder.turn, codec, kind, turns, name, renders=True)
        tokens = await _prompt(policy, body) if turn is None else turn.tokens
        form = Form(True, body.model or policy.name, body.top_logprobs if body.logprobs else None)
        job = _job(policy, body, form, tokens, body.max_completion_tokens or body.max_tokens)
        job.processed = recorder is not None
        replies = Replies(form, policy, [job], codec)
        if recorder is None or turn is None:
            return await _replied(request, body, policy, replies)
        record = partial(recorder.replied, turn, stops=job.sampling.stop)
        response = await _replied(request, body, policy, replies, record)
        response.headers[EPISODE] = turn.episode
        return response

    @app.post("/v1/completions")
    async def complete(body: wire.CompletionRequest, request: Request) -> Response:
        policy = _policy(host)
        if body.echo and body.stream:
            raise DataError("echo cannot be streamed: use echo or stream, not both")
        if not body.max_tokens and not body.echo:
            raise DataError("max_tokens 0 needs echo, which returns the prompt's log-probabilities")
        given = body.prompts()
        prompts = await policy.in_thread(
            lambda: [policy.text_tokens(prompt) if isinstance(prompt, str) else prompt for prompt in given]
        )
        for index, (prompt, tokens) in enumerate(zip(given, prompts, strict=True)):
            if not prompt or not tokens:
                raise DataError(f"prompt {index} is empty: there is nothing to complete; give at least one token")
            outside = next((token for token in tokens if not 0 <= token < policy.live.vocabulary), None)
            if outside is not None:
                known = policy.live.vocabulary
                raise DataError(f"prompt {index} has the token id {outside}; the model has only {known:,} tokens")
        form = Form(False, body.model or policy.name, body.logprobs)
        if body.echo:
            return await _while_there(request, _echoed(policy, body, prompts, form))
        jobs = [_job(policy, body, form, tokens, body.max_tokens) for tokens in prompts]
        return await _replied(request, body, policy, Replies(form, policy, jobs))


def _add_scores(app: FastAPI, host: Host) -> None:
    @app.post("/v1/score")
    async def score(body: wire.ScoreRequest) -> Json:
        """Return each token of a text with its log-probability, the entropy and the most likely tokens at its position.
        `scored` is the index of the completion's first token."""
        policy = _policy(host)
        if body.messages is not None:
            turns = [message.turn() for message in body.messages]
            if turns[-1]["role"] != "assistant":
                raise DataError("the last message is scored, so its role must be assistant")
            prompt, whole = await policy.in_thread(policy.scored_tokens, turns, body.chat_template_kwargs, renders=True)
        else:
            prompt, whole = await policy.in_thread(
                lambda: (policy.text_tokens(body.prompt), policy.text_tokens(body.prompt + body.completion))
            )
        if not whole:
            raise DataError("there is nothing to score: give messages, or a prompt or completion")
        scores = await policy.scores(whole, body.top_logprobs, body.model)
        return await policy.in_thread(_scored, policy, body, whole, common_prefix(prompt, whole), scores)

    @app.post("/v1/render")
    async def render(body: wire.RenderRequest) -> Json:
        """Return the prompt of a conversation as the model reads it."""
        policy = _policy(host)
        tokens = await _prompt(policy, body)
        if len(tokens) > policy.live.context:
            raise DataError(f"the prompt has {len(tokens):,} tokens; the server reads up to {policy.live.context:,}")
        text = await policy.in_thread(lambda: Pieces(policy.tokenizer, special=True).whole(tokens))
        return {"text": text, "tokens": tokens}

    @app.post("/v1/rewards")
    async def rewarded(body: wire.EpisodeReward) -> Json:
        """End a recorded episode and store it."""
        if (recorder := host.recorder) is None:
            raise DataError("this server records nothing: start it with --record FOLDER")
        if body.reward is None and not recorder.rewards.settings:
            raise DataError("give `reward`, or start the server with --config FILE, which has rewards")
        rewards = await asyncio.to_thread(recorder.reward, body.episode, body.reward, body.columns)
        return {"episode": body.episode, "rewards": rewards, "step": recorder.step}

    @app.post("/reward")
    async def reward(body: wire.RewardRequest) -> Json:
        if host.rewards is None:
            raise DataError("no reward model is served: start the server with one, or with --reward-model")
        prompts, completions = _to_reward(body)
        truncated = body.truncated if isinstance(body.truncated, list) else [body.truncated] * len(completions)
        if len(completions) > wire.MOST_REWARDED:
            raise DataError(f"{len(completions):,} completions; a request takes up to {wire.MOST_REWARDED:,}")
        if len(truncated) != len(completions):
            raise DataError(f"`truncated` has {len(truncated)} values, but there are {len(completions)} completions")
        return {"rewards": await host.rewards(prompts, completions, truncated)}


def _to_reward(body: wire.RewardRequest) -> tuple[list[str | Turns], list[str]]:
    """The prompts and completions of a request."""
    if body.messages is not None:
        talks: list[list[wire.Message]] = (
            [body.messages] if isinstance(body.messages[0], wire.Message) else body.messages  # pyright: ignore
        )
        turns = [[message.turn() for message in talk] for talk in talks]
        if any(len(talk) < 2 or talk[-1]["role"] != "assistant" for talk in turns):
            raise DataError("each conversation must end with the assistant's message, after at least one other message")
        return [talk[:-1] for talk in turns], [talk[-1]["content"] for talk in turns]
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    completions = [body.completion] if isinstance(body.completion, str) else body.completion
    if not prompts or not completions or len(prompts) != len(completions):
        raise DataError("give `messages`, or equally many prompts and completions")
    return [*prompts], completions


def _scored(policy: Policy, body: wire.ScoreRequest, whole: list[int], scored: int, scores: list[TokenScore]) -> Json:
    """The JSON object with the scores of a text."""
    report, tokens = Report(policy.tokenizer), list[Json]()
    for number, (id, (logprob, entropy, likely)) in enumerate(zip(whole, scores, strict=True), 1):
        token = report.add(id, logprob, likely, last=number == len(whole))
        top = [{"id": other.id, "text": other.text, "logprob": other.logprob} for other in token.likely]
        tokens.append({"id": id, "text": token.text, "logprob": logprob, "entropy": entropy, "top_logprobs": top})
    return {"model": body.model or policy.name, "scored": scored, "tokens": tokens}


async def _prompt(policy: Policy, body: wire.RenderRequest) -> list[int]:
    arguments = body.turns(), body.chat_template_kwargs, body.continue_final_message, body.used_tools
    return await policy.in_thread(policy.chat_tokens, *arguments, renders=True)


def _job(policy: Policy, body: wire.Sampled, form: Form, tokens: list[int], limit: int | None) -> Job:
    """A job for a prompt's completions, whose length is bounded by `limit` and by the room that the prompt leaves."""
    context = policy.live.context
    room = context - len(tokens)
    if limit is not None and limit > context:
        raise DataError(f"max_tokens is {limit:,}, but prompt and completion together have room for {context:,}")
    if room < 1:
        raise DataError(
            f"the prompt has {len(tokens):,} tokens, but prompt and completion together have room for {context:,}: "
            "shorten the prompt, or start the server with a larger --context"
        )
    seed = secrets.randbits(63) if body.seed is None else body.seed
    sampling = body.sampling(seed, min(limit or room, room), policy.stops)
    return Job(tokens, sampling, policy.adapter(body.model), form.alternatives or 0, body.stream)


async def _replied(
    request: Request, body: wire.Sampled, policy: Policy, replies: Replies, record: Record = lambda completion: None
) -> Response:
    events = _recorded(policy.events(replies.jobs), record)
    if not body.stream:
        return await _while_there(request, replies.whole(events))
    first = await anext(events)  # if the request is refused, this raises before the stream begins

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


async def _recorded(events: AsyncGenerator[Event], record: Record) -> AsyncGenerator[Event]:
    """The events, of which completions are recorded before they are sent."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Ended):
                await asyncio.to_thread(record, event.completion)
            yield event


async def _while_there(request: Request, work: Awaitable[Json]) -> Response:
    """Return the result of `work` as JSON; cancel `work` if the client disconnects."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=GONE_EVERY_S)
            if not task.done() and await request.is_disconnected():
                return Response(status_code=499)
        return JSONResponse(task.result())
    finally:
        task.cancel()


async def _echoed(policy: Policy, body: wire.CompletionRequest, prompts: list[list[int]], form: Form) -> Json:
    """The JSON object of completions that begin with their prompts."""
    jobs = [_job(policy, body, form, tokens, body.max_tokens) for tokens in prompts] if body.max_tokens else []
    replies = Replies(form, policy, jobs)
    whole = await replies.whole(policy.events(jobs))
    choices: list[Json] = []
    for tokens in prompts:
        text, before = await policy.in_thread(lambda ids: Pieces(policy.tokenizer).whole(ids), tokens), None
        if form.alternatives is not None:
            scores = await policy.scores(tokens, form.alternatives, body.model)
            before = await policy.in_thread(replies.prompt_logprobs, tokens, scores)
        for _ in range(body.n):
            nothing = {"text": "", "logprobs": None, "finish_reason": "length"}
            choice = whole["choices"][len(choices)] if jobs else nothing
            after = choice["logprobs"]
            if after:
                after["text_offset"] = [len(text) + offset for offset in after["text_offset"]]
            logprobs = before and {name: before[name] + (after[name] if after else []) for name in before}
            choices.append({**choice, "index": len(choices), "text": text + choice["text"], "logprobs": logprobs})
    return {**whole, "choices": choices, "usage": usage(prompts, whole["usage"]["completion_tokens"])}


def _policy(host: Host) -> Policy:
    if host.policy is None:
        raise DataError("this server hosts a reward model, which cannot generate completions: use POST /reward")
    return host.policy


def _error(error: PosttrainError) -> tuple[int, Json]:
    """The HTTP status and the body for an error."""
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
        # A value that may have several types yields one error for each; one that is not about the type says most.
        same = [other for other in errors if other["loc"][:2] == errors[0]["loc"][:2]]
        first = next((other for other in same if not other["type"].endswith("_type")), same[0])
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
        return JSONResponse(error_body("internal server error; see the server's log", None, "server_error"), 500)
