"""Many clients at once, in a process of their own: `python crowd.py URL TASK < JSON`, results as JSON.

Standard library only, so that it starts at once. TASK `ask` sends requests and compares their answers,
`probe` measures how long `/health` takes.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any
from urllib.parse import urlsplit


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


def message(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def text_of(answer: bytes) -> str:
    """The generated text of a whole answer, streamed or not; a failure's first line."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return head.decode("latin-1").partition("\r\n")[0]
    if b"event-stream" not in head:
        return json.loads(body)["generated_text"]
    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(line[6:]).get("text", "") for line in lines)


async def ask(url: str, case: dict[str, Any], rng: random.Random) -> str:
    """`right`, `left`, or what was answered instead."""
    reader, writer = await connected(url)
    try:
        writer.write(message(case["body"]))
        await writer.drain()
        if case["leaves"]:
            if rng.random() < 0.5:
                await reader.read(rng.randint(1, 2_000))
            if rng.random() < 0.5:
                writer.transport.abort()
            return "left"
        text = text_of(await reader.read())
        return "right" if text == case["expected"] else text
    finally:
        writer.close()


async def ask_all(url: str, work: dict[str, Any]) -> dict[str, int]:
    """Answers of all cases, so many at a time, counted."""
    free, rng = asyncio.Semaphore(work["concurrency"]), random.Random(work["seed"])

    async def one(case: dict[str, Any]) -> str:
        async with free:
            return await ask(url, case, rng)

    answers = await asyncio.gather(*(one(case) for case in work["cases"]))
    return {answer: answers.count(answer) for answer in set(answers)}


async def probe(url: str, work: dict[str, Any]) -> list[float]:
    """Seconds that `/health` took, time after time."""
    seconds = []
    for _ in range(work["count"]):
        begin = time.perf_counter()
        reader, writer = await connected(url)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        seconds.append(time.perf_counter() - begin)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        writer.close()
        await asyncio.sleep(work["pause"])
    return seconds


if __name__ == "__main__":
    task = {"ask": ask_all, "probe": probe}[sys.argv[2]]
    json.dump(asyncio.run(task(sys.argv[1], json.load(sys.stdin))), sys.stdout)
