"""Many clients at once on a server with the built-in model, some of which leave early: nothing may be lost or mixed up.

    python scripts/soak_server.py [--seconds 120] [--clients 64] [--slots 8] [--json]

Every request of a pool is first answered alone. Then clients draw requests from the pool, and wait for the answer or
leave at a random moment. At the end every answer has to be that of its request alone, all requests have to be accounted
for and all slots free, no program may have been compiled, and the server's memory has to be where it was. Exit status 1
says that something of this did not hold. It needs the `test` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

POOL = 48
CONTEXT = 1024
PREFIX_CACHE_BYTES = 8 * 2**20
"""Less than the pool's prefixes take, so that memory is full early and some have to make room."""

LEAVES = 0.3
"""Share of the requests whose client does not wait for the end."""

MOST_GROWTH = 0.03
"""Of memory, between the second quarter of the time and the last."""

WORDS = (
    "the capital of France is a bird and Once upon time there was river stone green under small house".split()
)


@dataclasses.dataclass
class Tally:
    """What has come of the requests."""

    equal: int = 0
    different: list[str] = dataclasses.field(default_factory=list)
    left: int = 0
    refused: int = 0
    failed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    tokens: int = 0


def pool_of_requests(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Chats and completions of all kinds, each with its endpoint."""
    rng = random.Random(seed)
    pool = []
    for number in range(POOL):
        text = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 20, 90, 250])))
        fields: dict[str, Any] = {
            "seed": number,
            "temperature": rng.choice([0, 0.7, 1.3]),
            "top_p": rng.choice([1, 0.9]),
            "frequency_penalty": rng.choice([0, 0.5]),
            "max_tokens": rng.choice([1, 8, 40, 120]),
            "ignore_eos": rng.random() < 0.5,
            "n": rng.choice([1, 1, 1, 2]),
        }
        if rng.random() < 0.2:
            fields["stop"] = ["e", " is"]
        if rng.random() < 0.5:
            pool.append(("/v1/completions", fields | {"prompt": text, "logprobs": rng.choice([None, 2])}))
            continue
        if rng.random() < 0.3:
            fields |= {"ignore_eos": False, "response_format": {"type": "json_object"}}
        elif rng.random() < 0.3:
            fields["chat_template_kwargs"] = {"enable_thinking": True}
        pool.append(("/v1/chat/completions", fields | {"messages": [{"role": "user", "content": text}]}))
    return pool


def answer_of(reply: dict[str, Any]) -> Any:
    """What two answers to one request have in common."""
    choices = [
        {key: value for key, value in choice.items() if key != "logprobs"}
        | {"logprobs": len(choice["logprobs"]["tokens"]) if choice.get("logprobs") else None}
        for choice in reply["choices"]
    ]
    return choices, reply["usage"]["completion_tokens"]


def put_together(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """A reply from the pieces of its stream."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        for part in piece["choices"]:
            new = {"index": part["index"], "finish_reason": None, "logprobs": None}
            choice = choices.setdefault(part["index"], new)
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
            if part["logprobs"] is not None:
                told = choice["logprobs"] or {"tokens": []}
                choice["logprobs"] = {"tokens": told["tokens"] + part["logprobs"]["tokens"]}
            if "text" in part:
                choice["text"] = choice.get("text", "") + part["text"]
                continue
            message = choice.setdefault("message", {"role": "assistant", "content": "", "refusal": None})
            for key in ("content", "reasoning_content"):
                if part["delta"].get(key):
                    message[key] = message.get(key, "") + part["delta"][key]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": pieces[-1]["usage"]}


async def ask(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], *, stream: bool
) -> dict[str, Any]:
    """The reply to a request.

    Raises:
        httpx.HTTPStatusError: it was refused.
    """
    if not stream:
        response = await client.post(path, json=fields)
        response.raise_for_status()
        return response.json()
    pieces = []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=fields | options) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: ")))
                if "error" in pieces[-1]:
                    raise RuntimeError(pieces[-1]["error"]["message"])
    return put_together(pieces)


async def one_client(
    client: httpx.AsyncClient,
    pool: list[tuple[str, dict[str, Any]]],
    expected: list[Any],
    tally: Tally,
    rng: random.Random,
    until: float,
) -> None:
    """Asks and asks again, until the time is over."""
    while time.monotonic() < until:
        number = rng.randrange(len(pool))
        path, fields = pool[number]
        asking = ask(client, path, fields, stream=rng.random() < 0.5)
        patience = rng.expovariate(1.0) if rng.random() < LEAVES else None
        try:
            reply = await asyncio.wait_for(asking, patience)
        except TimeoutError:
            tally.left += 1
            continue
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 429:
                tally.failed[str(error.response.status_code)] += 1
            tally.refused += error.response.status_code == 429
            await asyncio.sleep(rng.random())
            continue
        except (httpx.HTTPError, RuntimeError) as error:
            tally.failed[repr(error)] += 1
            continue
        tally.tokens += reply["usage"]["completion_tokens"]
        if answer_of(reply) == expected[number]:
            tally.equal += 1
        else:
            tally.different.append(f"request {number}: {answer_of(reply)} instead of {expected[number]}")


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    # On a connection of its own: one that has idled may be closed under the request.
    text = (await client.get("/metrics", headers={"connection": "close"})).text
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def soak(address: str, seconds: float, clients: int, seed: int) -> dict[str, Any]:
    """Runs the clients, and returns the figures."""
    limits = httpx.Limits(max_connections=clients + 4, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
        pool = pool_of_requests(seed)
        expected = [answer_of(await ask(client, path, fields, stream=False)) for path, fields in pool]
        before = await metrics(client)
        tally, start = Tally(), time.monotonic()
        running = [
            asyncio.create_task(
                one_client(client, pool, expected, tally, random.Random(f"{seed} {index}"), start + seconds)
            )
            for index in range(clients)
        ]
        memory: list[tuple[float, float]] = []
        busiest = 0.0
        while not all(task.done() for task in running):
            now = await metrics(client)
            memory.append((time.monotonic() - start, now["process_resident_memory_bytes"]))
            busiest = max(busiest, now["qwen35_slots_occupied"] + now["qwen35_queued_requests"])
            await asyncio.sleep(seconds / 60)
        await asyncio.gather(*running)
        elapsed = time.monotonic() - start
        while (after := await metrics(client))["qwen35_slots_occupied"] or after["qwen35_queued_requests"]:
            if time.monotonic() - start > seconds + 60:
                break
            await asyncio.sleep(0.1)
    ended = {
        outcome: after[f'qwen35_ended_requests_total{{outcome="{outcome}"}}']
        - before[f'qwen35_ended_requests_total{{outcome="{outcome}"}}']
        for outcome in ("finished", "cancelled", "failed")
    }
    submitted = after["qwen35_submitted_requests_total"] - before["qwen35_submitted_requests_total"]
    second, last = (
        statistics.median(nbytes for at, nbytes in memory if low <= at / seconds <= low + 0.25 + slack)
        for low, slack in ((0.25, 0.0), (0.75, 1e9))
    )
    return {
        "clients": clients,
        "seconds": elapsed,
        "answers_equal": tally.equal,
        "answers_different": len(tally.different),
        "examples": tally.different[:3],
        "clients_left": tally.left,
        "refused_queue_full": tally.refused,
        "failed": dict(tally.failed),
        "tokens_per_second": tally.tokens / elapsed,
        "most_requests_at_once": busiest,
        "engine_submitted": submitted,
        "engine_ended": ended,
        "engine_unaccounted": submitted - sum(ended.values()),
        "slots_occupied_at_end": after["qwen35_slots_occupied"],
        "queued_at_end": after["qwen35_queued_requests"],
        "programs_compiled": after["qwen35_compiled_programs"] - before["qwen35_compiled_programs"],
        "prefix_cache_hits": after["qwen35_prefix_cache_hits_total"]
        - before["qwen35_prefix_cache_hits_total"],
        "prefixes_evicted": after["qwen35_prefix_cache_evicted_total"],
        "prefix_cache_mib": after["qwen35_prefix_cache_held_bytes"] / 2**20,
        "memory_mib_second_quarter": second / 2**20,
        "memory_mib_last_quarter": last / 2**20,
        "memory_growth": last / second - 1,
        "open_files_more": after["process_open_fds"] - before["process_open_fds"],
    }


def faults(figures: dict[str, Any]) -> list[str]:
    """What did not hold."""
    checks = {
        "some answers were compared": figures["answers_equal"] > 0,
        "every answer is that of its request alone": not figures["answers_different"],
        "no request failed": not figures["failed"] and not figures["engine_ended"]["failed"],
        "every request is accounted for": not figures["engine_unaccounted"],
        "all slots are free": not figures["slots_occupied_at_end"] and not figures["queued_at_end"],
        "no program was compiled": not figures["programs_compiled"],
        f"memory grew by at most {MOST_GROWTH:.0%}": figures["memory_growth"] <= MOST_GROWTH,
    }
    return [check for check, holds in checks.items() if not holds]


@contextlib.contextmanager
def server(slots: int, queue: int, dtype: str) -> Iterator[str]:
    """A server of the built-in model, and its address."""
    options = f"--port 0 --slots {slots} --queue {queue} --context {CONTEXT} --prefill-tokens 128".split()
    options += ["--prefix-cache-bytes", str(PREFIX_CACHE_BYTES), "--dtype", dtype]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-m", "qwen35_jax", "serve", *options], stderr=output)
        try:
            while (found := re.search(r"is served at (\S+)", log.read_text())) is None:
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start: {log.read_text()}")
                time.sleep(0.2)
            yield found[1]
            process.send_signal(signal.SIGTERM)
            if process.wait(60):
                raise SystemExit(
                    f"the server ended with status {process.returncode}: {log.read_text()[-2000:]}"
                )
        finally:
            if process.poll() is None:
                process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="default 120")
    parser.add_argument("--clients", type=int, default=64, help="at the same time (default 64)")
    parser.add_argument("--slots", type=int, default=8, help="of the server (default 8)")
    parser.add_argument("--queue", type=int, default=64, help="of the server (default 64)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the requests and of who leaves when (default 0)"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        help="of the server (default float32; in bfloat16 a batch may round otherwise than one request alone, and a "
        "draw that falls between two tokens goes the other way)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with server(args.slots, args.queue, args.dtype) as address:
        figures = asyncio.run(soak(address, args.seconds, args.clients, args.seed))
    found = faults(figures)
    if args.json:
        print(json.dumps(figures | {"faults": found}))
    else:
        for name, value in figures.items():
            print(f"{name.replace('_', ' ')}: {round(value, 3) if isinstance(value, float) else value}")
        print("\n".join(f"DID NOT HOLD: {fault}" for fault in found) or "all of it held")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
